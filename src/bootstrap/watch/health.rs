//! Whether the world is alive: one word to look at, one cause to report.
//!
//! All waits of the library poll [`Health`] between two polls of their own flag, so a poll must
//! cost one load. The word is sticky and the first cause wins: a failing world produces many
//! secondary failures, and only the first one is the reason.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::error::Cause;

/// Called once with the cause when the world dies.
type Watcher = Box<dyn Fn(&Cause) + Send + Sync>;

/// The health of a world, as this rank sees it.
#[derive(Default)]
pub struct Health {
    /// 0 while alive; written once, after `cause`.
    status: AtomicU32,
    cause: OnceLock<Cause>,
    watchers: Mutex<Vec<Watcher>>,
    absent: Mutex<BTreeSet<u32>>,
}

impl Health {
    /// A living world.
    pub fn new() -> Self {
        Health::default()
    }

    /// The status word: 0 while the world is healthy. Otherwise the low byte is the kind of the
    /// cause, the bits above it the rank the cause names.
    #[inline]
    pub fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    /// Why the world is dead.
    pub fn cause(&self) -> Option<Cause> {
        self.check().err()
    }

    /// Fails with the cause if the world is dead. One load while it lives.
    #[inline]
    pub fn check(&self) -> Result<(), Cause> {
        if self.status() == 0 { Ok(()) } else { self.cause.get().cloned().map_or(Ok(()), Err) }
    }

    /// Declares the world dead for this rank. False if it was dead already: the first cause stays.
    pub fn fail(&self, cause: Cause) -> bool {
        let word = word(&cause);
        if self.cause.set(cause).is_err() {
            return false;
        }
        self.status.store(word, Ordering::Release);
        if let Some(cause) = self.cause.get() {
            // Watchers are taken out before they are called, so that one may use this object again.
            let watchers = std::mem::take(&mut *lock(&self.watchers));
            watchers.iter().for_each(|watcher| watcher(cause));
        }
        true
    }

    /// Calls `watcher` once when the world fails; at once if it has failed. For threads that sleep
    /// on events which a failed world will never deliver.
    pub fn on_failure(&self, watcher: impl Fn(&Cause) + Send + Sync + 'static) {
        {
            let mut watchers = lock(&self.watchers);
            if self.status() == 0 {
                watchers.push(Box::new(watcher));
                return;
            }
        }
        if let Some(cause) = self.cause.get() {
            watcher(cause);
        }
    }

    /// Ranks known to be lost or to have left, ascending.
    pub fn absent(&self) -> Vec<u32> {
        lock(&self.absent).iter().copied().collect()
    }

    /// Whether a rank is known to be lost or to have left. A rank that leaves does not fail the
    /// world: waits for that rank query this.
    pub fn is_absent(&self, rank: u32) -> bool {
        lock(&self.absent).contains(&rank)
    }

    /// Notes that a rank is lost or has left.
    pub(in crate::bootstrap) fn note_absent(&self, rank: u32) {
        lock(&self.absent).insert(rank);
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").field("cause", &self.cause.get()).field("absent", &self.absent()).finish()
    }
}

/// Encoding of a cause in the status word: kind in the low byte, rank above.
fn word(cause: &Cause) -> u32 {
    let (kind, rank) = match *cause {
        Cause::Lost { rank, .. } => (1, rank),
        Cause::LauncherGone { .. } => (2, 0),
        Cause::Evicted { rank, .. } => (3, rank),
        Cause::Stalled { rank, .. } => (4, rank),
        Cause::Cancelled { by } => (5, by),
        Cause::Protocol { rank } => (6, rank),
        Cause::Connection { rank, .. } => (7, rank),
        Cause::Nic { by } => (8, by),
    };
    kind | rank << 8
}

/// A lock that survives a panicking holder: the state behind the mutexes of this module is
/// consistent after each statement.
pub(in crate::bootstrap) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    #[test]
    fn the_first_cause_stays() {
        let health = Health::new();
        assert_eq!((health.check(), health.status(), health.cause()), (Ok(()), 0, None));
        assert!(health.fail(Cause::Cancelled { by: 3 }));
        assert!(!health.fail(Cause::Protocol { rank: 1 }));
        assert_eq!(health.check(), Err(Cause::Cancelled { by: 3 }));
        assert_eq!(health.status(), 5 | 3 << 8);
    }

    #[test]
    fn watchers_hear_of_a_failure_before_and_after_it() {
        let health = Arc::new(Health::new());
        let (tell, heard) = mpsc::channel();
        let late = tell.clone();
        health.on_failure(move |cause| tell.send(cause.clone()).unwrap());
        assert!(heard.try_recv().is_err(), "nothing has happened yet");
        health.fail(Cause::Protocol { rank: 2 });
        health.on_failure(move |cause| late.send(cause.clone()).unwrap());
        assert_eq!(heard.iter().take(2).collect::<Vec<_>>(), vec![Cause::Protocol { rank: 2 }; 2]);
    }

    #[test]
    fn absence_alone_does_not_kill_a_world() {
        let health = Health::new();
        health.note_absent(4);
        health.note_absent(1);
        assert_eq!(health.absent(), [1, 4]);
        assert!(health.is_absent(4) && !health.is_absent(2));
        assert_eq!(health.check(), Ok(()));
    }
}
