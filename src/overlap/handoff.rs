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
    /// [`OverlapError::SlotInUse`].
    pub fn put(&self, value: T) -> Result<(), Error> {
        self.at(|place| {
            *place = Some(value);
            Ok(())
        })
    }

    /// Takes the value away.
    ///
    /// # Errors
    /// [`OverlapError::SlotEmpty`], [`OverlapError::SlotInUse`].
    pub fn take(&self) -> Result<T, Error> {
        self.at(|place| Ok(place.take().ok_or(OverlapError::SlotEmpty)?))
    }

    /// Works on the value where it is.
    ///
    /// # Errors
    /// [`OverlapError::SlotEmpty`], [`OverlapError::SlotInUse`], and what `work` answers.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> Result<R, Error>) -> Result<R, Error> {
        self.at(|place| work(place.as_mut().ok_or(OverlapError::SlotEmpty)?))
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
            Err(TryLockError::WouldBlock) => Err(OverlapError::SlotInUse.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_taken_once() {
        let slot = Handoff::empty();
        let empty = Err(OverlapError::SlotEmpty.into());
        assert_eq!(slot.take(), empty);
        slot.put(4).unwrap();
        slot.with(|value| {
            *value += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(slot.take(), Ok(5));
        assert_eq!(slot.with(|value| Ok(*value)), empty);
        assert_eq!(slot.into_inner(), None);
    }

    #[test]
    fn who_meets_another_at_a_slot_is_told_so() {
        let slot = Handoff::new(1);
        let met = slot.with(|_| slot.take());
        assert_eq!(met, Err(OverlapError::SlotInUse.into()));
        assert_eq!(slot.take(), Ok(1));
    }
}
