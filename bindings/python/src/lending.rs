//! Values of the library that Python objects hold.
//!
//! ```text
//!           lend                         close (its world)
//!   Here ---------> Lent (one call) --+--------------------> Closed
//!     ^                               |
//!     +-------------------------------+
//! ```
//!
//! While a call has the value, no other thread gets it: calls of one object come one after another
//! on all ranks, so a second one is a mistake, not something to wait for. And a process that was
//! forked after the value was made does not get it at all: threads and connections are the
//! parent's, and so are goodbyes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use crate::errors::Wrong;

/// Which process made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maker(u32);

impl Maker {
    /// This process.
    pub fn here() -> Self {
        Maker(std::process::id())
    }

    /// Whether this process did.
    pub fn is_here(self) -> bool {
        self == Self::here()
    }

    /// An error in any other process.
    pub fn check(self, what: &str) -> PyResult<()> {
        if self.is_here() {
            return Ok(());
        }
        let message = format!(
            "this process was forked after process {} made its {what}: start processes by spawn (multiprocessing's \
             \"spawn\", sidelane.launch, torchrun), and join a world in each",
            self.0
        );
        Err(Wrong::Forked.error("Forked", &message, &[("maker", self.0.into())]))
    }
}

/// Content of a cell that a closing world drops.
pub trait Close: Send + Sync {
    /// Drops what is inside; a call that has it drops it at its end.
    fn close(&self);
}

enum State<T> {
    Here(T),
    Lent,
    Closing,
    Closed,
}

/// A value that is lent to one call at a time.
pub struct LendingCell<T> {
    what: &'static str,
    maker: Maker,
    state: Mutex<State<T>>,
}

impl<T> LendingCell<T> {
    /// Holds a value; `what` it is called in errors.
    pub fn new(what: &'static str, value: T) -> Self {
        LendingCell { what, maker: Maker::here(), state: Mutex::new(State::Here(value)) }
    }

    /// Takes the value for a call; [`LendingCell::put_back`] is its end.
    ///
    /// # Errors
    /// `ForkedError`, `BusyError`, `ClosedError`.
    pub fn take(&self) -> PyResult<T> {
        self.maker.check(self.what)?;
        let what = self.what;
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Lent) {
            State::Here(value) => Ok(value),
            State::Lent => {
                let message = format!("another call of this {what} is in flight: finish it first");
                Err(Wrong::Busy.error("Busy", &message, &[]))
            }
            closed @ (State::Closing | State::Closed) => {
                *state = closed;
                let message = format!("this {what} was closed with its world, or used up");
                Err(Wrong::Closed.error("Closed", &message, &[]))
            }
        }
    }

    /// Ends the call that took the value.
    pub fn put_back(&self, value: T) {
        let mut state = self.state();
        if matches!(*state, State::Closing) {
            *state = State::Closed;
            drop(state);
            drop(value);
        } else {
            *state = State::Here(value);
        }
    }

    /// Lends the value to a call.
    ///
    /// # Errors
    /// As [`LendingCell::take`], and those of the call.
    pub fn lend<R>(&self, call: impl FnOnce(&mut T) -> PyResult<R>) -> PyResult<R> {
        let mut value = self.take()?;
        let done = call(&mut value);
        self.put_back(value);
        done
    }

    /// A copy of the value, for calls that need it to themselves no longer than it takes to copy
    /// it.
    ///
    /// # Errors
    /// As [`LendingCell::take`].
    pub fn get(&self) -> PyResult<T>
    where
        T: Clone,
    {
        self.lend(|value| Ok(value.clone()))
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send> Close for LendingCell<T> {
    fn close(&self) {
        let mut state = self.state();
        let next = match *state {
            State::Lent | State::Closing => State::Closing,
            State::Here(_) | State::Closed => State::Closed,
        };
        let before = std::mem::replace(&mut *state, next);
        drop(state);
        drop(before);
    }
}

impl<T> Drop for LendingCell<T> {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            // The parent's to drop: here it would say goodbye in the parent's name.
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::replace(state, State::Closed));
        }
    }
}
