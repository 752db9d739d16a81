//! A word that one thread raises and others await, some of them asleep.
//!
//! ```text
//!   raise    store value    full fence    load sleepers ──► wake, if there are any
//!   sleep    add a sleeper  full fence    load value    ──► sleep, if it is the one seen
//! ```
//!
//! Of two threads that store, then fence, then load, at least one loads what the other has stored.
//! So either the sleeper sees the value, or its writer sees the sleeper. The kernel compares the
//! value once more before the thread sleeps, under the lock that the wake-up takes.

use super::primitives::{AtomicU32, AtomicU64, Ordering, fence};

/// View of a flag's words.
#[derive(Clone, Copy, Debug)]
pub struct FlagWords<'a> {
    value: &'a AtomicU64,
    sleepers: &'a AtomicU32,
}

impl<'a> FlagWords<'a> {
    /// The flag in these words. One thread at a time raises the value.
    #[inline]
    pub fn new(value: &'a AtomicU64, sleepers: &'a AtomicU32) -> Self {
        FlagWords { value, sleepers }
    }

    /// The current value, with everything its writer did before.
    #[inline]
    pub fn value(self) -> u64 {
        // With the release in `raise`: the rows in front of a signal are there with it.
        self.value.load(Ordering::Acquire)
    }

    /// Raises the value, and calls `wake` if threads may sleep. `full_fence` orders as
    /// `fence(SeqCst)` does: machines have faster ones.
    #[inline]
    pub fn raise(self, value: u64, full_fence: impl FnOnce(), wake: impl FnOnce()) {
        // The release is for readers of the value, the fence for the look at the sleepers. An
        // exchange in place of both would request the line only after all earlier stores.
        self.value.store(value, Ordering::Release);
        full_fence();
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            wake();
        }
    }

    /// Calls `sleep`, unless the value is no longer the one that was seen.
    pub fn sleep(self, seen: u64, sleep: impl FnOnce()) {
        // Announced before the look below: a raise that this look misses sees the sleeper.
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // With the fence in `raise`. This load decides about sleep alone: who wakes loads the value
        // again, with acquire.
        fence(Ordering::SeqCst);
        if self.value.load(Ordering::Relaxed) == seen {
            sleep();
        }
        // Relaxed: a raise that still sees the sleeper wakes no thread.
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}
