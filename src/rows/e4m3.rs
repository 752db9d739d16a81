//! The codes of e4m3, as OCP defines them ("FN": finite numbers only).
//!
//! ```text
//!   s eeee mmm      1.mmm x 2^(eeee - 7)      from 2^-6 to 448
//!   s 0000 mmm      0.mmm x 2^-6              steps of 2^-9
//!   s 1111 111      NaN; there are no infinities
//! ```
//!
//! Both directions are free of branches and of tables, so that the compiler vectorizes their loops.

/// The largest value.
pub(super) const MAX: f32 = 448.0;

const NAN: u32 = 0x7f;

/// Half a step above [`MAX`]: up to here it is the nearest value, also at the tie, for its mantissa
/// is even.
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
pub(super) fn encode(x: f32) -> u8 {
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
pub(super) fn decode(code: u8) -> f32 {
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

    /// The value of a code as the table above reads.
    fn value(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
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
            let (seen, expected) = (decode(code), value(code) as f32);
            assert!(seen.to_bits() == expected.to_bits() || seen.is_nan() && expected.is_nan(), "{code:#x}");
            assert_eq!(seen.is_nan(), code & 0x7f == 0x7f, "{code:#x}");
        }
        assert_eq!(decode(0x7e), MAX);
    }

    #[test]
    fn every_value_keeps_its_code_and_nan_the_one_without_a_sign() {
        for code in 0..=u8::MAX {
            assert_eq!(encode(decode(code)), if decode(code).is_nan() { 0x7f } else { code });
        }
    }

    #[test]
    fn what_lies_between_two_codes_goes_to_the_nearest_and_a_tie_to_the_even_one() {
        for code in 0..0x7eu8 {
            let (below, above) = (decode(code), decode(code + 1));
            let tie = (below + above) / 2.0;
            for x in [below, tie, above].into_iter().flat_map(|x| [x.next_down(), x, x.next_up()]) {
                for x in [x, -x] {
                    assert_eq!(encode(x), nearest(x), "{x:e}");
                }
            }
        }
    }

    #[test]
    fn every_sixteenth_thousand_f32_goes_to_the_nearest_code() {
        for x in (0..=LIMIT.to_bits()).step_by(16_001).map(f32::from_bits) {
            for x in [x, -x] {
                assert_eq!(encode(x), nearest(x), "{x:e}");
            }
        }
    }

    #[test]
    fn what_e4m3_cannot_hold_becomes_nan() {
        for x in [LIMIT.next_up(), 480.0, f32::MAX, f32::INFINITY, f32::NAN, f32::from_bits(0x7f80_0001)] {
            assert_eq!((encode(x), encode(-x)), (0x7f, 0x7f), "{x:e}");
        }
        assert_eq!((encode(LIMIT), encode(-LIMIT)), (0x7e, 0xfe));
    }
}
