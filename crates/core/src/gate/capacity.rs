//! How many rows an expert takes from a local group of tokens.
//!
//! Every system rounds in its own way and its own precision. A product that is a whole number on
//! paper (100 tokens, one expert, factor 1.1) comes out as 111 in f64 and as 110 in f32, so each
//! formula keeps its order of operations.
//!
//! ```text
//!   formula --+-- above the minimum: up to a multiple of align --+--> rows of an expert and local group
//!             +-- otherwise: the minimum ------------------------+
//! ```

use super::{Capacity, CapacityRule};
use crate::error::GateError;

impl Capacity {
    /// Whether the numbers make sense.
    ///
    /// # Errors
    /// [`GateError::BadNumber`]: a factor that is not finite, or not above 0 for a formula that
    /// needs this; `align` or `groups` of 0.
    pub fn check(&self) -> Result<(), GateError> {
        let bad = |parameter, seen, expected| Err(GateError::BadNumber { parameter, seen, expected });
        match self.rule {
            CapacityRule::CeilF64 { factor }
            | CapacityRule::CeilF32 { factor }
            | CapacityRule::Trunc { factor }
                if !(factor.is_finite() && factor > 0.0) =>
            {
                return bad("capacity factor", factor, "finite and above 0");
            }
            CapacityRule::Tutel { factor } if !factor.is_finite() => {
                return bad("capacity factor", factor, "finite");
            }
            _ => {}
        }
        for (parameter, seen) in [("capacity align", self.align), ("capacity groups", self.groups)] {
            if seen == 0 {
                return bad(parameter, 0.0, "at least 1");
            }
        }
        Ok(())
    }

    /// Rows per expert for a local group of `tokens` tokens; `need` is the largest count that any
    /// expert has in any group, here or at ranks that share the capacity. A number beyond `u32` is
    /// `u32::MAX`.
    ///
    /// A formula may give more rows than there are tokens: then nothing is dropped.
    /// [`CapacityRule::Needed`] with a single choice gives at most `tokens`, aligned or not, as
    /// DeepSpeed does.
    pub fn rows(&self, tokens: u32, experts: u32, top_k: u32, need: u32) -> u32 {
        let (s, e, k) = (f64::from(tokens), f64::from(experts), f64::from(top_k));
        // Casts from floats saturate, and make 0 of NaN: no experts, no rows.
        let rows = match self.rule {
            CapacityRule::CeilF64 { factor } => (s * k / e * factor).ceil() as u32,
            CapacityRule::CeilF32 { factor } => ((s / e) as f32 * (factor * k) as f32).ceil() as u32,
            CapacityRule::Trunc { factor } => (s * factor / e) as u32,
            CapacityRule::Tutel { factor } => {
                let limit = top_k.saturating_mul((factor.abs() * (s / e).ceil()) as u32);
                match factor {
                    0.0 => need,
                    _ if factor < 0.0 => need.min(limit),
                    _ => limit,
                }
            }
            CapacityRule::Rows { rows } => rows,
            CapacityRule::Needed => need,
        };
        if rows <= self.minimum {
            return self.minimum;
        }
        let aligned = rows.checked_next_multiple_of(self.align).unwrap_or(u32::MAX);
        if self.rule == CapacityRule::Needed && top_k == 1 { aligned.min(tokens) } else { aligned }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::DropPolicy;
    use proptest::prelude::*;

    fn capacity(rule: CapacityRule) -> Capacity {
        Capacity { rule, minimum: 0, align: 1, keep: DropPolicy::Position, groups: 1, pad: false }
    }

    fn rows(rule: CapacityRule, tokens: u32, experts: u32, top_k: u32) -> u32 {
        capacity(rule).rows(tokens, experts, top_k, 37)
    }

    #[test]
    fn the_same_product_rounds_up_differently_in_f64_and_f32() {
        for (factor, f64_rows, f32_rows) in [(1.1, 111, 110), (1.2, 120, 121)] {
            assert_eq!(rows(CapacityRule::CeilF64 { factor }, 100, 1, 1), f64_rows);
            assert_eq!(rows(CapacityRule::CeilF32 { factor }, 100, 1, 1), f32_rows);
        }
        // Megatron multiplies tokens by choices before it divides; DeepSpeed multiplies the factor
        // by them.
        assert_eq!(rows(CapacityRule::CeilF64 { factor: 1.25 }, 4096, 64, 8), 640);
        assert_eq!(rows(CapacityRule::CeilF32 { factor: 1.25 }, 4096, 64, 8), 640);
        assert_eq!(rows(CapacityRule::CeilF64 { factor: 1.0 }, 10, 4, 2), 5);
        assert_eq!(rows(CapacityRule::CeilF32 { factor: 1.0 }, 9, 4, 2), 5);
    }

    #[test]
    fn gshard_cuts_off_and_rounds_up_to_four_unless_the_minimum_is_more() {
        let gshard = Capacity { minimum: 5, align: 4, ..capacity(CapacityRule::Trunc { factor: 2.0 }) };
        for (tokens, expected) in [(0, 5), (16, 5), (23, 5), (24, 8), (35, 8), (36, 12)] {
            assert_eq!(gshard.rows(tokens, 8, 2, 0), expected, "{tokens} tokens");
        }
        assert_eq!(rows(CapacityRule::Trunc { factor: 1.25 }, 127, 8, 1), 19);
    }

    #[test]
    fn tutel_cuts_off_per_choice_and_reads_need_from_the_sign() {
        for (factor, expected) in [(1.0, 26), (1.25, 32), (0.0, 37), (-1.0, 26), (-4.0, 37)] {
            assert_eq!(rows(CapacityRule::Tutel { factor }, 100, 8, 2), expected, "factor {factor}");
        }
        let aligned = Capacity { align: 16, ..capacity(CapacityRule::Tutel { factor: -1.0 }) };
        assert_eq!(aligned.rows(100, 8, 2, 37), 32);
        assert_eq!(aligned.rows(100, 8, 2, 0), 0);
    }

    #[test]
    fn what_is_needed_is_aligned_and_for_one_choice_at_most_the_tokens() {
        let needed = Capacity { align: 8, ..capacity(CapacityRule::Needed) };
        assert_eq!(needed.rows(100, 4, 2, 37), 40);
        assert_eq!(needed.rows(39, 4, 2, 37), 40);
        assert_eq!(needed.rows(39, 4, 1, 37), 39);
        assert_eq!(needed.rows(0, 4, 1, 37), 0);
    }

    #[test]
    fn no_token_leaves_the_minimum_and_overflow_saturates() {
        let rules = [
            CapacityRule::CeilF64 { factor: 1.0 },
            CapacityRule::CeilF32 { factor: 1.0 },
            CapacityRule::Trunc { factor: 1.0 },
            CapacityRule::Tutel { factor: 1.0 },
        ];
        for rule in rules {
            assert_eq!(rows(rule, 0, 8, 2), 0);
            assert_eq!(Capacity { minimum: 4, ..capacity(rule) }.rows(0, 8, 2, 0), 4);
        }
        for rule in [
            CapacityRule::CeilF64 { factor: 1e300 },
            CapacityRule::CeilF32 { factor: 1e300 },
            CapacityRule::Trunc { factor: 1e300 },
            CapacityRule::Tutel { factor: 1e300 },
            CapacityRule::Tutel { factor: -1e300 },
            CapacityRule::Rows { rows: u32::MAX - 1 },
        ] {
            let capacity = Capacity { align: 64, ..capacity(rule) };
            assert_eq!(capacity.rows(100, 4, 8, u32::MAX), u32::MAX, "{rule:?}");
        }
    }

    #[test]
    fn numbers_without_meaning_are_refused() {
        let named = |capacity: Capacity| match capacity.check() {
            Err(GateError::BadNumber { parameter, .. }) => Some(parameter),
            Ok(()) => None,
            Err(other) => panic!("{other}"),
        };
        for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            for rule in [
                CapacityRule::CeilF64 { factor },
                CapacityRule::CeilF32 { factor },
                CapacityRule::Trunc { factor },
            ] {
                assert_eq!(named(capacity(rule)), Some("capacity factor"), "{rule:?}");
            }
            let tutel = named(capacity(CapacityRule::Tutel { factor }));
            assert_eq!(tutel, (!factor.is_finite()).then_some("capacity factor"), "{factor}");
        }
        assert_eq!(named(Capacity { align: 0, ..capacity(CapacityRule::Needed) }), Some("capacity align"));
        assert_eq!(named(Capacity { groups: 0, ..capacity(CapacityRule::Needed) }), Some("capacity groups"));
        assert_eq!(named(capacity(CapacityRule::Rows { rows: 0 })), None);
    }

    proptest! {
        /// Against arithmetic in whole numbers, where factors have no fraction to round.
        #[test]
        fn whole_factors_agree_with_whole_arithmetic(
            tokens in 0_u32..5000, experts in 1_u32..64, top_k in 1_u32..9, factor in 1_u32..4,
        ) {
            let f = f64::from(factor);
            let exact = tokens * factor / experts;
            prop_assert_eq!(rows(CapacityRule::Trunc { factor: f }, tokens, experts, top_k), exact);
            let tutel = top_k * factor * tokens.div_ceil(experts);
            prop_assert_eq!(rows(CapacityRule::Tutel { factor: f }, tokens, experts, top_k), tutel);
            if experts.is_power_of_two() {
                let up = (tokens * top_k * factor).div_ceil(experts);
                prop_assert_eq!(rows(CapacityRule::CeilF64 { factor: f }, tokens, experts, top_k), up);
                prop_assert_eq!(rows(CapacityRule::CeilF32 { factor: f }, tokens, experts, top_k), up);
            }
        }
    }
}
