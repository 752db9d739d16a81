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
//!
//! The codes are e4m3, as OCP defines them ("FN": finite numbers only).
//!
//! ```text
//!   s eeee mmm      1.mmm x 2^(eeee - 7)      from 2^-6 to 448
//!   s 0000 mmm      0.mmm x 2^-6              steps of 2^-9
//!   s 1111 111      NaN; there are no infinities
//! ```
//!
//! Both directions are free of branches and of tables, so that the compiler vectorizes their loops.

use super::vector::{Arithmetic, Format, Kernel, LANES, Vector, with_format};
use crate::dtype::Fp8RowShape;

const BLOCK: usize = Fp8RowShape::BLOCK;

/// Arguments of the way to records: as many rows as records, without gaps.
pub(super) struct Quantize<'a> {
    pub(super) dtype: Arithmetic,
    pub(super) shape: Fp8RowShape,
    pub(super) rows: &'a [u8],
    pub(super) records: &'a mut [u8],
}

/// Arguments of the way back.
pub(super) struct Dequantize<'a> {
    pub(super) dtype: Arithmetic,
    pub(super) shape: Fp8RowShape,
    pub(super) records: &'a [u8],
    pub(super) rows: &'a mut [u8],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for the set.
        unsafe { with_format!(self.dtype, F => self.of::<V, F>()) }
    }
}

impl Quantize<'_> {
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
                    *code = encode_e4m3(x * inverse);
                }
                codes.copy_from_slice(&block[..codes.len()]);
                stored.copy_from_slice(&scale.to_ne_bytes());
            }
        }
    }
}

impl Kernel for Dequantize<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller answers for the set.
        unsafe { with_format!(self.dtype, F => self.of::<V, F>()) }
    }
}

impl Dequantize<'_> {
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
                    *value = decode_e4m3(code) * scale;
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
    (f32::from_bits(amax) / MAX_E4M3).max(f32::MIN_POSITIVE)
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

/// The largest value.
const MAX_E4M3: f32 = 448.0;

const NAN: u32 = 0x7f;

/// Half a step above [`MAX_E4M3`]: up to here it is the nearest value, also at the tie, for its
/// mantissa is even.
const LIMIT: f32 = 464.0;

/// Exponents of `f32` are biased by so much more.
const BIAS: u32 = 127 - 7;

/// Bits of the mantissa of `f32` that have no place.
const DROPPED: u32 = 23 - 3;

/// The smallest value with a full mantissa.
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;

/// `f32` from here to twice as much are 2^-9 apart, like the values below [`SMALLEST_NORMAL`].
const STEPS: f32 = 16384.0;

/// The nearest code, ties to even. NaN, infinities and values beyond 464 become NaN: `0x7f`,
/// without a sign.
#[inline(always)]
fn encode_e4m3(x: f32) -> u8 {
    let (sign, magnitude) = (x.to_bits() >> 24 & 0x80, x.abs());
    let bits = magnitude.to_bits();
    let odd = bits >> DROPPED & 1;
    let rounded = bits.wrapping_add((1 << (DROPPED - 1)) - 1 + odd) >> DROPPED;
    let normal = rounded.wrapping_sub(BIAS << 3);
    // The addition rounds: the excess over STEPS is the number of steps.
    let small = (magnitude + STEPS).to_bits().wrapping_sub(STEPS.to_bits());
    let code = if magnitude < SMALLEST_NORMAL { small } else { normal };
    (if magnitude <= LIMIT { sign | code } else { NAN }) as u8
}

/// The value of a code.
#[inline(always)]
fn decode_e4m3(code: u8) -> f32 {
    let (sign, code) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
    let normal = f32::from_bits((code << DROPPED) + (BIAS << 23));
    let small = code as f32 * (SMALLEST_NORMAL / 8.0);
    let magnitude = if code < 8 { small } else { normal };
    let magnitude = if code == NAN { f32::NAN } else { magnitude };
    f32::from_bits(magnitude.to_bits() | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exact, which `powi` does not promise to be.
    fn power_of_two(exponent: i32) -> f64 {
        f64::from_bits(u64::from((1023 + exponent).unsigned_abs()) << 52)
    }

    /// The value of a code as the table above reads.
    fn value(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa / 8.0 * power_of_two(-6),
            _ => (1.0 + mantissa / 8.0) * power_of_two(exponent - 7),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    /// The nearest of all codes with the sign of `x`; of two that are as near, the even one.
    fn nearest(x: f32) -> u8 {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let distance = |code: &u8| (f64::from(x) - value(*code)).abs();
        (sign..sign + 0x7f)
            .min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
            .unwrap()
    }

    #[test]
    fn every_code_has_the_value_of_the_standard() {
        for code in 0..=u8::MAX {
            let (seen, expected) = (decode_e4m3(code), value(code) as f32);
            assert!(seen.to_bits() == expected.to_bits() || seen.is_nan() && expected.is_nan(), "{code:#x}");
            assert_eq!(seen.is_nan(), code & 0x7f == 0x7f, "{code:#x}");
        }
        assert_eq!(decode_e4m3(0x7e), MAX_E4M3);
    }

    #[test]
    fn every_value_keeps_its_code_and_nan_the_one_without_a_sign() {
        for code in 0..=u8::MAX {
            assert_eq!(encode_e4m3(decode_e4m3(code)), if decode_e4m3(code).is_nan() { 0x7f } else { code });
        }
    }

    #[test]
    fn value_between_codes_rounds_to_nearest_even() {
        for code in 0..0x7eu8 {
            let (below, above) = (decode_e4m3(code), decode_e4m3(code + 1));
            let tie = (below + above) / 2.0;
            for x in [below, tie, above].into_iter().flat_map(|x| [x.next_down(), x, x.next_up()]) {
                for x in [x, -x] {
                    assert_eq!(encode_e4m3(x), nearest(x), "{x:e}");
                }
            }
        }
    }

    #[test]
    fn every_sixteenth_thousand_f32_goes_to_the_nearest_code() {
        for x in (0..=LIMIT.to_bits()).step_by(16_001).map(f32::from_bits) {
            for x in [x, -x] {
                assert_eq!(encode_e4m3(x), nearest(x), "{x:e}");
            }
        }
    }

    #[test]
    fn value_beyond_e4m3_becomes_nan() {
        for x in [LIMIT.next_up(), 480.0, f32::MAX, f32::INFINITY, f32::NAN, f32::from_bits(0x7f80_0001)] {
            assert_eq!((encode_e4m3(x), encode_e4m3(-x)), (0x7f, 0x7f), "{x:e}");
        }
        assert_eq!((encode_e4m3(LIMIT), encode_e4m3(-LIMIT)), (0x7e, 0xfe));
    }
}
