//! The receive pool of a rank: rows that arrive, combine buffers, staging.
//!
//! The pool is local. Memory for writes of others is *announced*. A rank reserves the largest free
//! extent (or the largest need of a dispatch), sends its place and size with the counts, and trims
//! it to the exact size once the counts of all are known.
//!
//! ```text
//!   announce          | used |.............. announced ..............|
//!   trim              | used | landed rows |......... free ..........|
//!   retire            | used | (offered, not all peers have read it) |    free when its readers have released it
//! ```
//!
//! [`Extents`] is the offset allocator, pure. Free ranges are kept sorted by offset and joined with
//! adjacent ones; an allocation takes the first that fits. Two equal sequences of calls give equal
//! offsets.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::{PeerMapping, access};
use crate::bootstrap::Health;
use crate::bootstrap::wait::{Ended, Polling};
use crate::error::{Cause, Error, MemoryError, PlanError};
use crate::sync::primitives::{Mutex, MutexGuard, PoisonError};

/// Knows whether all readers of a retired extent have finished.
pub trait ReleaseCheck: Send + Sync {
    /// Whether all ranks have read the memory that was offered in the call of this value.
    fn is_released(&self, value: u64) -> bool;
}

/// The pool of one rank. All receivers share it; it is locked for a few instructions at a time,
/// never during a wait.
pub struct Pool {
    rank: u32,
    mapped: Arc<PeerMapping>,
    member: u32,
    /// First byte of the pool in the heap.
    start: u64,
    health: Arc<Health>,
    /// How long readers of retired extents are waited for.
    deadline: Duration,
    state: Mutex<State>,
}

struct State {
    extents: Extents,
    retired: Vec<Retired>,
    /// Announced extents (offset, length) that were dropped in the failed world.
    abandoned: Vec<(u64, u64)>,
    /// Why the world has failed, once its memory has gone back to the system.
    given_back: Option<Cause>,
    live: usize,
}

struct Retired {
    offset: u64,
    len: u64,
    release: Arc<dyn ReleaseCheck>,
    value: u64,
}

/// Contents of a pool. All sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct PoolReport {
    /// Size of the pool.
    pub total: u64,
    /// Allocated: live rows, outputs and staging, and retired extents.
    pub used: u64,
    /// The most bytes ever allocated at once.
    pub peak: u64,
    /// Largest extent that could be announced now.
    pub largest_free: u64,
    /// Extents alive.
    pub live: usize,
    /// Extents given back whose readers have not all finished.
    pub retired: usize,
}

impl Pool {
    /// The bytes from `start` to the end of `member`'s segment.
    pub(super) fn new(
        rank: u32,
        mapped: Arc<PeerMapping>,
        start: u64,
        health: Arc<Health>,
        deadline: Duration,
    ) -> Arc<Self> {
        let extents = Extents::new(mapped.len_of(rank) - start);
        let (retired, abandoned) = (Vec::with_capacity(64), Vec::new());
        let state = Mutex::new(State { extents, retired, abandoned, given_back: None, live: 0 });
        Arc::new(Pool { rank, mapped, member: rank, start, health, deadline, state })
    }

    /// Reserves `len` bytes. If they are missing only because peers have not finished reading
    /// offered memory, waits for these peers: they need no further action of this rank.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`], the cause of a failed world, [`PlanError::Interrupted`].
    pub fn alloc(self: &Arc<Self>, len: u64) -> Result<Extent, Error> {
        let mut waiting = None;
        loop {
            let mut state = self.state();
            if let Some(cause) = &state.given_back {
                return Err(cause.clone().into());
            }
            state.reap();
            let free = match state.extents.alloc(len) {
                Ok(offset) => {
                    state.live += 1;
                    let len = Extents::round(len);
                    return Ok(Extent { pool: Arc::clone(self), offset, len, announced: false });
                }
                Err(free) => free,
            };
            // Retired extents of no bytes only hold what their release checks hold.
            let coming = state.retired.iter().any(|r| r.len > 0);
            let lacks = MemoryError::OutOfSpace {
                rank: self.rank,
                asked: len,
                free,
                total: state.extents.total(),
                space: "pool",
                setting: "SIDELANE_HEAP",
            };
            // Not over the wait: other threads of this rank give extents back meanwhile.
            drop(state);
            if !coming {
                return Err(lacks.into());
            }
            let waiting = waiting.get_or_insert_with(|| Polling::within(&self.health, self.deadline));
            waiting.turn().map_err(|why| match why {
                Ended::Failed(cause) => Error::from(cause),
                Ended::Late => lacks.into(),
                Ended::Asked => PlanError::Interrupted.into(),
            })?;
        }
    }

    /// Reserves the largest free extent, or `most` bytes of it if that is less, for others to write
    /// to. It may be empty, and is once memory has gone back to the system.
    pub(crate) fn announce(self: &Arc<Self>, most: u64) -> Extent {
        let mut state = self.state();
        state.reap();
        let most = if state.given_back.is_none() { most } else { 0 };
        let (offset, len) = state.extents.take_largest(most);
        state.live += 1;
        Extent { pool: Arc::clone(self), offset, len, announced: true }
    }

    /// Gives an extent back once all its readers have finished. No thread waits for that: the next
    /// allocation checks whether the readers have released it.
    pub(crate) fn retire(&self, mut extent: Extent, release: &Arc<dyn ReleaseCheck>, value: u64) {
        let (offset, len) = (extent.offset, std::mem::take(&mut extent.len));
        self.state().retired.push(Retired { offset, len, release: Arc::clone(release), value });
    }

    /// Frees the retired extents that are released by now, and drops their release checks.
    pub(crate) fn reap(&self) {
        self.state().reap();
    }

    /// First byte of the pool in its rank's heap.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Size of the pool, in bytes.
    pub fn total(&self) -> u64 {
        self.state().extents.total()
    }

    /// Current contents of the pool.
    pub fn report(&self) -> PoolReport {
        let mut state = self.state();
        state.reap();
        PoolReport {
            total: state.extents.total(),
            used: state.extents.used(),
            peak: state.extents.peak(),
            largest_free: state.extents.largest(),
            live: state.live,
            retired: state.retired.len(),
        }
    }

    /// Gives memory of a failed world back to the system: what is free, and what failed calls have
    /// announced. Peers may still write there, and no rank reads it. No more is allocated. A world
    /// that lives keeps its memory.
    ///
    /// # Errors
    /// [`MemoryError::System`] if the system refuses: the memory stays.
    pub(crate) fn give_back(&self) -> Result<(), MemoryError> {
        let Err(cause) = self.health.check() else { return Ok(()) };
        let mut state = self.state();
        state.reap();
        let ranges: Vec<_> = state.extents.free.iter().chain(&state.abandoned).copied().collect();
        state.given_back = Some(cause);
        // The system takes long for large ranges. None of them is allocated any more.
        drop(state);
        ranges
            .iter()
            .try_for_each(|&(offset, len)| self.mapped.give_back(self.member, self.start + offset, len))
    }

    /// Fills all free memory with one byte. Tests use it to show that pads and sums never depend on
    /// old contents.
    pub fn poison(&self, byte: u8) {
        let mut state = self.state();
        state.reap();
        for &(offset, len) in &state.extents.free {
            if let Ok(at) = self.mapped.at(self.member, self.start + offset, len) {
                // SAFETY: a free extent of our own pool, checked by `at`; the lock keeps it free
                // meanwhile.
                unsafe { std::ptr::write_bytes(at.as_ptr(), byte, len as usize) };
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent between any two statements that can panic: a poisoned lock is
        // still usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn reap(&mut self) {
        let extents = &mut self.extents;
        self.retired.retain(|r| {
            let granted = r.release.is_released(r.value);
            if granted {
                extents.free(r.offset, r.len);
            }
            !granted
        });
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("rank", &self.rank).field("report", &self.report()).finish()
    }
}

/// Reserved bytes of a pool; given back when dropped.
#[derive(Debug)]
pub struct Extent {
    pool: Arc<Pool>,
    offset: u64,
    len: u64,
    /// Peers were to write here, and never to read.
    announced: bool,
}

impl Extent {
    /// First byte, counted from the start of the pool.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes reserved.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pool it is of.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The same for peers to write to, and never to read.
    pub(crate) fn announced(mut self) -> Self {
        self.announced = true;
        self
    }

    /// Gives back everything behind the first `len` bytes.
    pub fn trim(&mut self, len: u64) {
        let keep = Extents::round(len).min(self.len);
        self.pool.state().extents.free(self.offset + keep, self.len - keep);
        self.len = keep;
    }

    /// Gives back everything before byte `at`, rounded up to a multiple of 64.
    pub fn skip(&mut self, at: u64) {
        let gone = Extents::round(at).min(self.len);
        self.pool.state().extents.free(self.offset, gone);
        (self.offset, self.len) = (self.offset + gone, self.len - gone);
    }

    /// `count` elements from byte `offset` on.
    ///
    /// The library hands out an extent only when all ranks with a write grant have signaled, and
    /// grants no writes while it is handed out. So no one else uses the slice.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Misaligned`].
    pub fn slice<T: bytemuck::Pod>(&self, offset: u64, count: usize) -> Result<&[T], MemoryError> {
        let at = self.at::<T>(offset, count)?;
        access::read(at.as_ptr().cast(), (count * size_of::<T>()) as u64);
        // SAFETY: `at` checked bounds and alignment; T is plain data; no rank has a write grant
        // (see above).
        Ok(unsafe { std::slice::from_raw_parts(at.as_ptr(), count) })
    }

    /// As [`Extent::slice`], to write to.
    ///
    /// # Errors
    /// As [`Extent::slice`].
    pub fn slice_mut<T: bytemuck::Pod>(
        &mut self,
        offset: u64,
        count: usize,
    ) -> Result<&mut [T], MemoryError> {
        let at = self.at::<T>(offset, count)?;
        access::write(at.as_ptr().cast(), (count * size_of::<T>()) as u64);
        // SAFETY: as in `slice`; the extent is borrowed exclusively, and peers read it only after
        // it was offered, which takes it from its holder.
        Ok(unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), count) })
    }

    fn at<T>(&self, offset: u64, count: usize) -> Result<NonNull<T>, MemoryError> {
        let len = (count as u64).saturating_mul(size_of::<T>() as u64);
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(MemoryError::OutOfBounds { peer: self.pool.rank, offset, len, size: self.len });
        }
        let at = self.pool.mapped.at(self.pool.member, self.pool.start + self.offset + offset, len)?;
        let address = at.as_ptr() as usize;
        if !address.is_multiple_of(align_of::<T>()) {
            return Err(MemoryError::Misaligned { address, align: align_of::<T>() });
        }
        Ok(at.cast())
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.live -= 1;
        // In a failed world a call may have ended while peers still write to announced memory. It
        // stays reserved until the rebuilt world has a heap of its own.
        match self.pool.health.check() {
            Ok(()) => state.extents.free(self.offset, self.len),
            Err(_) if self.announced => state.abandoned.push((self.offset, self.len)),
            // Peers may still read what they were offered.
            Err(_) => {}
        }
    }
}

/// All sizes and offsets are multiples of this: a cache line, and the widest vector store.
const GRAIN: u64 = 64;

/// Free and used bytes of a space.
#[derive(Clone, Debug)]
pub struct Extents {
    total: u64,
    used: u64,
    peak: u64,
    /// (offset, length), ascending, never empty, never touching.
    free: Vec<(u64, u64)>,
}

impl Extents {
    /// A space of `total` bytes, all free.
    pub fn new(total: u64) -> Self {
        let total = total / GRAIN * GRAIN;
        let mut free = Vec::with_capacity(64);
        if total > 0 {
            free.push((0, total));
        }
        Extents { total, used: 0, peak: 0, free }
    }

    /// Takes `len` bytes, rounded up; the offset, or the largest length that could have been had.
    pub fn alloc(&mut self, len: u64) -> Result<u64, u64> {
        self.alloc_aligned(len, (GRAIN, 0))
    }

    /// The same in a space that begins at address `start`: at an address that is a multiple of
    /// `align`, which is a power of two from the grain on. `start` is a multiple of the grain.
    pub fn alloc_aligned(&mut self, len: u64, (align, start): (u64, u64)) -> Result<u64, u64> {
        let len = Self::round(len);
        if len == 0 {
            return Ok(0);
        }
        let gap = |offset: u64| (start + offset).wrapping_neg() & (align - 1);
        let fits =
            |&(offset, free): &(u64, u64)| free.checked_sub(gap(offset)).is_some_and(|rest| rest >= len);
        let Some(index) = self.free.iter().position(fits) else {
            return Err(self.largest());
        };
        let (before, free) = self.free[index];
        let offset = before + gap(before);
        let pieces = [(before, gap(before)), (offset + len, free - gap(before) - len)];
        self.free.splice(index..=index, pieces.into_iter().filter(|&(_, left)| left > 0));
        self.count(len);
        Ok(offset)
    }

    /// Takes the largest free range, or the first `most` bytes of it if that is less: (offset,
    /// length), (0, 0) if there is none.
    pub fn take_largest(&mut self, most: u64) -> (u64, u64) {
        let Some(index) = (0..self.free.len()).max_by_key(|&i| (self.free[i].1, u64::MAX - self.free[i].0))
        else {
            return (0, 0);
        };
        let (offset, free) = self.free[index];
        let len = Self::round(most).min(free);
        if len == free {
            self.free.remove(index);
        } else {
            self.free[index] = (offset + len, free - len);
        }
        self.count(len);
        (offset, len)
    }

    /// Gives `len` bytes (rounded up) at `offset` back.
    pub fn free(&mut self, offset: u64, len: u64) {
        let len = Self::round(len);
        if len == 0 {
            return;
        }
        self.used -= len;
        let index = self.free.partition_point(|&(free, _)| free < offset);
        self.free.insert(index, (offset, len));
        if self.free.get(index + 1).is_some_and(|&(next, _)| next == offset + len) {
            self.free[index].1 += self.free.remove(index + 1).1;
        }
        if index > 0 && self.free[index - 1].0 + self.free[index - 1].1 == offset {
            self.free[index - 1].1 += self.free.remove(index).1;
        }
    }

    /// Adds bytes at the end: the space has `total` of them from now on. A smaller number changes
    /// nothing.
    pub fn grow(&mut self, total: u64) {
        let (before, total) = (self.total, total / GRAIN * GRAIN);
        let Some(more) = total.checked_sub(before) else { return };
        self.total = total;
        // As if they had been taken.
        self.used += more;
        self.free(before, more);
    }

    /// Bytes that the space lacks at its end for `len` in one piece: none if it has such a piece.
    pub fn lack(&self, len: u64) -> u64 {
        let len = Self::round(len);
        if self.largest() >= len {
            return 0;
        }
        let last = self.free.last().filter(|&&(offset, free)| offset + free == self.total);
        len - last.map_or(0, |&(_, free)| free)
    }

    /// Length of the largest free range.
    pub fn largest(&self) -> u64 {
        self.free.iter().map(|&(_, len)| len).max().unwrap_or(0)
    }

    /// Bytes of the space.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes taken.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// The most bytes ever allocated at once.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// `len` as it is taken; more than any space has, if it cannot be.
    pub fn round(len: u64) -> u64 {
        len.checked_next_multiple_of(GRAIN).unwrap_or(u64::MAX)
    }

    fn count(&mut self, len: u64) {
        self.used += len;
        self.peak = self.peak.max(self.used);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn extents_never_overlap_and_all_come_back(steps in prop::collection::vec((0u64..3000, any::<prop::sample::Index>()), 0..80)) {
            let mut space = Extents::new(64 * 1024);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (len, pick) in steps {
                if len % 3 == 0 && !held.is_empty() {
                    let (offset, len) = held.swap_remove(pick.index(held.len()));
                    space.free(offset, len);
                } else if let Ok(offset) = space.alloc(len) {
                    let len = Extents::round(len);
                    prop_assert!(offset % GRAIN == 0 && offset + len <= space.total());
                    for &(other, size) in &held {
                        prop_assert!(offset + len <= other || other + size <= offset || len == 0 || size == 0);
                    }
                    held.push((offset, len));
                }
                prop_assert_eq!(space.used(), held.iter().map(|&(_, len)| len).sum::<u64>());
            }
            for (offset, len) in held {
                space.free(offset, len);
            }
            prop_assert_eq!((space.largest(), space.used()), (space.total(), 0));
        }
    }

    #[test]
    fn the_first_fit_is_taken_and_the_largest_announced() {
        let mut space = Extents::new(1024);
        let a = space.alloc(128).unwrap();
        let b = space.alloc(64).unwrap();
        space.alloc(256).unwrap();
        space.free(a, 128);
        assert_eq!(space.alloc(100), Ok(0), "rounded up to the hole of 128");
        assert_eq!(space.take_largest(100), (448, 128), "rounded up");
        assert_eq!(space.take_largest(u64::MAX), (576, 448));
        space.free(b, 64);
        assert_eq!(space.alloc(65), Err(64), "only the hole of 64 is left");
    }

    #[test]
    fn spaces_grow_at_their_end() {
        let mut space = Extents::new(256);
        space.alloc(192).unwrap();
        assert_eq!([space.lack(64), space.lack(65), space.lack(1024)], [0, 64, 960]);
        space.grow(512);
        assert_eq!((space.total(), space.used(), space.lack(320)), (512, 192, 0), "joined with the free end");
        space.grow(256);
        assert_eq!(space.total(), 512, "it does not shrink");
        assert_eq!(space.alloc(320), Ok(192));
        assert_eq!(space.lack(64), 64, "nothing is free at its end");
        space.free(0, 192);
        assert_eq!([space.lack(192), space.lack(256)], [0, 256]);
    }

    #[test]
    fn aligned_extents_leave_what_lies_before_them_free() {
        let mut space = Extents::new(2048);
        // Addresses from 192 on: the first multiple of 512 is 320 bytes behind.
        assert_eq!(space.alloc_aligned(100, (512, 192)), Ok(320));
        assert_eq!(space.alloc_aligned(512, (512, 192)), Ok(832));
        assert_eq!(space.alloc_aligned(512, (512, 192)), Ok(1344));
        assert_eq!(space.alloc_aligned(512, (512, 192)), Err(384), "none is large enough");
        assert_eq!((space.alloc(320), space.alloc(384), space.used()), (Ok(0), Ok(448), 2048 - 192));
        space.free(320, 100);
        assert_eq!(space.alloc_aligned(128, (512, 192)), Ok(320));
    }
}
