//! The pool on the device: offsets alone, shared by the caller's thread and the planner.
//!
//! Memory is given back by the host while the stream may still read it. So it is free for those calls only that were
//! enqueued later: when the planner hears such a call's bell, the stream has passed all that came before.
//!
//! ```text
//!   host     call 1    call 2    drop rows of 1    call 3
//!   stream        call 1 ......... call 2 . experts on rows of 1 ........ call 3
//!   planner            free: -          free: -                              free: rows of 1
//! ```
//!
//! What a combine offered is read by peers: it is dropped with the combine, and the next call begins by waiting until
//! peers have read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::memory::Extents;

/// What is free, and what will be.
#[derive(Debug)]
pub(super) struct Space {
    /// First byte of the pool in the window.
    start: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    extents: Extents,
    /// Given back after so many calls had been enqueued.
    given: Vec<(u64, u64, u64)>,
    enqueued: u64,
}

impl Space {
    pub fn new(start: u64, len: u64) -> Arc<Self> {
        let state = State { extents: Extents::new(len), given: Vec::with_capacity(64), enqueued: 0 };
        Arc::new(Space { start, state: Mutex::new(state) })
    }

    /// Notes that a call is enqueued: what is given back from now on, it may use.
    pub fn count(&self) {
        self.state().enqueued += 1;
    }

    /// Calls enqueued so far.
    pub fn enqueued(&self) -> u64 {
        self.state().enqueued
    }

    /// The stream has come to call `call`, counted from 1.
    pub fn reach(&self, call: u64) {
        let State { extents, given, .. } = &mut *self.state();
        given.retain(|&(before, offset, len)| {
            let free = before < call;
            if free {
                extents.give(offset, len);
            }
            !free
        });
    }

    /// The largest free piece, or `most` bytes of it if that is less.
    pub fn announce(self: &Arc<Self>, most: u64) -> Extent {
        let (offset, len) = self.state().extents.take_largest(most);
        Extent { space: Arc::clone(self), offset, len }
    }

    /// A piece of `len` bytes; else the largest length that could have been had.
    pub fn take(self: &Arc<Self>, len: u64) -> Result<Extent, u64> {
        let offset = self.state().extents.take(len)?;
        Ok(Extent { space: Arc::clone(self), offset, len: Extents::round(len) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece of the pool.
#[derive(Debug)]
pub(super) struct Extent {
    space: Arc<Space>,
    offset: u64,
    len: u64,
}

impl Extent {
    /// First byte, counted from the start of the window.
    pub fn offset(&self) -> u64 {
        self.space.start + self.offset
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Gives back what nobody has written to or will: everything behind the first `len` bytes.
    pub fn trim(&mut self, len: u64) {
        let keep = Extents::round(len).min(self.len);
        self.space.state().extents.give(self.offset + keep, self.len - keep);
        self.len = keep;
    }

    /// Everything behind the first `len` bytes, as a piece of its own.
    pub fn split(&mut self, len: u64) -> Extent {
        let keep = Extents::round(len).min(self.len);
        let rest =
            Extent { space: Arc::clone(&self.space), offset: self.offset + keep, len: self.len - keep };
        self.len = keep;
        rest
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let mut state = self.space.state();
        let before = state.enqueued;
        state.given.push((before, self.offset, self.len));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_free_for_calls_that_were_enqueued_later() {
        let space = Space::new(4096, 256);
        space.count();
        let rows = space.take(256).unwrap();
        assert_eq!((rows.offset(), rows.len()), (4096, 256));
        space.count();
        drop(rows);
        space.reach(2);
        assert_eq!(space.take(64).unwrap_err(), 0, "call 2 was enqueued before");
        space.count();
        space.reach(3);
        assert_eq!(space.announce(100).len(), 128);
    }

    #[test]
    fn what_is_trimmed_is_free_at_once() {
        let space = Space::new(0, 256);
        let mut announced = space.announce(u64::MAX);
        announced.trim(65);
        assert_eq!(space.take(128).unwrap().offset(), 128);
    }
}
