//! Loops for the backward of a weighted combine: `<y, g>` for the weights, `w * g` for the rows.
//!
//! The order of a dot product is part of its result, so it is fixed for every instruction set:
//!
//! ```text
//!   lane j  =  +0 + a[j] b[j] + a[j+16] b[j+16] + ...        16 lanes, products rounded first
//!   lane j +=  lane j+8,  then  lane j+4,  lane j+2,  lane j+1
//! ```

use super::arithmetic::{Arithmetic, Format, with_format};
use super::vector::{Kernel, LANES, LINE, Vector};

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
