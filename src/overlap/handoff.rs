//! Handoffs: a value that a node leaves to later ones.

use std::sync::{Mutex, PoisonError, TryLockError};

use crate::error::{Error, OverlapError};

/// A value that passes from node to node along edges.
///
/// Rust lets no two nodes borrow a value that one of them changes, since it does not see the edges
/// between them. A handoff allows it and checks it: concurrent access is an error, since then no
/// edge orders the nodes. A value that several nodes read at once belongs in a
/// [`OnceLock`](std::sync::OnceLock).
#[derive(Debug, Default)]
pub struct Handoff<T>(Mutex<Option<T>>);

impl<T> Handoff<T> {
    /// With nothing in it yet.
    pub const fn empty() -> Self {
        Handoff(Mutex::new(None))
    }

    /// With a value in it that several nodes use in turn, such as the layer that runs their
    /// transfers.
    pub const fn new(value: T) -> Self {
        Handoff(Mutex::new(Some(value)))
    }

    /// Leaves a value, in place of the present one.
    ///
    /// # Errors
    /// [`OverlapError::HandoffInUse`].
    pub fn put(&self, value: T) -> Result<(), Error> {
        self.at(|place| {
            *place = Some(value);
            Ok(())
        })
    }

    /// Takes the value away.
    ///
    /// # Errors
    /// [`OverlapError::HandoffEmpty`], [`OverlapError::HandoffInUse`].
    pub fn take(&self) -> Result<T, Error> {
        self.at(|place| Ok(place.take().ok_or(OverlapError::HandoffEmpty)?))
    }

    /// Works on the value where it is.
    ///
    /// # Errors
    /// [`OverlapError::HandoffEmpty`], [`OverlapError::HandoffInUse`], and what `work` answers.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> Result<R, Error>) -> Result<R, Error> {
        self.at(|place| work(place.as_mut().ok_or(OverlapError::HandoffEmpty)?))
    }

    /// The value that is left at the end.
    pub fn into_inner(self) -> Option<T> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn at<R>(&self, work: impl FnOnce(&mut Option<T>) -> Result<R, Error>) -> Result<R, Error> {
        match self.0.try_lock() {
            Ok(mut place) => work(&mut place),
            // The run has reported the panic that poisoned this.
            Err(TryLockError::Poisoned(place)) => work(&mut place.into_inner()),
            Err(TryLockError::WouldBlock) => Err(OverlapError::HandoffInUse.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_taken_once() {
        let handoff = Handoff::empty();
        let empty = Err(OverlapError::HandoffEmpty.into());
        assert_eq!(handoff.take(), empty);
        handoff.put(4).unwrap();
        handoff
            .with(|value| {
                *value += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!(handoff.take(), Ok(5));
        assert_eq!(handoff.with(|value| Ok(*value)), empty);
        assert_eq!(handoff.into_inner(), None);
    }

    #[test]
    fn node_that_meets_another_gets_an_error() {
        let handoff = Handoff::new(1);
        let met = handoff.with(|_| handoff.take());
        assert_eq!(met, Err(OverlapError::HandoffInUse.into()));
        assert_eq!(handoff.take(), Ok(1));
    }
}
