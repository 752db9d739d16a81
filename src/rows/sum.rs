//! Sums of rows: the arithmetic of combine.
//!
//! ```text
//!             block of columns, in registers
//!   row 0   ------[====]---------->   partial = +0 + row 0 + row 1      group 0
//!   row 1   ------[====]---------->   total   = +0 + partial
//!   row 2   ------[====]---------->   partial = +0 + row 2              group 1
//!                   |                 total   = total + partial
//!   out     ------[====]---------->   canonical NaN, one rounding, one store
//! ```
//!
//! Columns are the outer loop and rows the inner one: the sums never leave the registers, each row is read
//! once, the target is written once. A plain sum is the case of one group. That costs no bits: a sum that
//! starts from +0 is never -0, so adding it to +0 changes nothing.
//!
//! Rows lie scattered, each shorter than what a hardware prefetcher needs to get going. So the rows of the next sum
//! can be named behind those of this one: they are fetched, column by column, while these are added.

use super::Stores;
use super::format::{Arithmetic, Bf16, F16, F32, Format};
use super::vector::{Kernel, LANES, LINE, Vector};

/// Vectors per visit of a row: 64 columns, two lines of bf16, so that no line is touched by two visits.
const BLOCK: usize = 4;

/// Arguments of a sum: `groups` are the lengths of consecutive groups of `rows`.
pub(super) struct Sum<'a> {
    pub(super) dtype: Arithmetic,
    pub(super) out: *mut u8,
    pub(super) rows: &'a [*const u8],
    pub(super) weights: Option<&'a [f32]>,
    pub(super) groups: &'a [u32],
    pub(super) columns: usize,
    pub(super) stores: Stores,
}

impl Kernel for Sum<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for the rows, the weights and the target.
        unsafe {
            match self.dtype {
                Arithmetic::F32 => self.of::<V, F32>(),
                Arithmetic::Bf16 => self.of::<V, Bf16>(),
                Arithmetic::F16 => self.of::<V, F16>(),
            }
        }
    }
}

/// Each function demands what its caller does: the CPU has the set of `V`; `columns` elements of `F` are
/// readable at every row and writable at `out`; the groups cover the rows; there is a weight for every row.
impl Sum<'_> {
    /// Takes the choices that hold for the whole row out of the loops.
    ///
    /// # Safety
    ///
    /// See the block.
    #[inline(always)]
    unsafe fn of<V: Vector, F: Format>(&self) {
        let streams = self.stores == Stores::Streaming && self.out.addr().is_multiple_of(LINE);
        // SAFETY: as the caller's; streaming is for aligned targets.
        unsafe {
            match (self.weights.is_some(), streams) {
                (false, false) => self.columns::<V, F, false, false>(),
                (false, true) => self.columns::<V, F, false, true>(),
                (true, false) => self.columns::<V, F, true, false>(),
                (true, true) => self.columns::<V, F, true, true>(),
            }
        }
    }

    /// Walks over the columns: blocks, then single vectors, the last of which may be short.
    ///
    /// # Safety
    ///
    /// See the block.
    #[inline(always)]
    unsafe fn columns<V: Vector, F: Format, const WEIGHTED: bool, const STREAM: bool>(&self) {
        let mut column = 0;
        // SAFETY: each step stays within `columns`.
        unsafe {
            while self.columns - column >= BLOCK * LANES {
                self.block::<V, F, WEIGHTED, STREAM, BLOCK>(column, LANES);
                column += BLOCK * LANES;
            }
            while column < self.columns {
                let lanes = LANES.min(self.columns - column);
                self.block::<V, F, WEIGHTED, STREAM, 1>(column, lanes);
                column += lanes;
            }
        }
    }

    /// Sums `N` vectors of columns, of which only a single one (`N == 1`) may have fewer than 16 lanes.
    ///
    /// # Safety
    ///
    /// See the block.
    #[inline(always)]
    unsafe fn block<V: Vector, F: Format, const WEIGHTED: bool, const STREAM: bool, const N: usize>(
        &self,
        column: usize,
        lanes: usize,
    ) {
        // SAFETY: the caller keeps the columns within the rows.
        unsafe {
            let mut total = [V::splat(0.0); N];
            let mut first = 0;
            for &count in self.groups {
                let last = first + count as usize;
                let mut partial = [V::splat(0.0); N];
                for i in first..last {
                    let row = self.rows.get_unchecked(i).add(column * F::BYTES);
                    let weight = V::splat(if WEIGHTED { self.weight(i) } else { 1.0 });
                    for (n, sum) in partial.iter_mut().enumerate() {
                        let src = row.add(n * LANES * F::BYTES);
                        let whole = N > 1 || lanes == LANES;
                        let x: V = if whole { F::load(src) } else { F::load_some(src, lanes) };
                        *sum = sum.add(if WEIGHTED { x.mul(weight) } else { x });
                    }
                }
                for (total, partial) in total.iter_mut().zip(partial) {
                    *total = total.add(partial);
                }
                first = last;
            }
            for row in self.rows.get(first..).unwrap_or_default() {
                for line in (0..N * LANES * F::BYTES).step_by(LINE) {
                    V::prefetch(row.wrapping_add(column * F::BYTES + line));
                }
            }
            let out = self.out.add(column * F::BYTES);
            for (n, total) in total.into_iter().enumerate() {
                F::store_some::<V, STREAM>(total, out.add(n * LANES * F::BYTES), lanes);
            }
        }
    }

    /// The weight of row `i`.
    ///
    /// # Safety
    ///
    /// There are weights, one for every row.
    #[inline(always)]
    unsafe fn weight(&self, i: usize) -> f32 {
        // SAFETY: as the caller's.
        unsafe { *self.weights.unwrap_unchecked().get_unchecked(i) }
    }
}
