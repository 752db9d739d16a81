//! The cause check: when a stream gets a wait for a word, is the operation that ends it already
//! enqueued?
//!
//! A wait whose cause is not enqueued yet needs another call of the driver. If that call blocks,
//! the wait never ends. So each wait is checked when it is enqueued:
//!
//! ```text
//!   there is a cause    a write that satisfies it is enqueued in this process, or the word has the value already,
//!                       or the host, a NIC or another process was declared to write the word
//!   there is none       counted: `waits_without_cause`
//! ```
//!
//! Words that their owner resets have as many causes as writes that have not been reset yet. A word
//! is the same at all addresses that it is mapped at.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{LazyLock, Mutex};

use crate::counters::{COUNTERS, add};
use crate::memory::{Engine, Place, place};
use crate::memory_operation;
use crate::work::{MemoryOperation, Until, Width};

static WORDS: LazyLock<Mutex<Words>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Words {
    all: BTreeMap<Place, Word>,
    /// Bytes that others write: first and end, by their memory.
    elsewhere: BTreeSet<(Place, u64)>,
}

/// One word, as far as streams of this process write it.
#[derive(Default)]
struct Word {
    writes: Vec<Write>,
    /// What each stream waited for last.
    awaited: BTreeMap<usize, (Until, u64, Width)>,
    /// Writes that set it back, and have yet to run.
    resets: u64,
}

/// Writes of one stream that have not been reset.
struct Write {
    stream: usize,
    value: u64,
    count: u64,
    /// Those that have yet to run.
    pending: u64,
}

/// Old writes of a word that are remembered.
const WRITES: usize = 64;

impl Word {
    /// A stream is given a write.
    fn write(&mut self, stream: usize, value: u64) {
        if let Some(&(until, wanted, width)) = self.awaited.get(&stream)
            && !until.holds(value, wanted, width)
        {
            self.resets += 1;
            let taken = self.writes.iter_mut().find(|w| w.count > 0 && until.holds(w.value, wanted, width));
            if let Some(taken) = taken {
                taken.count -= 1;
            }
            self.writes.retain(|write| write.count > 0 || write.pending > 0);
            return;
        }
        match self.writes.iter_mut().find(|write| write.stream == stream && write.value <= value) {
            Some(same) if same.value == value => {
                same.count += 1;
                same.pending += 1;
            }
            // A word that grows: a wait for less is satisfied, too.
            Some(less) => {
                (less.value, less.count) = (value, 1);
                less.pending += 1;
            }
            None => self.writes.push(Write { stream, value, count: 1, pending: 1 }),
        }
        if self.writes.len() > WRITES
            && let Some(old) = self.writes.iter().position(|write| write.pending == 0)
        {
            self.writes.remove(old);
        }
    }

    /// A write of a stream has run.
    fn performed(&mut self, stream: usize) {
        match self.writes.iter_mut().find(|write| write.stream == stream && write.pending > 0) {
            Some(write) => write.pending -= 1,
            None => self.resets = self.resets.saturating_sub(1),
        }
    }

    /// Whether a wait of a stream has a cause, where the word holds `seen` now.
    fn wait(&mut self, stream: usize, (until, value, width): (Until, u64, Width), seen: Option<u64>) -> bool {
        let satisfying = |write: &&Write| write.count > 0 && until.holds(write.value, value, width);
        let enqueued = self.writes.iter().filter(satisfying).any(|write| write.pending > 0);
        let done = self.writes.iter().any(|write| satisfying(&write)) || self.resets == 0;
        self.awaited.insert(stream, (until, value, width));
        enqueued || done && seen.is_some_and(|seen| until.holds(seen, value, width))
    }
}

/// A stream is given memory operations.
pub fn enqueued(stream: usize, engine: &Engine, operations: &[MemoryOperation]) {
    for operation in operations {
        match *operation {
            MemoryOperation::Write { at, value, .. } => {
                let word = place(at);
                WORDS.lock().unwrap().all.entry(word).or_default().write(stream, value);
            }
            MemoryOperation::Wait { at, value, width, until } => {
                let (word, mut words) = (place(at), WORDS.lock().unwrap());
                // Read under the lock: of a write that counts as done the value is there.
                let seen = memory_operation::read(engine, at, width).ok();
                let caused = words.all.entry(word).or_default().wait(stream, (until, value, width), seen);
                if !caused && !words.is_written_elsewhere(word) {
                    add(&COUNTERS.waits_without_cause, 1);
                }
            }
            MemoryOperation::Barrier => {}
        }
    }
}

/// A write of a stream has run.
pub fn performed(stream: usize, at: u64) {
    if let Some(word) = WORDS.lock().unwrap().all.get_mut(&place(at)) {
        word.performed(stream);
    }
}

/// The host, a NIC or another process writes these bytes.
pub fn declare(at: u64, bytes: u64) {
    let from = place(at);
    WORDS.lock().unwrap().elsewhere.insert((from, from.offset + bytes));
}

/// Memory that goes takes its words along.
pub fn forget(addresses: Range<u64>) {
    let (from, bytes) = (place(addresses.start), addresses.end - addresses.start);
    let inside = |word: &Place| {
        word.memory == from.memory && (from.offset..from.offset + bytes).contains(&word.offset)
    };
    let mut words = WORDS.lock().unwrap();
    words.all.retain(|word, _| !inside(word));
    words.elsewhere.retain(|(word, _)| !inside(word));
}

impl Words {
    fn is_written_elsewhere(&self, word: Place) -> bool {
        let holds = |&(from, end): &(Place, u64)| {
            from.memory == word.memory && (from.offset..end).contains(&word.offset)
        };
        self.elsewhere.iter().any(holds)
    }
}

#[cfg(test)]
mod tests {
    use super::{Until::Reached, Width::Four, Word};

    const ONE: (super::Until, u64, super::Width) = (Reached, 1, Four);

    #[test]
    fn word_set_back_needs_a_write_for_each_wait() {
        let (mut word, [peer, owner]) = (Word::default(), [1, 2]);
        assert!(!word.wait(owner, ONE, Some(0)));
        word.write(peer, 1);
        assert!(word.wait(owner, ONE, Some(0)));
        word.write(owner, 0);
        // The value is the first write's, which is reset.
        assert!(!word.wait(owner, ONE, Some(1)));
        word.write(peer, 1);
        assert!(word.wait(owner, ONE, Some(1)));
        word.performed(peer);
        word.performed(peer);
        word.performed(owner);
        assert!(word.wait(owner, ONE, Some(1)));
    }

    #[test]
    fn growing_word_is_awaited_by_as_many_as_like() {
        let mut word = Word::default();
        (1..=5).for_each(|value| word.write(1, value));
        assert!(word.wait(2, (Reached, 4, Four), Some(0)) && word.wait(3, (Reached, 5, Four), Some(0)));
        assert!(!word.wait(2, (Reached, 6, Four), Some(5)));
        (1..=5).for_each(|_| word.performed(1));
        assert!(word.wait(2, (Reached, 5, Four), Some(5)));
    }

    #[test]
    fn word_that_has_its_value_needs_no_write() {
        assert!(Word::default().wait(2, ONE, Some(1)));
    }
}
