//! Ends of waits: when the world fails, and when a rank is late.
//!
//! ```text
//!   world fails      WaitBreaker: poison -> words of the host, again and again     streams drain, status: invalid
//!                    BypassStream: poison -> words of the device
//!   deadline passed  Watch: the oldest call whose words are missing                the world fails, by the name of the late rank
//! ```
//!
//! No rank can take back a wait that is enqueued, and the driver does not know its cause. So when
//! the world fails, a thread writes to every word that this rank awaits. It repeats this until no
//! stream can be waiting any more, because a late signal or a reset may undo a write. Streams
//! drain, and their further results are invalid; the *status* word says so to the host and to
//! kernels. An exchange that is dropped while a stream may wait leaves the guard running.
//!
//! **Words in device memory** the host does not reach. Work that it enqueues on a stream may lie
//! behind the very wait that it should end: a device serves all streams from few queues, each
//! strictly in order. So streams are made until one is not blocked, since each takes the next
//! queue. Only the end of a world and the search for a late rank use this; no call does.
//!
//! **Deadlines.** A stream waits for ever. When the caller's thread has enqueued a call, it says
//! which words the stream awaits. A thread looks at them from the moment when the stream has come
//! to the call: time that the caller's own work takes before counts against no rank. The caller may
//! be many calls ahead of its stream, so the oldest call whose words are not all there counts.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::device_pool::CALLS_AHEAD;
use crate::bootstrap::{Health, Thread, turn, wait};
use crate::device::{Context, DeviceRange, PinnedMemory, Priority, Stream};
use crate::ep::state::EpState;
use crate::error::{DeviceError, Error, LaneError, PlanError};
use crate::exec::Awaited;
use crate::lane::COPY_ENGINE;
use crate::schedule::{ControlLayout, Flag};
use crate::sync::stream_use::{Drain, Request};

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
    /// The thread that ends waits for them.
    drain: Drain,
    rank: u32,
}

impl WaitBreaker {
    /// Watches the world for the words at these places. When it fails, they become the poison, and
    /// the status words `dead`.
    pub fn new(
        (rank, health): (u32, &Arc<Health>),
        memory: &PinnedMemory,
        (awaited, poison): (Vec<usize>, u64),
        (status, dead): (Vec<usize>, u64),
        beyond: Option<DeviceFlagWriter>,
    ) -> Result<Self, DeviceError> {
        // All lie inside: later looks cannot fail.
        for &place in awaited.iter().chain(&status) {
            memory.word(place)?;
        }
        let (memory, drain) = (memory.clone(), Drain::default());
        let words = Arc::new(Words { memory, awaited, poison, status, dead, beyond, drain, rank });
        let (watched, dead) = (Arc::downgrade(&words), Arc::downgrade(health));
        health.on_failure(move |_| {
            if let (Some(words), Some(health)) = (watched.upgrade(), dead.upgrade()) {
                words.release();
                if words.drain.begin() {
                    words.drain(health);
                }
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
        if self.words.drain.close(|| self.words.memory.is_claimed()) {
            self.words.clone().drain(self.health.clone());
        }
    }
}

impl Words {
    /// Ends waits in a thread of its own, as soon as the world has failed and as long as there may
    /// be any.
    fn drain(self: Arc<Self>, health: Arc<Health>) {
        let (words, alive) = (Arc::clone(&self), Arc::clone(&health));
        let thread = Thread::new("drain", self.rank, &health);
        let life = thread.clone();
        let drain = move |release: fn(&Words)| {
            while words.drain.is_needed(|| words.memory.is_claimed()) {
                turn();
                if alive.check().is_err() {
                    release(&words);
                }
                wait::nap(ROUND);
            }
        };
        let started = thread.spawn(move || {
            // The driver may be the reason of a panic. The host's words need none.
            if life.attempt(|| drain(Words::release_all)).is_err() {
                drain(Words::release);
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, "no thread ends the waits of streams");
            // Pending waits of a failed world end at least once.
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

    /// The request in one of the words, for the thread that serves it.
    pub fn request(&self, place: usize) -> Option<Request<'_>> {
        self.memory.word(place).ok().map(Request::new)
    }

    pub fn set(&self, place: usize, value: u64) {
        if let Ok(word) = self.memory.word(place) {
            // Release: a stream that awaits the word reads what this thread has written before.
            word.store(value, Ordering::Release);
        }
    }

    pub fn get(&self, place: usize) -> u64 {
        // Acquire: the stream set the word behind its earlier work.
        self.memory.word(place).map_or(0, |word| word.load(Ordering::Acquire))
    }
}

impl std::fmt::Debug for Words {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Words").field("awaited", &self.awaited).finish_non_exhaustive()
    }
}

/// As many as a device has queues at most.
const TRIES: usize = 32;
/// A stream that is not done for so long is held up.
const SILENT: Duration = Duration::from_millis(200);

/// The words that NICs write for one rank.
#[derive(Debug)]
pub(super) struct BypassStream {
    context: Arc<Context>,
    words: DeviceRange,
    /// Where they lie.
    awaited: Vec<u64>,
    copy: PinnedMemory,
    tried: Mutex<Tried>,
    /// The last time no stream got past.
    stuck: AtomicBool,
}

#[derive(Debug, Default)]
struct Tried {
    /// Not held up when it was last used.
    free: Option<Stream>,
    /// Blocked streams, [`TRIES`] at most: then nothing is tried until one of them has finished.
    /// They are freed when they have.
    behind: Vec<Stream>,
}

impl BypassStream {
    /// The words at these places, which are cleared.
    pub fn new(context: &Arc<Context>, words: &DeviceRange, awaited: Vec<u64>) -> Result<Self, DeviceError> {
        let copy = PinnedMemory::new(context, words.len() as usize)?;
        let aside = BypassStream {
            context: Arc::clone(context),
            words: words.clone(),
            awaited,
            copy,
            tried: Mutex::default(),
            stuck: AtomicBool::new(false),
        };
        let stream = Stream::new(context, Priority::Normal)?;
        aside.copy.write(0, &vec![0; aside.copy.len()])?;
        stream.copy(words.span(0, words.len())?, aside.copy.range().span(0, words.len())?)?;
        stream.synchronize()?;
        Ok(aside)
    }

    /// Ends all waits for them.
    pub fn release(&self) {
        self.run(|stream| {
            self.awaited.iter().try_for_each(|&at| stream.write::<u32>(self.words.word(at)?, POISON as u32))
        });
    }

    /// Whether all streams that were made are held up, so that waits go on.
    pub fn is_stuck(&self) -> bool {
        // Pairs with the stores of the thread that tries the streams.
        self.stuck.load(Ordering::Acquire)
    }

    /// Their values, in the order of their places, if the device says.
    pub fn values(&self) -> Option<Vec<u64>> {
        let len = self.words.len();
        let read = self.run(|stream| stream.copy(self.copy.range().span(0, len)?, self.words.span(0, len)?));
        let value = |&at: &u64| {
            let mut word = [0; 4];
            self.copy.read(at as usize, &mut word).ok()?;
            Some(u32::from_le_bytes(word).into())
        };
        if read { self.awaited.iter().map(value).collect() } else { None }
    }

    /// Has a stream do something, and waits until it is done. Whether it was.
    fn run(&self, enqueue: impl Fn(&Stream) -> Result<(), DeviceError>) -> bool {
        // A thread that captures meanwhile would have queries of these streams refused.
        self.context.driver().beside_captures(|| self.try_streams(enqueue))
    }

    fn try_streams(&self, enqueue: impl Fn(&Stream) -> Result<(), DeviceError>) -> bool {
        let Tried { free, behind } = &mut *self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        behind.retain(|stream| stream.is_done() != Ok(true));
        for _ in behind.len()..TRIES {
            let new = || Stream::new(&self.context, Priority::Highest).ok();
            let Some(stream) = free.take().or_else(new) else { return false };
            if enqueue(&stream).is_err() {
                return false;
            }
            let since = Instant::now();
            while since.elapsed() < SILENT {
                match stream.is_done() {
                    Ok(true) => {
                        *free = Some(stream);
                        // Release: a waiter that sees it sees what the stream has done.
                        self.stuck.store(false, Ordering::Release);
                        return true;
                    }
                    Ok(false) => std::thread::yield_now(),
                    Err(_) => return false,
                }
            }
            behind.push(stream);
        }
        // Release: as above.
        self.stuck.store(true, Ordering::Release);
        false
    }
}

/// Longest time between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// Watches the words that one stream awaits.
#[derive(Debug)]
pub(super) struct Watch {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Watched {
    fixed: Arc<EpState>,
    /// This rank's words.
    words: PinnedMemory,
    calls: Mutex<AwaitedCalls>,
    over: AtomicBool,
}

/// Calls whose words may be missing, in the order in which the stream makes them.
#[derive(Debug)]
struct AwaitedCalls {
    ahead: VecDeque<ExpectedWords>,
    /// The words of all of them, those of the oldest call first.
    words: VecDeque<Awaited>,
}

/// A call whose words the stream awaits.
#[derive(Debug)]
struct ExpectedWords {
    /// The stream leaves this mark when it has come to the call.
    mark: u64,
    /// How many words it awaits.
    words: usize,
    /// When it was first seen that it has.
    since: Option<Instant>,
}

impl Watch {
    /// Starts to look at the words of this rank.
    ///
    /// # Errors
    /// [`PlanError::NoWatch`] if there is no thread for it.
    pub fn new(fixed: &Arc<EpState>, words: &PinnedMemory) -> Result<Self, PlanError> {
        let (fixed, words) = (Arc::clone(fixed), words.clone());
        let paths = fixed.paths();
        let awaited = paths.local_peers().count() + paths.relays().count();
        let calls = AwaitedCalls {
            ahead: VecDeque::with_capacity(CALLS_AHEAD),
            words: VecDeque::with_capacity(CALLS_AHEAD * awaited),
        };
        let (calls, over) = (Mutex::new(calls), AtomicBool::new(false));
        let watched = Arc::new(Watched { fixed, words, calls, over });
        let here = Arc::clone(&watched);
        let hub = &here.fixed.shared.hub;
        let thread = Thread::new("watch", hub.rank(), hub.health());
        let thread = thread.spawn(move || here.look()).map_err(|_| PlanError::NoWatch)?;
        Ok(Watch { watched, thread: Some(thread) })
    }

    /// The stream awaits these words from its mark on.
    pub fn expect(&self, mark: u64, awaited: &[Awaited]) {
        if awaited.is_empty() {
            return;
        }
        let mut calls = self.watched.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // Words that cannot be read are the other thread's to report.
        let _ = self.watched.forget_ended(&mut calls);
        calls.ahead.push_back(ExpectedWords { mark, words: awaited.len(), since: None });
        calls.words.extend(awaited);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Seen at the next look, behind which the thread touches nothing of the owner.
        self.watched.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            wait::join(thread);
        }
    }
}

impl Watched {
    fn look(&self) {
        let lanes = &self.fixed.lanes;
        let period = (lanes.deadline / 16).min(PERIOD);
        // With the release in `drop`.
        while !self.over.load(Ordering::Acquire) && lanes.health.check().is_ok() {
            turn();
            if let Ok(Some(late)) = self.late(lanes.deadline) {
                let _ = self.fixed.fail(late);
            }
            wait::park(period);
        }
    }

    /// The value of a word of this rank.
    fn seen(&self, from: u32, flag: Flag) -> Result<u64, DeviceError> {
        let ranks = self.fixed.lanes.ranks();
        let word = self.words.word(ControlLayout::flag(from, flag, ranks) as usize)?;
        // Acquire: a signal of a peer stands behind the rows that it announces.
        Ok(word.load(Ordering::Acquire))
    }

    /// Forgets the oldest calls whose words are all there.
    fn forget_ended(&self, calls: &mut AwaitedCalls) -> Result<(), DeviceError> {
        while let Some(&ExpectedWords { words, .. }) = calls.ahead.front() {
            for &Awaited { from, flag, value } in calls.words.range(..words) {
                if self.seen(from, flag)? < value {
                    return Ok(());
                }
            }
            calls.ahead.pop_front();
            calls.words.drain(..words);
        }
        Ok(())
    }

    /// The first word that is missing when the deadline has passed.
    fn late(&self, deadline: Duration) -> Result<Option<Error>, DeviceError> {
        let rank = self.fixed.lanes.rank;
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        self.forget_ended(&mut calls)?;
        let AwaitedCalls { ahead, words } = &mut *calls;
        let Some(oldest) = ahead.front_mut() else { return Ok(None) };
        if self.seen(rank, Flag::Returned)? < oldest.mark {
            return Ok(None);
        }
        let waited = oldest.since.get_or_insert_with(Instant::now).elapsed();
        if waited < deadline {
            return Ok(None);
        }
        for &Awaited { from, flag, value } in words.range(..oldest.words) {
            let (seen, flag) = (self.seen(from, flag)?, flag as u32);
            if seen < value {
                let (peer, lane, awaited) = (from, COPY_ENGINE, value);
                return Ok(Some(
                    LaneError::Deadline { rank, peer, lane, flag, awaited, seen, waited }.into(),
                ));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::device::tests::devices::stream;
    use crate::error::Cause;

    #[test]
    fn guard_dropped_in_a_failing_world_ends_waits() {
        let stream = stream(0);
        let words = PinnedMemory::new(stream.context(), 64).unwrap();
        let health = Arc::new(Health::new());
        let owner: Arc<Mutex<Option<WaitBreaker>>> = Arc::default();
        // The owner of the words leaves before their own watcher is called.
        let leaving = Arc::clone(&owner);
        health.on_failure(move |_| drop(leaving.lock().unwrap().take()));
        let guard = WaitBreaker::new((0, &health), &words, (vec![0], POISON), (vec![8], 1), None).unwrap();
        stream.wait(words.range().word::<u32>(0).unwrap(), 1).unwrap();
        *owner.lock().unwrap() = Some(guard);
        health.fail(Cause::Cancelled { by: 0 });
        let since = Instant::now();
        while !stream.is_done().unwrap() {
            assert!(since.elapsed() < Duration::from_secs(30), "the wait goes on");
            std::thread::yield_now();
        }
        assert_eq!(words.word(8).unwrap().load(Ordering::Acquire), 1, "the status says why");
    }
}
