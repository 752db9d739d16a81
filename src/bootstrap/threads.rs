//! Threads of the library: each has a name, and its death ends the world.
//!
//! ```text
//!   Thread::spawn    body panics ──► caught ──► Health: Panicked { by, thread, message }
//!                                                 ├──► every wait of this rank
//!                                                 └──► hub ──► coordinator ──► every wait of every rank
//! ```
//!
//! Others wait for the work of a thread that has died. They could not tell it from a slow one, and
//! would blame a rank that is well, at the deadline. So no thread of the library ends by a panic
//! without a record: [`Thread::spawn`] is the only place that starts one beside [`spawn_scoped`],
//! whose caller hears of the panic. The two threads that connect a rank with the others have last
//! words: the link and the coordinator send the cause themselves, because no other thread can.
//!
//! **Locks.** A thread that panics may leave the state behind a lock half changed. Most locks of
//! the library guard state that is whole after each statement, and are taken with
//! `PoisonError::into_inner`. The locks of connections are [`FatalLock`]s: half a record may have
//! been sent, so the panic of a holder ends the world, whichever thread it is.

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle, Scope};

use super::health::Health;
use crate::error::Cause;

/// A thread of the library, and the world that its death ends.
#[derive(Clone, Debug)]
pub struct Thread {
    name: String,
    rank: u32,
    health: Arc<Health>,
}

impl Thread {
    /// The thread that does this work for a rank.
    pub fn new(work: &str, rank: u32, health: &Arc<Health>) -> Self {
        Thread { name: format!("sidelane-{work}-{rank}"), rank, health: Arc::clone(health) }
    }

    /// Starts it.
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn spawn(self, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        Builder::new().name(self.name.clone()).spawn(move || {
            // The cause is recorded, and there is nothing else to do.
            let _ = self.attempt(body);
        })
    }

    /// Does a part of its work, for threads that have something left to do after their death.
    ///
    /// # Errors
    /// The cause of the world's failure, if the work panicked.
    pub fn attempt<T>(&self, work: impl FnOnce() -> T) -> Result<T, Cause> {
        caught(work).map_err(|message| {
            let cause = Cause::Panicked { by: self.rank, thread: self.name.clone(), message };
            tracing::error!(%cause, "a thread of the library died");
            self.health.fail(cause.clone());
            cause
        })
    }
}

/// Starts a thread that does not outlive its scope. Should `body` panic, `died` hears the message.
///
/// # Errors
/// If the system has no thread to give.
pub fn spawn_scoped<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: String,
    body: impl FnOnce() + Send + 'scope,
    died: impl FnOnce(String) + Send + 'scope,
) -> io::Result<()> {
    let life = move || caught(body).unwrap_or_else(died);
    Builder::new().name(name).spawn_scoped(scope, life).map(drop)
}

/// Longest message of a panic that travels, in characters.
const LONGEST_MESSAGE: usize = 512;

/// Does some work, or returns the message of its panic.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let said = message(panic.as_ref()).chars().take(LONGEST_MESSAGE).collect();
        // The payload is a user's value, and may panic itself when it is dropped.
        std::mem::forget(panic);
        said
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default()
}

/// Notes that this thread takes a lock that is on the way of a put. Only tests count them.
pub fn count_lock() {
    #[cfg(test)]
    locks::TAKEN.set(locks::taken() + 1);
}

/// Locks on the way of puts, of this thread.
#[cfg(test)]
pub mod locks {
    use std::cell::Cell;

    thread_local! {
        pub static TAKEN: Cell<u64> = const { Cell::new(0) };
        pub static HELD: Cell<u64> = const { Cell::new(0) };
    }

    /// Locks taken so far.
    pub fn taken() -> u64 {
        TAKEN.get()
    }

    /// Of these, locks of connections that are held now.
    pub fn held() -> u64 {
        HELD.get()
    }
}

/// A lock around state that a panic may leave half changed: the panic of its holder ends the world.
pub struct FatalLock<T> {
    state: Mutex<T>,
    rank: u32,
    health: Arc<Health>,
}

impl<T> FatalLock<T> {
    /// The state of a rank.
    pub fn new(state: T, rank: u32, health: &Arc<Health>) -> Self {
        FatalLock { state: Mutex::new(state), rank, health: Arc::clone(health) }
    }

    /// Waits for the lock. After the panic of a holder the world has failed, and the state is only
    /// good for its end.
    pub fn lock(&self) -> FatalGuard<'_, T> {
        self.guard(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The state, unless another thread is using it or a holder has panicked.
    pub fn try_lock(&self) -> Option<FatalGuard<'_, T>> {
        Some(self.guard(self.state.try_lock().ok()?))
    }

    fn guard<'a>(&'a self, state: MutexGuard<'a, T>) -> FatalGuard<'a, T> {
        count_lock();
        #[cfg(test)]
        locks::HELD.set(locks::held() + 1);
        FatalGuard { lock: self, state, unwinds: std::thread::panicking() }
    }
}

impl<T: fmt::Debug> fmt::Debug for FatalLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt(f)
    }
}

/// The state behind a [`FatalLock`], held.
pub struct FatalGuard<'a, T> {
    lock: &'a FatalLock<T>,
    state: MutexGuard<'a, T>,
    /// An earlier panic was unwinding this thread when it took the lock.
    unwinds: bool,
}

impl<T> Deref for FatalGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.state
    }
}

impl<T> DerefMut for FatalGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.state
    }
}

impl<T> Drop for FatalGuard<'_, T> {
    fn drop(&mut self) {
        #[cfg(test)]
        locks::HELD.set(locks::held() - 1);
        if std::thread::panicking() && !self.unwinds {
            let thread = std::thread::current().name().unwrap_or("without a name").to_owned();
            let message = "it held the lock of a connection".to_owned();
            self.lock.health.fail(Cause::Panicked { by: self.lock.rank, thread, message });
        }
    }
}

/// One turn of the work of a thread that is named after it: here tests have it panic.
#[inline]
pub fn turn() {
    if cfg!(debug_assertions) {
        fault::panic_if_doomed();
    }
}

/// Panics that tests order. Threads look for such orders in builds with assertions alone.
pub mod fault {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use crate::bootstrap::health::lock;

    static ANY: AtomicBool = AtomicBool::new(false);
    static DOOMED: Mutex<Option<String>> = Mutex::new(None);

    /// Has the thread of this process with this name panic at its next turn, once. For tests.
    pub fn panic_in(thread: &str) {
        *lock(&DOOMED) = Some(thread.to_owned());
        ANY.store(true, Ordering::Release);
    }

    pub(super) fn panic_if_doomed() {
        if !ANY.load(Ordering::Acquire) {
            return;
        }
        let this = std::thread::current();
        let doomed = lock(&DOOMED).take_if(|doomed| this.name() == Some(doomed)).is_some();
        if doomed {
            panic!("told to");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_thread_is_the_cause_by_name() {
        let health = Arc::new(Health::new());
        let thread = Thread::new("work", 3, &health);
        let spawned = thread.clone().spawn(|| panic!("{} is too many", 7)).unwrap();
        assert!(spawned.join().is_ok(), "the panic was caught");
        let (by, name, message) = (3, "sidelane-work-3".to_owned(), "7 is too many".to_owned());
        assert_eq!(health.cause(), Some(Cause::Panicked { by, thread: name, message }));
        assert_eq!(thread.attempt(|| 5), Ok(5), "work that does not panic");
    }

    #[test]
    fn panic_of_a_holder_ends_the_world_and_frees_the_lock() {
        let health = Arc::new(Health::new());
        let lock = Arc::new(FatalLock::new(1, 2, &health));
        assert_eq!(lock.try_lock().map(|state| *state), Some(1));
        let died = std::thread::scope(|scope| {
            let holder = Builder::new().name("holder".into());
            let holder = holder.spawn_scoped(scope, || {
                let _state = lock.lock();
                assert!(lock.try_lock().is_none(), "the lock is taken");
                panic!("bad luck");
            });
            holder.unwrap().join()
        });
        assert!(died.is_err());
        let message = "it held the lock of a connection".to_owned();
        assert_eq!(health.cause(), Some(Cause::Panicked { by: 2, thread: "holder".into(), message }));
        assert!(lock.try_lock().is_none(), "no thread goes on with the state");
        assert_eq!(*lock.lock(), 1, "but it can be ended");
    }

    #[test]
    fn message_of_a_panic_is_cut() {
        assert_eq!(caught(|| panic!("{}", "x".repeat(9999))), Err::<(), _>("x".repeat(LONGEST_MESSAGE)));
        assert_eq!(caught(|| std::panic::panic_any(7)), Err::<(), _>(String::new()));
    }
}
