//! Rows to fp8 records and back, a scale for each block of 128 values.
//!
//! ```text
//!   amax   =  the largest |x| of the block that is finite
//!   scale  =  max(amax / 448, 2^-126)          f32; the largest value becomes the largest code
//!   code   =  e4m3(x * (1 / scale))            f32, f32, then the nearest code, ties to even
//!   x'     =  code * scale                     f32, then one rounding to the type of the row
//! ```
//!
//! The lower bound is the smallest scale whose reciprocal is a number; blocks of zeros have it too.
//! (Training codes bound `amax` at 1e-4 or 1e-10 for the same reason, and lose rows that are merely
//! small.) A value that is not finite becomes NaN and affects no other value: it does not count for
//! the scale.

use super::arithmetic::{Arithmetic, Format, with_format};
use super::e4m3;
use super::vector::{Kernel, LANES, Vector};
use crate::dtype::Fp8RowShape;

const BLOCK: usize = Fp8RowShape::BLOCK;

/// Arguments of the way to records: as many rows as records, without gaps.
pub(super) struct Quantise<'a> {
    pub(super) dtype: Arithmetic,
    pub(super) shape: Fp8RowShape,
    pub(super) rows: &'a [u8],
    pub(super) records: &'a mut [u8],
}

/// Arguments of the way back.
pub(super) struct Dequantise<'a> {
    pub(super) dtype: Arithmetic,
    pub(super) shape: Fp8RowShape,
    pub(super) records: &'a [u8],
    pub(super) rows: &'a mut [u8],
}

impl Kernel for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for the set.
        unsafe { with_format!(self.dtype, F => self.of::<V, F>()) }
    }
}

impl Quantise<'_> {
    /// # Safety
    ///
    /// The CPU has the set of `V`.
    #[inline(always)]
    unsafe fn of<V: Vector, F: Format>(self) {
        let rows = self.rows.chunks_exact((self.shape.hidden() * F::BYTES).max(1));
        let records = self.records.chunks_exact_mut(self.shape.bytes().max(1));
        for (row, record) in rows.zip(records) {
            let (payload, behind) = record.split_at_mut(self.shape.hidden());
            behind.fill(0);
            let scales = behind[self.shape.scales_offset() - self.shape.hidden()..].chunks_exact_mut(4);
            let blocks = row.chunks(BLOCK * F::BYTES).zip(payload.chunks_mut(BLOCK)).zip(scales);
            for ((values, codes), stored) in blocks {
                // SAFETY: as the caller's.
                let values = unsafe { read::<V, F>(values) };
                let scale = scale(&values);
                let inverse = 1.0 / scale;
                // Always a whole block: a loop of a fixed length becomes vectors.
                let mut block = [0; BLOCK];
                for (code, x) in block.iter_mut().zip(&values) {
                    *code = e4m3::encode(x * inverse);
                }
                codes.copy_from_slice(&block[..codes.len()]);
                stored.copy_from_slice(&scale.to_ne_bytes());
            }
        }
    }
}

impl Kernel for Dequantise<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for the set.
        unsafe { with_format!(self.dtype, F => self.of::<V, F>()) }
    }
}

impl Dequantise<'_> {
    /// # Safety
    ///
    /// The CPU has the set of `V`.
    #[inline(always)]
    unsafe fn of<V: Vector, F: Format>(self) {
        let rows = self.rows.chunks_exact_mut((self.shape.hidden() * F::BYTES).max(1));
        let records = self.records.chunks_exact(self.shape.bytes().max(1));
        for (row, record) in rows.zip(records) {
            let (payload, scales) = (&record[..self.shape.hidden()], &record[self.shape.scales_offset()..]);
            let blocks = row.chunks_mut(BLOCK * F::BYTES).zip(payload.chunks(BLOCK));
            for ((out, codes), scale) in blocks.zip(scales.chunks_exact(4)) {
                let scale = f32::from_ne_bytes([scale[0], scale[1], scale[2], scale[3]]);
                let mut block = [0; BLOCK];
                block[..codes.len()].copy_from_slice(codes);
                let mut values = [0f32; BLOCK];
                for (value, code) in values.iter_mut().zip(block) {
                    *value = e4m3::decode(code) * scale;
                }
                // SAFETY: as the caller's.
                unsafe { write::<V, F>(&values, out) }
            }
        }
    }
}

/// The scale of a block.
#[inline(always)]
fn scale(values: &[f32; BLOCK]) -> f32 {
    // Magnitudes are ordered like their bits, and whole numbers may be compared in any order: in
    // vectors.
    let mut amax = 0;
    for x in values {
        let magnitude = x.abs().to_bits();
        amax = amax.max(if magnitude < f32::INFINITY.to_bits() { magnitude } else { 0 });
    }
    (f32::from_bits(amax) / e4m3::MAX).max(f32::MIN_POSITIVE)
}

/// Reads the elements of a block; the lanes of those that are missing read as +0.
///
/// # Safety
///
/// The CPU has the set of `V`.
#[inline(always)]
unsafe fn read<V: Vector, F: Format>(row: &[u8]) -> [f32; BLOCK] {
    let mut values = [0f32; BLOCK];
    for (src, values) in row.chunks(LANES * F::BYTES).zip(values.chunks_exact_mut(LANES)) {
        let lanes = src.len() / F::BYTES;
        // SAFETY: `src` holds so many elements, `values` sixteen.
        unsafe {
            let vector: V =
                if lanes == LANES { F::load(src.as_ptr()) } else { F::load_some(src.as_ptr(), lanes) };
            vector.store_f32::<false>(values.as_mut_ptr().cast());
        }
    }
    values
}

/// Writes as many elements of a block as `row` has.
///
/// # Safety
///
/// The CPU has the set of `V`.
#[inline(always)]
unsafe fn write<V: Vector, F: Format>(values: &[f32; BLOCK], row: &mut [u8]) {
    for (dst, values) in row.chunks_mut(LANES * F::BYTES).zip(values.chunks_exact(LANES)) {
        // SAFETY: `dst` has room for so many elements, `values` holds sixteen.
        unsafe {
            let vector = V::load_f32(values.as_ptr().cast());
            F::store_some::<V, false>(vector, dst.as_mut_ptr(), dst.len() / F::BYTES);
        }
    }
}
