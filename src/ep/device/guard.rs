//! Ends the waits of streams when the world fails.
//!
//! No rank can take back a wait that is enqueued, and the driver does not know its cause. So when
//! the world fails, a thread writes to every word that this rank awaits. It repeats this until no
//! stream can be waiting any more, because a late signal or a reset may undo a write. Streams
//! drain, and their further results are invalid; the *status* word says so to the host and to
//! kernels. Words in device memory, which the host does not reach, have another writer that repeats
//! as well. An exchange that is dropped while a stream may wait leaves the guard running.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::bootstrap::Health;
use crate::device::{DeviceRange, PinnedMemory};
use crate::error::DeviceError;

/// Past every value that is waited for, counted in a circle of 32 bits.
pub(super) const POISON: u64 = 1 << 30;
/// Between two rounds of writing.
const ROUND: Duration = Duration::from_millis(1);

/// The words of one rank, guarded.
#[derive(Debug)]
pub(super) struct WaitBreaker {
    words: Arc<Words>,
    health: Arc<Health>,
}

/// Writer of words that the host does not reach.
pub(super) type DeviceFlagWriter = Box<dyn Fn() + Send + Sync>;

pub(super) struct Words {
    memory: PinnedMemory,
    /// Where the words lie that this rank waits for.
    awaited: Vec<usize>,
    /// Value past every one that is waited for there.
    poison: u64,
    /// Words that report the failed world; the first one is read.
    status: Vec<usize>,
    dead: u64,
    beyond: Option<DeviceFlagWriter>,
    /// Calls can be made.
    in_use: AtomicBool,
}

impl WaitBreaker {
    /// Watches the world for the words at these places. When it fails, they become the poison, and
    /// the status words `dead`.
    pub fn new(
        health: &Arc<Health>,
        memory: &PinnedMemory,
        (awaited, poison): (Vec<usize>, u64),
        (status, dead): (Vec<usize>, u64),
        beyond: Option<DeviceFlagWriter>,
    ) -> Result<Self, DeviceError> {
        // All lie inside: later looks cannot fail.
        for &place in awaited.iter().chain(&status) {
            memory.word(place)?;
        }
        let in_use = AtomicBool::new(true);
        let words = Arc::new(Words { memory: memory.clone(), awaited, poison, status, dead, beyond, in_use });
        let (watched, dead) = (Arc::downgrade(&words), Arc::downgrade(health));
        health.on_failure(move |_| {
            if let (Some(words), Some(health)) = (watched.upgrade(), dead.upgrade()) {
                words.release();
                words.drain(health);
            }
        });
        Ok(WaitBreaker { words, health: health.clone() })
    }

    /// The words, which are this rank's for as long as they are needed.
    pub fn words(&self) -> &Arc<Words> {
        &self.words
    }

    /// The first status: 0, the fault of a kernel, or the failed world.
    pub fn status(&self) -> u64 {
        self.words.status.first().map_or(0, |&place| self.words.get(place))
    }

    /// The value of an awaited word.
    pub fn value(&self, nth: usize) -> u64 {
        self.words.awaited.get(nth).map_or(0, |&place| self.words.get(place))
    }
}

impl Drop for WaitBreaker {
    fn drop(&mut self) {
        self.words.in_use.store(false, Ordering::Release);
        // If the world is dead, somebody drains already.
        if self.health.check().is_ok() && self.words.memory.is_claimed() {
            self.words.clone().drain(self.health.clone());
        }
    }
}

impl Words {
    /// Ends waits in a thread of its own, as soon as the world has failed and as long as there may
    /// be any.
    fn drain(self: Arc<Self>, health: Arc<Health>) {
        let (words, alive) = (Arc::clone(&self), Arc::clone(&health));
        let drain = move || {
            while words.in_use.load(Ordering::Acquire) || words.memory.is_claimed() {
                if alive.check().is_err() {
                    words.release_all();
                }
                std::thread::sleep(ROUND);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("sidelane-drain".into()).spawn(drain) {
            tracing::warn!(%error, "no thread ends the waits of streams");
            // Of a dead world, the waits that there are end at least once.
            if health.check().is_err() {
                self.release_all();
            }
        }
    }

    fn release_all(&self) {
        self.release();
        self.beyond.iter().for_each(|release| release());
    }

    fn release(&self) {
        self.status.iter().for_each(|&place| self.set(place, self.dead));
        for &place in &self.awaited {
            self.set(place, self.poison);
        }
    }

    /// Whether anything but the guard and the owners of its words has a claim on them: a stream may
    /// still run.
    pub fn is_claimed(&self) -> bool {
        self.memory.is_claimed()
    }

    /// The words as devices see them.
    pub fn range(&self) -> &DeviceRange {
        self.memory.range()
    }

    pub fn set(&self, place: usize, value: u64) {
        if let Ok(word) = self.memory.word(place) {
            word.store(value, Ordering::Release);
        }
    }

    pub fn get(&self, place: usize) -> u64 {
        self.memory.word(place).map_or(0, |word| word.load(Ordering::Acquire))
    }
}

impl std::fmt::Debug for Words {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Words").field("awaited", &self.awaited).finish_non_exhaustive()
    }
}
