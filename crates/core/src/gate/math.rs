//! Exponential and logarithm of our own: the same bits on every machine, in the widest vectors of
//! the machine.
//!
//! Both are off by less than 2^-25 of their value, half an ulp of f32 at most, before it is rounded
//! to that. Numbers are f64; the polynomial at the end of an exponential is so small next to its
//! other summand that f32 suffices, with twice as many lanes. Nothing is fused and every sum has a
//! fixed order, so the vector width does not matter.

use std::f64::consts::{LN_2, LOG2_E};
use std::ops::{Add, Mul};

use fearless_simd::prelude::*;
use fearless_simd::{Level, Simd, dispatch, f32x8, f32x16, f64x8, mask32x16};

/// Added to a number and taken off again, it leaves the nearest integer; the low bits of the sum
/// are that integer plus the bias of an f64's exponent.
const ROUND: f64 = 6_755_399_441_055_744.0 + 1023.0;

/// As [`ROUND`], for f32.
const ROUND_F32: f32 = 12_582_912.0 + 127.0;

/// (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, by rising power.
const EXP: [f32; 6] = [0.5, 0.166_666_67, 0.041_666_465, 0.008_333_311, 0.001_393_365, 0.000_198_909_9];

/// (atanh(u) / u - 1) / u^2 for 0 <= u <= 1/3, by rising power of u^2.
const ATANH: [f64; 6] = [
    0.33333333325011805,
    0.2000000538497483,
    0.1428515286094183,
    0.11132355604500663,
    0.08732351232720387,
    0.10393808427873376,
];

/// Numbers of which exponentials are made together.
const ROW: usize = 8;

/// e^x for finite `x`; exactly 1 at 0. Saturates at e^-708 and e^708.
pub(super) fn exp(x: f64) -> f64 {
    let x = x.clamp(-708.0, 708.0);
    // x is r and n times ln 2.
    let shifted = x * LOG2_E + ROUND;
    let r = x - (shifted - ROUND) * LN_2;
    let power = f64::from_bits(shifted.to_bits() << 52);
    ((r + f64::from(rest(r as f32))) + 1.0) * power
}

/// e^r - 1 - r.
#[inline(always)]
fn rest<T>(r: T) -> T
where
    T: Copy + Add<Output = T> + Mul<Output = T> + Add<f32, Output = T> + Mul<f32, Output = T>,
{
    let square = r * r;
    let (low, middle, high) = (r * EXP[1] + EXP[0], r * EXP[3] + EXP[2], r * EXP[5] + EXP[4]);
    square * (square * (square * high + middle) + low)
}

/// Writes [`exp`] of `of(logit)` for each logit.
pub(super) fn exp_each(logits: &[f32], of: impl Fn(f64) -> f64, to: &mut [f64]) {
    dispatch!(Level::new(), simd => exp_rows(simd, logits, &of, to));
}

#[inline(always)]
fn exp_rows<S: Simd>(simd: S, logits: &[f32], of: &impl Fn(f64) -> f64, to: &mut [f64]) {
    let ((rows, rest), (to, to_rest)) = (logits.as_chunks(), to.as_chunks_mut());
    for (row, to) in rows.iter().zip(to) {
        *to = exp_row(simd, row, of);
    }
    if !rest.is_empty() {
        let mut row = [0.0; ROW];
        row[..rest.len()].copy_from_slice(rest);
        to_rest.copy_from_slice(&exp_row(simd, &row, of)[..rest.len()]);
    }
}

/// As [`exp`], step by step.
#[inline(always)]
fn exp_row<S: Simd>(simd: S, logits: &[f32; ROW], of: &impl Fn(f64) -> f64) -> [f64; ROW] {
    let mut x = [0.0; ROW];
    for i in 0..ROW {
        x[i] = of(f64::from(logits[i]));
    }
    let x = f64x8::from_slice(simd, &x).max(-708.0).min(708.0);
    let shifted = x * LOG2_E + ROUND;
    let r = x - (shifted - ROUND) * LN_2;
    let power = f64x8::from_bits(shifted.to_bits() << 52);
    let mut narrow = [0.0; ROW];
    for i in 0..ROW {
        narrow[i] = r[i] as f32;
    }
    let rest = rest(f32x8::from_slice(simd, &narrow));
    let mut wide = [0.0; ROW];
    for i in 0..ROW {
        wide[i] = f64::from(rest[i]);
    }
    (((r + f64x8::from_slice(simd, &wide)) + 1.0) * power).into()
}

/// By how much [`logistic_each`] is off, at most: the nearest f32 by half of that.
pub(super) const LOGISTIC_ERROR: f32 = 1.0 / (1 << 20) as f32;

/// Writes 1 / (1 + e^-logit) for each logit, made in f32 alone: twice as many at a time.
pub(super) fn logistic_each(logits: &[f32], to: &mut [f32]) {
    dispatch!(Level::new(), simd => logistic_rows(simd, logits, to));
}

#[inline(always)]
fn logistic_rows<S: Simd>(simd: S, logits: &[f32], to: &mut [f32]) {
    let ((rows, rest), (to, to_rest)) = (logits.as_chunks::<16>(), to.as_chunks_mut());
    for (row, to) in rows.iter().zip(to) {
        *to = logistic(f32x16::from_slice(simd, row)).into();
    }
    if !rest.is_empty() {
        let mut row = [0.0; 16];
        row[..rest.len()].copy_from_slice(rest);
        let row: [f32; 16] = logistic(f32x16::from_slice(simd, &row)).into();
        to_rest.copy_from_slice(&row[..rest.len()]);
    }
}

#[inline(always)]
fn logistic<S: Simd>(x: f32x16<S>) -> f32x16<S> {
    let x = x.max(-87.0).min(87.0);
    let shifted = x * -std::f32::consts::LOG2_E + ROUND_F32;
    let r = -x - (shifted - ROUND_F32) * std::f32::consts::LN_2;
    let power = f32x16::from_bits(shifted.to_bits() << 23);
    1.0 / (((r + rest(r)) + 1.0) * power + 1.0)
}

/// ln(1 + t) for 0 <= t <= 1.
#[inline]
pub(super) fn ln_1p(t: f64) -> f64 {
    let u = t / (2.0 + t);
    let w = u * u;
    let series = ATANH.into_iter().rev().reduce(|sum, c| sum * w + c).unwrap_or(0.0);
    2.0 * (u + u * w * series)
}

/// The sum, in eight lanes and then across, for any width of the machine.
pub(super) fn sum(values: &[f64]) -> f64 {
    let (rows, rest) = values.as_chunks();
    let mut lanes = dispatch!(Level::new(), simd => sum_of_rows(simd, rows));
    lanes.iter_mut().zip(rest).for_each(|(lane, value)| *lane += value);
    lanes.iter().sum()
}

#[inline(always)]
fn sum_of_rows<S: Simd>(simd: S, rows: &[[f64; 8]]) -> [f64; 8] {
    let mut sum = f64x8::splat(simd, 0.0);
    for row in rows {
        sum += f64x8::from_slice(simd, row);
    }
    sum.into()
}

/// The largest; minus infinity of none.
pub(super) fn largest(values: &[f32]) -> f32 {
    let (rows, rest) = values.as_chunks();
    let most = dispatch!(Level::new(), simd => largest_of_rows(simd, rows));
    rest.iter().fold(most, |most, &value| if value > most { value } else { most })
}

#[inline(always)]
fn largest_of_rows<S: Simd>(simd: S, rows: &[[f32; 16]]) -> f32 {
    let mut most = f32x16::splat(simd, f32::NEG_INFINITY);
    for row in rows {
        most = most.max(f32x16::from_slice(simd, row));
    }
    most.reduce_max()
}

/// Whether all are finite.
pub(super) fn finite(values: &[f32]) -> bool {
    let (rows, rest) = values.as_chunks();
    dispatch!(Level::new(), simd => rows_are_finite(simd, rows)) && rest.iter().all(|value| value.is_finite())
}

#[inline(always)]
fn rows_are_finite<S: Simd>(simd: S, rows: &[[f32; 16]]) -> bool {
    let mut fine = mask32x16::splat(simd, true);
    for row in rows {
        fine &= f32x16::from_slice(simd, row).abs().simd_le(f32::MAX);
    }
    fine.all_true()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_and_logarithm_are_good_for_f32() {
        for i in -700_000..=700_000 {
            let x = f64::from(i) * 1e-3;
            assert!((exp(x) / x.exp() - 1.0).abs() < 2f64.powi(-25), "e^{x}: {} {}", exp(x), x.exp());
        }
        for i in 0..=1_000_000 {
            let t = f64::from(i) * 1e-6;
            assert!((ln_1p(t) - t.ln_1p()).abs() <= t.ln_1p() * 2f64.powi(-25), "ln(1 + {t})");
        }
    }

    /// All widths that this machine has.
    fn levels() -> Vec<Level> {
        vec![Level::baseline(), Level::new()]
    }

    #[test]
    fn vectors_of_any_width_have_the_bits_of_single_numbers() {
        let logits: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 1.7).collect();
        for (level, count) in levels().into_iter().flat_map(|level| [1, 7, 8, 9, 1000].map(|n| (level, n))) {
            let mut seen = vec![0.0; count];
            dispatch!(level, simd => exp_rows(simd, &logits[..count], &|x| -x, &mut seen));
            for (&logit, seen) in logits.iter().zip(seen) {
                assert_eq!(seen.to_bits(), exp(-f64::from(logit)).to_bits(), "{logit} {level:?}");
            }
        }
    }

    #[test]
    fn sums_and_rough_logistics_have_same_bits_at_any_simd_width() {
        let logits: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 0.37).collect();
        let values: Vec<f64> = logits.iter().map(|&logit| exp(f64::from(logit))).collect();
        let seen = levels().into_iter().map(|level| {
            let mut rough = vec![0.0; logits.len()];
            dispatch!(level, simd => logistic_rows(simd, &logits, &mut rough));
            let sums = dispatch!(level, simd => sum_of_rows(simd, values.as_chunks().0));
            (rough.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), sums.map(f64::to_bits))
        });
        let seen: Vec<_> = seen.collect();
        assert!(seen.iter().all(|one| *one == seen[0]));
    }

    #[test]
    fn rough_scores_are_as_near_as_they_are_said_to_be() {
        // All exponents, and enough of each.
        let positive = (0..f32::MAX.to_bits()).step_by(1009).map(f32::from_bits);
        let near = (0..2_000_000).map(|i| i as f32 * 1e-5);
        let logits: Vec<f32> = positive.chain(near).flat_map(|x| [x, -x]).collect();
        let mut rough = vec![0.0; logits.len()];
        logistic_each(&logits, &mut rough);
        for (&logit, &rough) in logits.iter().zip(&rough) {
            let exact = 1.0 / (1.0 + exp(-f64::from(logit)));
            let off = (f64::from(rough) - f64::from(exact as f32)).abs();
            assert!(off <= f64::from(LOGISTIC_ERROR) / 2.0, "{logit}: {rough}, not {exact}");
        }
    }

    #[test]
    fn value_that_is_not_finite_is_found_at_any_position() {
        for len in [1, 15, 16, 17, 40] {
            let mut values = vec![f32::MAX; len];
            assert!(finite(&values));
            for at in 0..len {
                for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                    let fine = std::mem::replace(&mut values[at], bad);
                    assert!(!finite(&values), "{bad} at {at} of {len}");
                    values[at] = fine;
                }
            }
        }
    }

    #[test]
    fn the_ends_of_the_exponential() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-f64::from(f32::MAX)) as f32, 0.0);
        assert_eq!(exp(-1000.0), exp(-708.0));
        assert!(exp(1000.0).is_finite());
        assert_eq!(exp(-100.0) as f32, (-100f64).exp() as f32, "a subnormal");
        assert_eq!(ln_1p(0.0), 0.0);
        assert_eq!(ln_1p(1e-300), 1e-300);
    }
}
