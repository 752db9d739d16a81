//! Slots: what a node leaves to later ones.

use std::sync::{Mutex, PoisonError, TryLockError};

use crate::error::{Error, OverlapError};

/// A value that passes from node to node along edges.
///
/// Rust lets no two nodes borrow a thing that one of them changes, since it does not see the edges between them. A slot takes
/// their word for it, and holds them to it: nodes that meet there are an error, as no edge orders them. What several read
/// at once belongs in a [`OnceLock`](std::sync::OnceLock).
#[derive(Debug, Default)]
pub struct Handoff<T>(Mutex<Option<T>>);

impl<T> Handoff<T> {
    /// With nothing in it yet.
    pub const fn empty() -> Self {
        Handoff(Mutex::new(None))
    }

    /// With a value in it: what several nodes use in turn, such as the layer that carries their transfers.
    pub const fn new(value: T) -> Self {
        Handoff(Mutex::new(Some(value)))
    }

    /// Leaves a value, in place of what was there.
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

    /// What is left when all is done.
    pub fn into_inner(self) -> Option<T> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn at<R>(&self, work: impl FnOnce(&mut Option<T>) -> Result<R, Error>) -> Result<R, Error> {
        match self.0.try_lock() {
            Ok(mut place) => work(&mut place),
            // Whoever panicked here was named by the run.
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
