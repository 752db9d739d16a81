//! Work under a lock that its holder owes to threads that do not wait for it: answers to a peer,
//! and looks at a queue of completions.
//!
//! ```text
//!   asker     ask     fence    lock taken? ──► leaves the answer to the holder
//!   holder    unlock  fence    owed?       ──► tends to it
//! ```
//!
//! The asker never waits for the lock, whose holder may itself wait for bytes to be received. Of
//! the two fences one comes first: either the asker finds the lock free, or the holder finds what
//! is owed.

use super::primitives::{AtomicU64, Ordering, fence};

/// The peer's last question, and the last one that was answered.
#[derive(Debug, Default)]
pub struct Answers {
    asked: AtomicU64,
    answered: AtomicU64,
}

impl Answers {
    /// A question has come, behind everything that this thread has received.
    pub fn ask(&self, mark: u64) {
        // For the acquire in `take`, by another thread: the answer tells the peer that what this
        // thread has received has landed.
        self.asked.store(mark, Ordering::Release);
    }

    /// One more question, about nothing but what this thread has done before it.
    pub fn ask_again(&self) {
        // As in `ask`.
        self.asked.fetch_add(1, Ordering::Release);
    }

    /// The question to answer now, if one is open. Its answer tells the peer that all bytes before
    /// it have landed, so this thread sees them. For the holder of the lock.
    pub fn take(&self) -> Option<u64> {
        // Acquire: with the store of the question, behind the bytes that it asks about.
        let asked = self.asked.load(Ordering::Acquire);
        // Relaxed: the lock orders it among those who answer.
        (self.answered.swap(asked, Ordering::Relaxed) != asked).then_some(asked)
    }

    /// Whether an answer was left to the thread that has just given the lock back.
    pub fn is_owed(&self) -> bool {
        // Between the unlock and the look, with the fence of `tend` between a question and the look
        // at the lock.
        fence(Ordering::SeqCst);
        self.asked.load(Ordering::Relaxed) != self.answered.load(Ordering::Relaxed)
    }

    /// Has `serve` give answers under the lock, unless another thread holds it, until none is owed
    /// or `serve` cannot give more now.
    pub fn tend<G>(&self, try_lock: impl Fn() -> Option<G>, mut serve: impl FnMut(&mut G) -> bool) {
        loop {
            // Between a question of this thread and the look at the lock, with the fence of
            // `is_owed`: one of two threads finds that the other has not seen it.
            fence(Ordering::SeqCst);
            let Some(mut held) = try_lock() else { return };
            let can_more = serve(&mut held);
            drop(held);
            if !can_more || !self.is_owed() {
                return;
            }
        }
    }
}
