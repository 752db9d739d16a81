//! Exponential and logarithm of our own: the same bits on every machine, and loops that the compiler can vectorise.
//!
//! Both are off by less than 2^-25 of their value, half an ulp of f32 at most, before it is rounded to that. Numbers are f64;
//! the polynomial that an exponential ends with is so small beside what it is added to that f32 will do, twice as many at a
//! time.

use std::f64::consts::{LN_2, LOG2_E};

/// Added to a number and taken off again, it leaves the nearest integer; the low bits of the sum are that integer plus
/// the bias of an f64's exponent.
const ROUND: f64 = 6_755_399_441_055_744.0 + 1023.0;

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

/// e^x for finite `x`; exactly 1 at 0. Saturates at e^-708 and e^708.
pub(super) fn exp(x: f64) -> f64 {
    let (r, power) = reduce(x);
    join(r, rest(r as f32), power)
}

/// Numbers that are worked on together: each step is a loop of its own, as wide as its type allows.
const BLOCK: usize = 64;

/// Writes [`exp`] of `of(logit)` for each logit.
#[inline]
pub(super) fn exp_each(logits: &[f32], of: impl Fn(f64) -> f64, to: &mut [f64]) {
    let (mut powers, mut rests) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (logits, to) in logits.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
        let slots = to.iter_mut().zip(&mut powers).zip(&mut rests);
        for (&logit, ((r, power), rest)) in logits.iter().zip(slots) {
            (*r, *power) = reduce(of(f64::from(logit)));
            *rest = *r as f32;
        }
        rests.iter_mut().for_each(|value| *value = rest(*value));
        for ((r, &power), &rest) in to.iter_mut().zip(&powers).zip(&rests) {
            *r = join(*r, rest, power);
        }
    }
}

/// x as r + n ln 2: r, and 2^n.
#[inline(always)]
fn reduce(x: f64) -> (f64, f64) {
    let x = if x > -708.0 { x } else { -708.0 };
    let x = if x < 708.0 { x } else { 708.0 };
    let shifted = x * LOG2_E + ROUND;
    (x - (shifted - ROUND) * LN_2, f64::from_bits(shifted.to_bits() << 52))
}

/// e^r - 1 - r.
#[inline(always)]
fn rest(r: f32) -> f32 {
    let square = r * r;
    let (low, middle, high) = (EXP[0] + EXP[1] * r, EXP[2] + EXP[3] * r, EXP[4] + EXP[5] * r);
    square * (low + square * (middle + square * high))
}

#[inline(always)]
fn join(r: f64, rest: f32, power: f64) -> f64 {
    (1.0 + (r + f64::from(rest))) * power
}

/// ln(1 + t) for 0 <= t <= 1.
#[inline]
pub(super) fn ln_1p(t: f64) -> f64 {
    let u = t / (2.0 + t);
    let w = u * u;
    let series = ATANH.into_iter().rev().reduce(|sum, c| sum * w + c).unwrap_or(0.0);
    2.0 * (u + u * w * series)
}

/// The sum, in eight lanes and then across, whatever the machine's own width.
pub(super) fn sum(values: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    let mut chunks = values.chunks_exact(8);
    for chunk in &mut chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += value);
    }
    lanes.iter_mut().zip(chunks.remainder()).for_each(|(lane, value)| *lane += value);
    lanes.iter().sum()
}

/// The largest; minus infinity of none.
pub(super) fn largest(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 8];
    let mut chunks = values.chunks_exact(8);
    for chunk in &mut chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &value)| *lane = larger(*lane, value));
    }
    lanes.iter_mut().zip(chunks.remainder()).for_each(|(lane, &value)| *lane = larger(*lane, value));
    lanes.into_iter().fold(f32::NEG_INFINITY, larger)
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

    #[test]
    fn many_at_a_time_have_the_same_bits() {
        let logits: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 1.7).collect();
        for count in [1, 2, 7, 63, 64, 65, 1000] {
            let mut seen = vec![0.0; count];
            exp_each(&logits[..count], |x| -x, &mut seen);
            for (&logit, seen) in logits.iter().zip(seen) {
                assert_eq!(seen.to_bits(), exp(-f64::from(logit)).to_bits());
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
