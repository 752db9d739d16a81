//! The pool on the device: offsets alone, shared by handles and whatever drives the calls.
//!
//! The host gives memory back while the stream may still read it. So it is free for those calls
//! only that were enqueued later, when the stream has come to one of them:
//!
//! ```text
//!   host     call 1    call 2    drop rows of 1    call 3
//!   stream        call 1 ......... call 2 . experts on rows of 1 ........ call 3
//!   pool               free: -          free: -                              free: rows of 1
//! ```
//!
//! Peers read what a combine offered. It is dropped with the combine, and free when they say that
//! they have read it. The caller's thread waits for that where it awaits its stream. Where it runs
//! ahead, it looks ([`Progress`]).

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::PinnedMemory;
use crate::ep::fixed::EpState;
use crate::error::DeviceError;
use crate::memory::Extents;
use crate::schedule::{ControlLayout, Flag};

/// What is free, and what will be.
#[derive(Debug)]
pub(super) struct DevicePool {
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

impl DevicePool {
    pub fn new(start: u64, len: u64) -> Arc<Self> {
        let state = State { extents: Extents::new(len), given: Vec::with_capacity(64), enqueued: 0 };
        Arc::new(DevicePool { start, state: Mutex::new(state) })
    }

    /// Notes that a call is enqueued: what is given back from now on, it may use.
    pub fn count(&self) {
        self.state().enqueued += 1;
    }

    /// The stream has come to call `call`, counted from 1.
    pub fn reach(&self, call: u64) {
        let State { extents, given, .. } = &mut *self.state();
        given.retain(|&(before, offset, len)| {
            let free = before < call;
            if free {
                extents.free(offset, len);
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
        let offset = self.state().extents.alloc(len)?;
        Ok(Extent { space: Arc::clone(self), offset, len: Extents::round(len) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How far the caller's stream has come, and its peers have read: words that the host reads without
/// a call of the driver.
#[derive(Debug)]
pub(super) struct Progress {
    /// This rank's words.
    words: PinnedMemory,
    rank: u32,
    ranks: u32,
    /// Ranks that read what this one offers.
    locals: Vec<u32>,
    marks: Mutex<Marks>,
}

#[derive(Debug, Default)]
struct Marks {
    /// A mark of the stream, and the call that it had come to.
    calls: VecDeque<(u64, u64)>,
    /// What readers of the last return say.
    last_return: u64,
    /// The latest call whose mark was seen.
    reached: u64,
}

impl Progress {
    pub fn new(fixed: &EpState, words: &PinnedMemory) -> Self {
        let (rank, ranks) = (fixed.lanes.rank, fixed.lanes.ranks());
        let locals = fixed.paths().local_peers().collect();
        Progress { words: words.clone(), rank, ranks, locals, marks: Mutex::default() }
    }

    /// The stream leaves this mark when it has come to a call.
    pub fn started(&self, mark: u64, call: u64) {
        self.marks().calls.push_back((mark, call));
    }

    /// Peers say with this value that they have read what was offered.
    pub fn returned(&self, value: u64) {
        self.marks().last_return = value;
    }

    /// The call that the stream has come to, if peers have read all that was offered; and whether
    /// it is the last.
    pub fn seen(&self) -> Result<(Option<u64>, bool), DeviceError> {
        let value = |from, flag| {
            let word = self.words.word(ControlLayout::flag(from, flag, self.ranks) as usize)?;
            Ok::<_, DeviceError>(word.load(Ordering::Acquire))
        };
        let (mark, mut marks) = (value(self.rank, Flag::Returned)?, self.marks());
        while let Some(&(_, call)) = marks.calls.front().filter(|(left, _)| *left <= mark) {
            marks.calls.pop_front();
            marks.reached = call;
        }
        for &reader in &self.locals {
            if value(reader, Flag::Read)? < marks.last_return {
                return Ok((None, false));
            }
        }
        Ok((Some(marks.reached), marks.calls.is_empty()))
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece of the pool.
#[derive(Debug)]
pub(super) struct Extent {
    space: Arc<DevicePool>,
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
        self.space.state().extents.free(self.offset + keep, self.len - keep);
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
        let space = DevicePool::new(4096, 256);
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
        let space = DevicePool::new(0, 256);
        let mut announced = space.announce(u64::MAX);
        announced.trim(65);
        assert_eq!(space.take(128).unwrap().offset(), 128);
    }
}
