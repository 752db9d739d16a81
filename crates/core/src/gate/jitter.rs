//! Jitter of a router's input.

use half::{bf16, f16};
use rand_chacha::ChaCha8Rng;

use super::noise::factor;
use super::random::Purpose;
use super::{RngKey, check};
use crate::dtype::{Dtype, Element};
use crate::error::GateError;

/// Multiplies each value of `x`, `[tokens, hidden]`, by a factor drawn from 1 - `eps` to 1 + `eps`:
/// as Switch, Megatron (`moe_input_jitter_eps`) and DeepSpeed (`Jitter`) do with the router's input
/// while training. The experts get the unchanged tokens.
///
/// # Errors
/// [`GateError::BadNumber`] unless `eps` lies between 0 and 1, [`GateError::WrongShape`] if `x` is
/// no multiple of `hidden`, [`GateError::NoArithmetic`] for rows of bytes. Then `x` is unchanged.
pub fn jitter<E: Element>(x: &mut [E], hidden: usize, eps: f32, draw: RngKey) -> Result<(), GateError> {
    check::share("eps", eps)?;
    if hidden == 0 || !x.len().is_multiple_of(hidden) {
        let rows = x.len().checked_div(hidden).unwrap_or(0);
        return Err(GateError::WrongShape { what: "x", seen: x.len(), rows, columns: hidden });
    }
    for (token, row) in (0..).zip(x.chunks_exact_mut(hidden)) {
        let random = draw.stream(Purpose::Jitter, token);
        match E::DTYPE {
            Dtype::F32 => apply::<f32>(bytemuck::cast_slice_mut(row), eps, random, |value| value as f32),
            Dtype::Bf16 => apply::<bf16>(bytemuck::cast_slice_mut(row), eps, random, bf16::from_f64),
            Dtype::F16 => apply::<f16>(bytemuck::cast_slice_mut(row), eps, random, f16::from_f64),
            Dtype::Bytes => return Err(GateError::NoArithmetic { dtype: Dtype::Bytes }),
        }
    }
    Ok(())
}

fn apply<T: Copy + Into<f64>>(row: &mut [T], eps: f32, mut random: ChaCha8Rng, round: fn(f64) -> T) {
    row.iter_mut().for_each(|value| *value = round((*value).into() * factor(eps, &mut random)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAW: RngKey = RngKey { seed: 1, step: 2, rank: 3 };

    #[test]
    fn values_stay_within_eps_and_do_not_depend_on_how_many_tokens_there_are() {
        let mut all = vec![2f32; 5 * 7];
        jitter(&mut all, 7, 0.25, DRAW).unwrap();
        assert!(all.iter().all(|value| (1.5..=2.5).contains(value)));
        assert!(all.iter().any(|&value| value < 1.75) && all.iter().any(|&value| value > 2.25));
        let mut few = vec![2f32; 2 * 7];
        jitter(&mut few, 7, 0.25, DRAW).unwrap();
        assert_eq!(few, all[..14]);
        assert_ne!(all[..7], all[7..14]);
    }

    #[test]
    fn halves_are_the_rounded_values_of_f32() {
        let mut wide = vec![1f32; 64];
        let mut narrow = vec![bf16::ONE; 64];
        jitter(&mut wide, 64, 0.5, DRAW).unwrap();
        jitter(&mut narrow, 64, 0.5, DRAW).unwrap();
        assert_eq!(narrow, wide.into_iter().map(bf16::from_f32).collect::<Vec<_>>());
    }

    #[test]
    fn bad_input_is_refused_and_left_alone() {
        let mut x = [1f32; 6];
        for eps in [-0.1, 1.5, f32::NAN] {
            assert!(matches!(jitter(&mut x, 3, eps, DRAW), Err(GateError::BadNumber { .. })), "{eps}");
        }
        assert!(matches!(jitter(&mut x, 4, 0.1, DRAW), Err(GateError::WrongShape { .. })));
        assert!(matches!(jitter(&mut x, 0, 0.1, DRAW), Err(GateError::WrongShape { .. })));
        assert_eq!(x, [1.0; 6]);
        let wrong = GateError::NoArithmetic { dtype: Dtype::Bytes };
        assert_eq!(jitter(&mut [0u8; 4], 4, 0.1, DRAW), Err(wrong));
    }
}
