//! An object that takes one call at a time, and may be away.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::Kind;
use crate::fault::Fault;

/// Holds an object that Rust lends exclusively. A second thread gets an error at once: the call of
/// the first may be waiting for a later action of the second.
#[derive(Debug)]
pub struct ExclusiveCell<T> {
    kind: Kind,
    held: Mutex<CellState<T>>,
}

#[derive(Debug)]
enum CellState<T> {
    Here(T),
    /// Between the halves of a call, or gone for good.
    Away,
    /// A call with it ended in a panic.
    Broken,
}

impl<T> ExclusiveCell<T> {
    pub fn new(kind: Kind, held: T) -> ExclusiveCell<T> {
        ExclusiveCell { kind, held: Mutex::new(CellState::Here(held)) }
    }

    /// Lends the object for a call.
    ///
    /// # Errors
    /// [`Fault::Busy`], [`Fault::Underway`], [`Fault::Broken`], and those of the call.
    pub fn lend<R>(&self, call: impl FnOnce(&mut T) -> Result<R, Fault>) -> Result<R, Fault> {
        match &mut *self.lock()? {
            CellState::Here(object) => call(object),
            other => Err(self.missing(other)),
        }
    }

    /// Takes the object away for good.
    ///
    /// # Errors
    /// As [`ExclusiveCell::lend`].
    pub fn take(&self) -> Result<T, Fault> {
        let mut held = self.lock()?;
        match std::mem::replace(&mut *held, CellState::Away) {
            CellState::Here(object) => Ok(object),
            other => {
                let fault = self.missing(&other);
                *held = other;
                Err(fault)
            }
        }
    }

    /// Takes the object away, until the lease ends.
    ///
    /// # Errors
    /// As [`ExclusiveCell::lend`].
    pub fn lease(cell: &Arc<ExclusiveCell<T>>) -> Result<Lease<T>, Fault> {
        Ok(Lease { held: Some(cell.take()?), cell: Arc::clone(cell) })
    }

    fn missing(&self, held: &CellState<T>) -> Fault {
        let kind = self.kind;
        if matches!(held, CellState::Broken) { Fault::Broken { kind } } else { Fault::Underway { kind } }
    }

    fn lock(&self) -> Result<MutexGuard<'_, CellState<T>>, Fault> {
        self.held.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Fault::Busy { kind: self.kind },
            TryLockError::Poisoned(_) => Fault::Broken { kind: self.kind },
        })
    }
}

/// An object that is out of its cell. Dropping this puts it back.
#[derive(Debug)]
pub struct Lease<T> {
    held: Option<T>,
    cell: Arc<ExclusiveCell<T>>,
}

const HELD: &str = "it is held until the lease ends";

impl<T> Deref for Lease<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.held.as_ref().expect(HELD)
    }
}

impl<T> DerefMut for Lease<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().expect(HELD)
    }
}

impl<T> Drop for Lease<T> {
    fn drop(&mut self) {
        let held = match self.held.take() {
            Some(object) if !std::thread::panicking() => CellState::Here(object),
            _ => CellState::Broken,
        };
        *self.cell.held.lock().unwrap_or_else(PoisonError::into_inner) = held;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind::Ep;

    #[test]
    fn a_second_thread_is_told_and_not_kept_waiting() {
        let cell = ExclusiveCell::new(KIND, 1);
        let told =
            cell.lend(|_| Ok(std::thread::scope(|scope| scope.spawn(|| cell.lend(|_| Ok(()))).join())));
        assert_eq!(told.unwrap().unwrap(), Err(Fault::Busy { kind: KIND }));
        assert_eq!(cell.lend(|held| Ok(*held)), Ok(1));
    }

    #[test]
    fn leased_object_is_underway_until_lease_ends() {
        let cell = Arc::new(ExclusiveCell::new(KIND, 1));
        let mut lease = ExclusiveCell::lease(&cell).unwrap();
        assert_eq!(cell.lend(|_| Ok(())), Err(Fault::Underway { kind: KIND }));
        *lease += 1;
        drop(lease);
        assert_eq!(cell.lend(|held| Ok(*held)), Ok(2));
    }

    #[test]
    fn after_a_panic_the_object_can_only_be_closed() {
        let cell = ExclusiveCell::new(KIND, 1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            cell.lend::<()>(|_| std::panic::resume_unwind(Box::new("a bug")))
        }));
        assert!(panicked.is_err());
        assert_eq!(cell.lend(|_| Ok(())), Err(Fault::Broken { kind: KIND }));
        let cell = Arc::new(ExclusiveCell::new(KIND, 1));
        let lease = ExclusiveCell::lease(&cell).unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _lease = lease;
            std::panic::resume_unwind(Box::new("a bug"))
        }));
        assert!(panicked.is_err());
        assert_eq!(cell.take(), Err(Fault::Broken { kind: KIND }));
    }
}
