//! Moving rows: copy, gather, zero.
//!
//! ```text
//!   target   |..head..|  line  |  line  |  ...  |  line  |..tail..|
//!                     ^ multiple of 64: whole lines, which alone may stream
//! ```
//!
//! A streaming store sends a whole line to memory without first reading it: half the traffic of an
//! ordinary store to a line that is not cached. It pays when the targets together are larger than
//! the cache.
//!
//! The source row after the one being copied is prefetched meanwhile, line by line: the hardware
//! cannot predict its address. A dispatch gathers run after run, so a source row is read once for
//! each of its targets: from the cache where the whole source fits, from memory top-k times where
//! it does not.

use super::Stores;
use super::vector::{Kernel, LINE, Vector};

/// Arguments of a copy of one span, in bytes.
pub(super) struct Span {
    pub(super) dst: *mut u8,
    pub(super) src: *const u8,
    pub(super) len: usize,
    pub(super) stores: Stores,
}

/// Arguments of a zero fill, in bytes.
pub(super) struct Zero {
    pub(super) dst: *mut u8,
    pub(super) len: usize,
    pub(super) stores: Stores,
}

/// Arguments of a gather: target row `i` is source row `rows[i]`.
pub(super) struct Gather<'a> {
    pub(super) dst: *mut u8,
    pub(super) src: *const u8,
    pub(super) row_bytes: usize,
    pub(super) rows: &'a [u32],
    pub(super) stores: Stores,
}

impl Kernel for Span {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for `len` bytes on both sides.
        unsafe {
            match self.stores {
                Stores::Cached => copy::<V, false>(self.dst, self.src, self.len, self.src),
                Stores::Streaming => copy::<V, true>(self.dst, self.src, self.len, self.src),
            }
        }
    }
}

impl Kernel for Zero {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for `len` bytes.
        unsafe {
            match self.stores {
                Stores::Cached => zero::<V, false>(self.dst, self.len),
                Stores::Streaming => zero::<V, true>(self.dst, self.len),
            }
        }
    }
}

impl Kernel for Gather<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for the rows on both sides.
        unsafe {
            match self.stores {
                Stores::Cached => self.gather::<V, false>(),
                Stores::Streaming => self.gather::<V, true>(),
            }
        }
    }
}

impl Gather<'_> {
    /// # Safety
    ///
    /// The CPU has the set of `V`; every target row is writable, every source row named is
    /// readable.
    #[inline(always)]
    unsafe fn gather<V: Vector, const STREAM: bool>(&self) {
        let address = |row: u32| self.src.wrapping_add(row as usize * self.row_bytes);
        for (i, &row) in self.rows.iter().enumerate() {
            // Behind the last row there is only that row itself to prefetch.
            let next = self.rows.get(i + 1).copied().unwrap_or(row);
            // SAFETY: target rows are consecutive, so row `i` lies in the range that the caller
            // guarantees, and so does the source row.
            unsafe {
                let dst = self.dst.add(i * self.row_bytes);
                copy::<V, STREAM>(dst, address(row), self.row_bytes, address(next));
            }
        }
    }
}

/// Bytes before the first whole line of a target, and the whole lines after them. Ordinary stores
/// take any alignment: they have no head.
#[inline(always)]
fn cut<const STREAM: bool>(dst: *mut u8, len: usize) -> (usize, usize) {
    let head = if STREAM { dst.addr().wrapping_neg() % LINE } else { 0 }.min(len);
    (head, (len - head) / LINE)
}

/// Copies a row, and meanwhile fetches `next`, line for line (`src` itself: nothing to fetch).
///
/// # Safety
///
/// The CPU has the set of `V`; `len` bytes are readable at `src`, writable at `dst`, and do not
/// overlap. `next` may be anything.
#[inline(always)]
unsafe fn copy<V: Vector, const STREAM: bool>(dst: *mut u8, src: *const u8, len: usize, next: *const u8) {
    let (head, lines) = cut::<STREAM>(dst, len);
    let tail = head + lines * LINE;
    // SAFETY: head, lines and tail add up to `len`; lines are aligned where they stream.
    unsafe {
        if head > 0 {
            dst.copy_from_nonoverlapping(src, head);
        }
        for offset in (head..tail).step_by(LINE) {
            V::prefetch(next.wrapping_add(offset));
            V::copy_line::<STREAM>(dst.add(offset), src.add(offset));
        }
        if tail < len {
            dst.add(tail).copy_from_nonoverlapping(src.add(tail), len - tail);
        }
    }
}

/// # Safety
///
/// The CPU has the set of `V`; `len` bytes are writable at `dst`.
#[inline(always)]
unsafe fn zero<V: Vector, const STREAM: bool>(dst: *mut u8, len: usize) {
    let (head, lines) = cut::<STREAM>(dst, len);
    let tail = head + lines * LINE;
    // SAFETY: head, lines and tail add up to `len`; lines are aligned where they stream.
    unsafe {
        dst.write_bytes(0, head);
        for offset in (head..tail).step_by(LINE) {
            V::zero_line::<STREAM>(dst.add(offset));
        }
        dst.add(tail).write_bytes(0, len - tail);
    }
}
