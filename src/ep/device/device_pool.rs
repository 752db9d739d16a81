//! The pool of a device heap: free memory, and memory that will be free.
//!
//! The pool is offsets alone. The host gives memory back while the stream may still read it. So
//! it is free for those calls only that were enqueued later, when the stream has come to one of
//! them:
//!
//! ```text
//!   host     call 1    call 2    drop rows of 1    call 3
//!   stream        call 1 ......... call 2 . experts on rows of 1 ........ call 3
//!   pool               free: -          free: -                              free: rows of 1
//! ```
//!
//! A piece of [`HeapAllocator`](super::HeapAllocator) is given back behind an event of a stream. It
//! is free when that is reached. If a call was between its halves, the rule above comes on top.
//!
//! Peers read what a combine offered. It is dropped with the combine, and free when they say that
//! they have read it. The caller's thread waits for that where it awaits its stream. Where it runs
//! ahead, it looks ([`Progress`]).
//!
//! **It grows** at its end ([`enqueued_growth`](super::enqueued_growth)). So each piece stays where
//! it is.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::{DeviceRange, Event, PinnedMemory};
use crate::ep::state::EpState;
use crate::error::DeviceError;
use crate::memory::Extents;
use crate::schedule::{ControlLayout, Flag};

/// Calls that a stream may have yet to come to before lists of them grow.
pub(super) const CALLS_AHEAD: usize = 32;

/// Contents of a device heap. All sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct DeviceHeapReport {
    /// Its size now, the same at all ranks.
    pub total: u64,
    /// The size to which it may grow; its size if it does not.
    pub limit: u64,
    /// How often it has grown.
    pub growths: u32,
    /// Taken: rows, outputs, token buffers and what an allocator gave out, and all that streams
    /// have yet to leave.
    pub used: u64,
    /// The most bytes that were ever taken at once.
    pub peak: u64,
    /// Its largest free piece.
    pub largest_free: u64,
}

/// Free memory, and memory that will be free.
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
    /// Given back behind work of other streams.
    behind: Vec<Behind>,
    enqueued: u64,
    /// How often memory was added.
    growths: u32,
}

/// A piece that a stream may use until it has come to an event.
#[derive(Debug)]
struct Behind {
    event: Event,
    range: DeviceRange,
    offset: u64,
    len: u64,
    /// The calls that had been enqueued, if one of them was between its halves.
    before: Option<u64>,
}

impl Drop for Behind {
    /// Waits for the stream where the pool goes first: memory stays mapped as long as it is used.
    fn drop(&mut self) {
        if self.event.is_done() != Ok(true) && self.event.synchronize().is_err() {
            std::mem::forget(self.range.clone());
        }
    }
}

impl DevicePool {
    pub fn new(start: u64, len: u64) -> Arc<Self> {
        let state = State {
            extents: Extents::new(len),
            given: Vec::with_capacity(2 * CALLS_AHEAD),
            behind: Vec::new(),
            enqueued: 0,
            growths: 0,
        };
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

    /// Frees pieces whose streams have come by. Whether no other can be waited for.
    pub fn settle(&self) -> bool {
        let State { extents, given, behind, .. } = &mut *self.state();
        let mut awaited = false;
        behind.retain(|piece| {
            let done = piece.event.is_done();
            awaited |= done == Ok(false);
            match (done, piece.before) {
                (Ok(true), None) => extents.free(piece.offset, piece.len),
                (Ok(true), Some(before)) => given.push((before, piece.offset, piece.len)),
                // A broken device says nothing any more: its memory stays taken.
                (Ok(false) | Err(_), _) => return true,
            }
            false
        });
        !awaited
    }

    /// The largest free piece, or `most` bytes of it if that is less.
    pub fn announce(self: &Arc<Self>, most: u64) -> Extent {
        let (offset, len) = self.state().extents.take_largest(most);
        Extent { space: Arc::clone(self), offset, len }
    }

    /// Bytes of all pieces together, free or taken.
    pub fn total(&self) -> u64 {
        self.state().extents.total()
    }

    /// Adds the bytes behind it up to byte `end` of the window, where memory is mapped now.
    pub fn grow(&self, end: u64) {
        let mut state = self.state();
        state.extents.grow(end - self.start);
        state.growths += 1;
    }

    /// Bytes by which it must grow to have `len` in one piece.
    pub fn lack(&self, len: u64) -> u64 {
        self.state().extents.lack(len)
    }

    /// Its size, its use, and how often it has grown.
    pub fn report(&self, limit: u64) -> DeviceHeapReport {
        let state = self.state();
        let (extents, growths) = (&state.extents, state.growths);
        let (total, used, peak) = (extents.total(), extents.used(), extents.peak());
        let limit = limit.max(total);
        DeviceHeapReport { total, limit, growths, used, peak, largest_free: extents.largest() }
    }

    /// A piece of `len` bytes, in a window at address `base` and at a multiple of `align`; else the
    /// largest length that could have been had.
    pub fn take(self: &Arc<Self>, len: u64, (align, base): (u64, u64)) -> Result<Extent, u64> {
        let offset = self.state().extents.alloc_aligned(len, (align, base + self.start))?;
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
    /// Value by which the readers of the last return answer.
    last_return: u64,
    /// The latest call whose mark was seen.
    reached: u64,
}

impl Progress {
    pub fn new(fixed: &EpState, words: &PinnedMemory) -> Self {
        let (rank, ranks) = (fixed.lanes.rank, fixed.lanes.ranks());
        let locals = fixed.paths().local_peers().collect();
        let marks = Marks { calls: VecDeque::with_capacity(CALLS_AHEAD), ..Marks::default() };
        Progress { words: words.clone(), rank, ranks, locals, marks: Mutex::new(marks) }
    }

    /// The stream leaves this mark when it has come to a call.
    pub fn started(&self, mark: u64, call: u64) {
        self.marks().calls.push_back((mark, call));
    }

    /// The host has heard that the stream has come to a call.
    pub fn heard(&self, call: u64) {
        self.marks().reached = call;
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
            // Acquire: memory that is found free is written next, behind the reads of the peer.
            Ok::<_, DeviceError>(word.load(Ordering::Acquire))
        };
        let (mark, mut marks) = (value(self.rank, Flag::Returned)?, self.marks());
        while let Some(&(_, call)) = marks.calls.front().filter(|(left, _)| *left <= mark) {
            marks.calls.pop_front();
            marks.reached = marks.reached.max(call);
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

    /// Gives back the bytes behind the first `len`: no rank has written there, or will.
    pub fn trim(&mut self, len: u64) {
        let keep = Extents::round(len).min(self.len);
        self.space.state().extents.free(self.offset + keep, self.len - keep);
        self.len = keep;
    }

    /// Gives it back behind the work of another stream, which `event` marks, and which uses `range`
    /// of it. So many calls of those enqueued were `served`.
    pub fn give_behind(mut self, event: Event, range: DeviceRange, served: u64) {
        let (offset, len) = (self.offset, std::mem::take(&mut self.len));
        let mut state = self.space.state();
        let before = (state.enqueued != served).then_some(state.enqueued);
        state.behind.push(Behind { event, range, offset, len, before });
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

/// Bytes of the pool that a handle may yet ask for, counted among those of all handles.
#[derive(Debug)]
pub(super) struct Owed {
    bytes: AtomicU64,
    all: Arc<AtomicU64>,
}

impl Owed {
    /// Nothing yet.
    pub fn new(all: &Arc<AtomicU64>) -> Self {
        Owed { bytes: AtomicU64::new(0), all: Arc::clone(all) }
    }

    /// The handle may ask for so many bytes, and no more.
    pub fn set(&self, bytes: u64) {
        // Relaxed: an estimate. Added first, so that the sum never falls below zero.
        self.all.fetch_add(bytes, Ordering::Relaxed);
        self.all.fetch_sub(self.bytes.swap(bytes, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// It has got so many of them.
    pub fn settle(&self, bytes: u64) {
        // Relaxed: one thread at a time settles a handle.
        self.set(self.bytes.load(Ordering::Relaxed).saturating_sub(bytes));
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryShape;
    use super::*;

    #[test]
    fn freed_rows_serve_only_calls_enqueued_later() {
        let space = DevicePool::new(4096, 256);
        space.count();
        let rows = space.take(256, (MemoryShape::STEP, 0)).unwrap();
        assert_eq!((rows.offset(), rows.len()), (4096, 256));
        space.count();
        drop(rows);
        space.reach(2);
        assert_eq!(space.take(64, (MemoryShape::STEP, 0)).unwrap_err(), 0, "call 2 was enqueued before");
        space.count();
        space.reach(3);
        assert_eq!(space.announce(100).len(), 128);
    }

    #[test]
    fn pool_grows_behind_what_is_taken() {
        let space = DevicePool::new(4096, 256);
        let rows = space.take(192, (MemoryShape::STEP, 0)).unwrap();
        assert_eq!([64, 65, 320].map(|len| space.lack(len)), [0, 64, 256], "64 bytes are free at the end");
        space.grow(4096 + 512);
        assert_eq!((space.total(), space.lack(320), rows.offset()), (512, 0, 4096));
        assert_eq!(space.take(320, (MemoryShape::STEP, 0)).unwrap().offset(), 4096 + 192);
        let report = space.report(1024);
        assert_eq!((report.total, report.limit, report.growths), (512, 1024, 1));
    }

    #[test]
    fn memory_owed_to_handles_counts_until_taken_or_dropped() {
        let all = Arc::default();
        let (one, other) = (Owed::new(&all), Owed::new(&all));
        let owed = || all.load(Ordering::Relaxed);
        one.set(100);
        other.set(50);
        other.set(70);
        assert_eq!(owed(), 170);
        one.settle(60);
        assert_eq!(owed(), 110);
        one.settle(60);
        assert_eq!(owed(), 70);
        drop(other);
        assert_eq!(owed(), 0);
    }

    #[test]
    fn trimmed_memory_is_free_at_once() {
        let space = DevicePool::new(0, 256);
        let mut announced = space.announce(u64::MAX);
        announced.trim(65);
        assert_eq!(space.take(128, (MemoryShape::STEP, 0)).unwrap().offset(), 128);
    }
}
