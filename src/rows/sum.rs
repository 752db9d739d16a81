//! Sums of rows: the arithmetic of combine, and of the gradients of weighted sums.
//!
//! ```text
//!             block of columns, in registers
//!   row 0   ------[====]---------->   partial = wire(+0 + row 0 + row 1)      group of 2
//!   row 1   ------[====]---------->   total   = +0 + partial
//!   row 2   ======[====]==========>   total   = total + row 2                 PARTIAL, in the wire's type
//!   row 3   ------[====]---------->   partial = wire(+0 + row 3)              group of 1
//!                   |                 total   = total + partial
//!   out     ------[====]---------->   canonical NaN, one rounding, one store
//! ```
//!
//! Columns are the outer loop and rows the inner one: the sums never leave the registers, each row
//! is read once, the target is written once. A plain sum is the case of one group. That costs no
//! bits: a sum that starts from +0 is never -0, so adding it to +0 changes nothing. A partial that
//! was stored elsewhere is as good as one taken here: beyond the wire's rounding, storing changes
//! at most the sign of a zero and the kind of a NaN, and neither shows in the total.
//!
//! Rows lie scattered, each too short for a hardware prefetcher. So the rows of the next sum can be
//! named behind those of this one: they are fetched, column by column, while these are added.
//!
//! The backward of a weighted combine takes `<y, g>` for the weights and `w * g` for the rows. The
//! order of a dot product is part of its result, so it is fixed for every instruction set:
//!
//! ```text
//!   lane j  =  +0 + a[j] b[j] + a[j+16] b[j+16] + ...        16 lanes, products rounded first
//!   lane j +=  lane j+8,  then  lane j+4,  lane j+2,  lane j+1
//! ```

use super::Stores;
use super::vector::{
    Arithmetic, Bf16, F16, F32, Format, Kernel, LANES, LINE, Vector, WireFormat, with_format,
};
use crate::dtype::{PARTIAL, PartialDtype};

/// Vectors per visit of a row: 64 columns, two lines of bf16, so that no line is touched by two
/// visits.
const BLOCK: usize = 4;

/// The operands of [`RowKernels::grouped_sum`](super::RowKernels::grouped_sum).
#[derive(Clone, Copy, Debug)]
pub struct GroupedSum<'a> {
    /// Type of the rows; not of those that are [`PARTIAL`], which are in the wire's type.
    pub dtype: Arithmetic,
    /// The type to which partial sums are rounded. One that [carries](PartialDtype::carries)
    /// `dtype`.
    pub wire: PartialDtype,
    /// Where the result goes, and in which type.
    pub out: SumOutput,
    /// The rows of all groups, one group after another, then those of the next sum, if it is known.
    pub rows: &'a [*const u8],
    /// A weight for each row of the groups. That of a partial counts for nothing.
    pub weights: Option<&'a [f32]>,
    /// Lengths of consecutive groups of `rows`, or [`PARTIAL`] for one row that holds the sum of a
    /// group.
    pub groups: &'a [u32],
    /// Elements of each row and of the result.
    pub columns: usize,
    /// How the result is written.
    pub stores: Stores,
}

/// Target of a sum, and its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumOutput {
    /// The result itself, in the type of the rows.
    Total(*mut u8),
    /// A partial sum that another rank goes on with, in the wire's type.
    Partial(*mut u8),
}

impl Kernel for GroupedSum<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for the rows, the weights and the target.
        unsafe {
            match (self.dtype, self.wire) {
                (Arithmetic::Bf16, PartialDtype::Bf16) => self.with_wire::<V, Bf16, Bf16>(),
                // No other type travels in bf16.
                (Arithmetic::F32, _) => self.with_wire::<V, F32, F32>(),
                (Arithmetic::Bf16, _) => self.with_wire::<V, Bf16, F32>(),
                (Arithmetic::F16, _) => self.with_wire::<V, F16, F32>(),
            }
        }
    }
}

/// The types of a sum are `F` for its rows and `W` for the wire.
///
/// Each function has its caller's requirements: the CPU has the set of `V`; `columns` elements are
/// readable at every row and writable at `out`; the groups cover the rows; there is a weight for
/// every row.
impl GroupedSum<'_> {
    /// Takes the choice that the innermost loop depends on out of it.
    ///
    /// # Safety
    ///
    /// See the block.
    #[inline(always)]
    unsafe fn with_wire<V: Vector, F: Format, W: WireFormat>(&self) {
        // SAFETY: as the caller's.
        unsafe {
            match self.weights.is_some() {
                false => self.walk::<V, F, W, false>(),
                true => self.walk::<V, F, W, true>(),
            }
        }
    }

    /// Walks over the columns: blocks, then single vectors, the last of which may be short.
    ///
    /// # Safety
    ///
    /// See the block.
    #[inline(always)]
    unsafe fn walk<V: Vector, F: Format, W: WireFormat, const WEIGHTED: bool>(&self) {
        let (SumOutput::Total(out) | SumOutput::Partial(out)) = self.out;
        let streams = self.stores == Stores::Streaming && out.addr().is_multiple_of(LINE);
        let mut column = 0;
        // SAFETY: each step stays within `columns`.
        unsafe {
            while self.columns - column >= BLOCK * LANES {
                let total = self.block::<V, F, W, WEIGHTED, BLOCK>(column, LANES);
                self.write::<V, F, W, BLOCK>(total, column, LANES, streams);
                column += BLOCK * LANES;
            }
            while column < self.columns {
                let lanes = LANES.min(self.columns - column);
                let total = self.block::<V, F, W, WEIGHTED, 1>(column, lanes);
                self.write::<V, F, W, 1>(total, column, lanes, streams);
                column += lanes;
            }
        }
    }

    /// Writes `N` vectors of columns. A branch for each block costs nothing beside its rows, and a
    /// walk for each kind of target would be compiled four times.
    ///
    /// # Safety
    ///
    /// See the block. The target is aligned to a line if it `streams`.
    #[inline(always)]
    unsafe fn write<V: Vector, F: Format, W: WireFormat, const N: usize>(
        &self,
        total: [V; N],
        column: usize,
        lanes: usize,
        streams: bool,
    ) {
        // SAFETY: as the caller's; streaming is for aligned targets.
        unsafe {
            match (self.out, streams) {
                (SumOutput::Total(out), false) => write::<V, F, false, N>(total, out, column, lanes),
                (SumOutput::Total(out), true) => write::<V, F, true, N>(total, out, column, lanes),
                (SumOutput::Partial(out), false) => write::<V, W, false, N>(total, out, column, lanes),
                (SumOutput::Partial(out), true) => write::<V, W, true, N>(total, out, column, lanes),
            }
        }
    }

    /// Sums `N` vectors of columns, of which only a single one (`N == 1`) may have fewer than 16
    /// lanes.
    ///
    /// # Safety
    ///
    /// See the block.
    #[inline(always)]
    unsafe fn block<V, F, W, const WEIGHTED: bool, const N: usize>(
        &self,
        column: usize,
        lanes: usize,
    ) -> [V; N]
    where
        V: Vector,
        F: Format,
        W: WireFormat,
    {
        // SAFETY: the caller keeps the columns within the rows.
        unsafe {
            let mut total = [V::splat(0.0); N];
            let mut first = 0;
            for &group in self.groups {
                if group == PARTIAL {
                    let row = self.rows.get_unchecked(first).add(column * W::BYTES);
                    for (n, total) in total.iter_mut().enumerate() {
                        *total = total.add(read::<V, W, N>(row, n, lanes));
                    }
                    first += 1;
                    continue;
                }
                let last = first + group as usize;
                let mut partial = [V::splat(0.0); N];
                for i in first..last {
                    let row = self.rows.get_unchecked(i).add(column * F::BYTES);
                    let weight = V::splat(if WEIGHTED { self.weight(i) } else { 1.0 });
                    for (n, sum) in partial.iter_mut().enumerate() {
                        let x = read::<V, F, N>(row, n, lanes);
                        *sum = sum.add(if WEIGHTED { x.mul(weight) } else { x });
                    }
                }
                for (total, partial) in total.iter_mut().zip(partial) {
                    *total = total.add(W::round(partial));
                }
                first = last;
            }
            for row in self.rows.get(first..).unwrap_or_default() {
                for line in (0..N * LANES * F::BYTES).step_by(LINE) {
                    V::prefetch(row.wrapping_add(column * F::BYTES + line));
                }
            }
            total
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

/// Reads vector `n` of a block of `N`.
///
/// # Safety
///
/// The CPU has the set of `V`; the vector's elements, of which only a block of one has fewer than
/// 16, are readable.
#[inline(always)]
unsafe fn read<V: Vector, F: Format, const N: usize>(row: *const u8, n: usize, lanes: usize) -> V {
    // SAFETY: as the caller's.
    unsafe {
        let src = row.add(n * LANES * F::BYTES);
        if N > 1 || lanes == LANES { F::load(src) } else { F::load_some(src, lanes) }
    }
}

/// Writes a block, from `column` of the target on.
///
/// # Safety
///
/// The CPU has the set of `V`; the block's elements are writable at `out`, which is aligned to a
/// line if `STREAM`.
#[inline(always)]
unsafe fn write<V: Vector, O: Format, const STREAM: bool, const N: usize>(
    block: [V; N],
    out: *mut u8,
    column: usize,
    lanes: usize,
) {
    for (n, lanes_of) in block.into_iter().enumerate() {
        // SAFETY: as the caller's.
        unsafe { O::store_some::<V, STREAM>(lanes_of, out.add((column + n * LANES) * O::BYTES), lanes) }
    }
}

/// Arguments of a dot product of two rows.
pub(super) struct Dot {
    pub(super) dtype: Arithmetic,
    pub(super) a: *const u8,
    pub(super) b: *const u8,
    pub(super) columns: usize,
}

/// Arguments of `row *= weight`.
pub(super) struct Scale {
    pub(super) dtype: Arithmetic,
    pub(super) row: *mut u8,
    pub(super) weight: f32,
    pub(super) columns: usize,
}

impl Kernel for Dot {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f32 {
        // SAFETY: the caller answers for both rows.
        unsafe { with_format!(self.dtype, F => self.of::<V, F>()) }
    }
}

impl Dot {
    /// # Safety
    ///
    /// The CPU has the set of `V`; `columns` elements of `F` are readable at both rows.
    #[inline(always)]
    unsafe fn of<V: Vector, F: Format>(&self) -> f32 {
        let whole = self.columns / LANES * LANES;
        // SAFETY: each step stays within `columns`. Short vectors are padded with +0, whose
        // products leave the other lanes alone and these ones as they are: a lane is never -0.
        unsafe {
            let mut sum = V::splat(0.0);
            for column in (0..whole).step_by(LANES) {
                let (a, b) = (self.a.add(column * F::BYTES), self.b.add(column * F::BYTES));
                sum = sum.add(F::load::<V>(a).mul(F::load::<V>(b)));
            }
            if whole < self.columns {
                let lanes = self.columns - whole;
                let (a, b) = (self.a.add(whole * F::BYTES), self.b.add(whole * F::BYTES));
                sum = sum.add(F::load_some::<V>(a, lanes).mul(F::load_some::<V>(b, lanes)));
            }
            fold(sum)
        }
    }
}

/// Folds the lanes by halves.
///
/// # Safety
///
/// The CPU has the set of `V`.
#[inline(always)]
unsafe fn fold<V: Vector>(sum: V) -> f32 {
    let mut lanes = [0f32; LANES];
    const { assert!(size_of::<[f32; LANES]>() == LINE) };
    // SAFETY: the array has the 64 bytes that are written.
    unsafe { sum.store_f32::<false>(lanes.as_mut_ptr().cast()) };
    for half in [8, 4, 2, 1] {
        for j in 0..half {
            lanes[j] += lanes[j + half];
        }
    }
    if lanes[0].is_nan() { f32::from_bits(0x7fc0_0000) } else { lanes[0] }
}

impl Kernel for Scale {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for the row.
        unsafe { with_format!(self.dtype, F => self.of::<V, F>()) }
    }
}

impl Scale {
    /// # Safety
    ///
    /// The CPU has the set of `V`; `columns` elements of `F` are readable and writable at `row`.
    #[inline(always)]
    unsafe fn of<V: Vector, F: Format>(&self) {
        let whole = self.columns / LANES * LANES;
        // SAFETY: each step stays within `columns`.
        unsafe {
            let weight = V::splat(self.weight);
            for column in (0..whole).step_by(LANES) {
                let at = self.row.add(column * F::BYTES);
                F::store_some::<V, false>(F::load::<V>(at).mul(weight), at, LANES);
            }
            if whole < self.columns {
                let at = self.row.add(whole * F::BYTES);
                let lanes = self.columns - whole;
                F::store_some::<V, false>(F::load_some::<V>(at, lanes).mul(weight), at, lanes);
            }
        }
    }
}
