//! A failure that happens once: a word that all waits poll, the first cause, and watchers.
//!
//! ```text
//!   fail     set the cause, if it is the first    store the word    lock: take the watchers    call them
//!   watch    lock: word is 0? ──► add the watcher, else call it
//!   cause    load the word ──► 0: healthy, else the cause is there
//! ```
//!
//! A watcher is added under the lock, and before the failing thread takes the list, or it sees the
//! word. So each is called exactly once.

use super::primitives::{AtomicU32, Mutex, MutexGuard, OnceLock, Ordering, PoisonError};

/// Called once with the cause.
pub type Watcher<C> = Box<dyn Fn(&C) + Send + Sync>;

/// Whether something has failed, and why.
pub struct Failure<C> {
    /// 0 while healthy; else the word of the first cause, written after it.
    status: AtomicU32,
    first: OnceLock<(u32, C)>,
    watchers: Mutex<Vec<Watcher<C>>>,
}

impl<C> Default for Failure<C> {
    fn default() -> Self {
        Failure { status: AtomicU32::new(0), first: OnceLock::new(), watchers: Mutex::new(Vec::new()) }
    }
}

impl<C> Failure<C> {
    /// The word of the first cause; 0 while healthy.
    #[inline]
    pub fn status(&self) -> u32 {
        // With the release in `fail`: a thread that loads a word finds its cause set.
        self.status.load(Ordering::Acquire)
    }

    /// The first cause. One load while healthy.
    #[inline]
    pub fn cause(&self) -> Option<&C> {
        if self.status() == 0 { None } else { self.first.get().map(|(_, cause)| cause) }
    }

    /// Fails with a cause and its word, which is not 0. Returns the watchers to call if this cause
    /// is the first, else nothing. In both cases this thread sees the failure from now on.
    pub fn fail(&self, word: u32, cause: C) -> Option<Vec<Watcher<C>>> {
        let is_first = self.first.set((word, cause)).is_ok();
        // The thread with the first cause may not have come so far yet.
        if let Some(&(word, _)) = self.first.get() {
            // Behind the cause, for the acquire in `status`. A thread that comes second stores the
            // word of the first, so the word never changes once it is set.
            self.status.store(word, Ordering::Release);
        }
        is_first.then(|| std::mem::take(&mut *self.watchers()))
    }

    /// Keeps a watcher for the failure, or returns it if that has come.
    pub fn watch(&self, watcher: Watcher<C>) -> Option<Watcher<C>> {
        let mut watchers = self.watchers();
        // Under the lock: `fail` stores the word before it takes the list. So a list that was not
        // taken yet has this watcher when it is, and after a list that was taken the word is here.
        if self.status() != 0 {
            return Some(watcher);
        }
        watchers.push(watcher);
        None
    }

    fn watchers(&self) -> MutexGuard<'_, Vec<Watcher<C>>> {
        // A list is whole between any two statements, and a failure must reach its watchers also
        // after a panic.
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
