//! Everything that a router draws: noise on logits, jitter of its input, second choices that are
//! thinned out.
//!
//! Each token has a stream of its own, named by (seed, step, purpose, rank, token): the draws of a
//! token depend neither on the number of tokens nor on the drawing rank. So a run repeats, and
//! ranks can draw for each other.

use std::f64::consts::TAU;

use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::config::share;
use super::{Noise, SecondExpertPolicy, shape};
use crate::dtype::{Dtype, Element};
use crate::error::GateError;
use crate::with_methods;

/// Which numbers: the same draw gives the same numbers, on every machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct RngKey {
    /// Of the run.
    pub seed: u64,
    /// Of the call: forward passes that are to differ have different steps.
    pub step: u64,
    /// The rank that owns the tokens.
    pub rank: u32,
}

/// Purpose of drawn numbers: streams of different purposes have nothing in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Jitter = 1,
    Noise = 2,
    Second = 3,
    Keep = 4,
}

impl RngKey {
    /// The numbers of this rank in this step of a run.
    pub const fn new(seed: u64, step: u64, rank: u32) -> Self {
        RngKey { seed, step, rank }
    }

    with_methods! {
        with_seed(seed: u64),
        with_step(step: u64),
        with_rank(rank: u32),
    }

    /// The stream of one token.
    pub(super) fn stream(self, purpose: Purpose, token: u32) -> ChaCha8Rng {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        key[8..16].copy_from_slice(&self.step.to_le_bytes());
        key[16..24].copy_from_slice(&(purpose as u64).to_le_bytes());
        let mut random = ChaCha8Rng::from_seed(key);
        random.set_stream(u64::from(self.rank) << 32 | u64::from(token));
        random
    }
}

/// From 0 up to and without 1, on a grid of 2^-24.
pub(super) fn unit(random: &mut impl Rng) -> f32 {
    (random.next_u32() >> 8) as f32 * (1.0 / (1 << 24) as f32)
}

impl Noise {
    /// Whether weights are made from the noisy logits too.
    pub(super) fn on_weights(self) -> bool {
        matches!(self, Noise::Jitter { .. } | Noise::Normal { .. })
    }

    /// The noise of a training pass, or of another.
    pub(super) fn of_pass(self, training: bool) -> Noise {
        if training || self == Noise::GumbelAfterFirst { self } else { Noise::None }
    }

    /// Whether choices are sampled.
    pub(super) fn samples(self) -> bool {
        matches!(self, Noise::Gumbel | Noise::GumbelAfterFirst)
    }

    /// Writes the noisy logits of one token; `deviation`: a factor per expert on normal noise.
    /// Infinite results become the largest finite number.
    pub(super) fn fill(
        self,
        draw: RngKey,
        token: u32,
        logits: &[f32],
        deviation: Option<&[f32]>,
        noisy: &mut [f32],
    ) {
        let mut random = draw.stream(Purpose::Noise, token);
        for (expert, (to, &logit)) in noisy.iter_mut().zip(logits).enumerate() {
            let logit = f64::from(logit);
            let sum = match self {
                Noise::None => logit,
                Noise::Gumbel | Noise::GumbelAfterFirst => logit + gumbel(&mut random),
                Noise::Jitter { eps } => logit * factor(eps, &mut random),
                Noise::Normal { deviation: all } => {
                    let own = deviation.map_or(1.0, |own| f64::from(own[expert]));
                    logit + f64::from(all) * own * normal(&mut random)
                }
            };
            *to = (sum as f32).clamp(f32::MIN, f32::MAX);
        }
    }
}

/// A number from 1 - eps to 1 + eps.
fn factor(eps: f32, random: &mut impl Rng) -> f64 {
    1.0 + f64::from(eps) * (2.0 * inside(random) - 1.0)
}

/// Standard Gumbel: the largest of logits with such noise is a sample of their softmax.
fn gumbel(random: &mut impl Rng) -> f64 {
    -libm::log(-libm::log(inside(random)))
}

/// Standard normal, after Box and Muller.
fn normal(random: &mut impl Rng) -> f64 {
    let radius = (-2.0 * libm::log(inside(random))).sqrt();
    radius * libm::cos(TAU * inside(random))
}

/// From 0 to 1, without the two: in the middle of each step of the grid.
fn inside(random: &mut impl Rng) -> f64 {
    f64::from(unit(random)) + 0.5 / f64::from(1 << 24)
}

impl SecondExpertPolicy {
    /// Drops the second of two choices with the probability that the `weights` leave. Both arrays
    /// are `[tokens, 2]`.
    pub(super) fn thin(self, draw: RngKey, weights: &[f32], ids: &mut [i32]) {
        let SecondExpertPolicy::Random { threshold } = self else { return };
        for (token, (weights, ids)) in (0..).zip(weights.chunks_exact(2).zip(ids.chunks_exact_mut(2))) {
            let lot = unit(&mut draw.stream(Purpose::Second, token));
            if lot * threshold >= weights[1] {
                ids[1] = -1;
            }
        }
    }
}

/// Multiplies each value of `x`, `[tokens, hidden]`, by a factor drawn from 1 - `eps` to 1 + `eps`:
/// as Switch, Megatron (`moe_input_jitter_eps`) and DeepSpeed (`Jitter`) do with the router's input
/// while training. The experts get the unchanged tokens.
///
/// # Errors
/// [`GateError::BadNumber`] unless `eps` lies between 0 and 1, [`GateError::WrongShape`] if `x` is
/// no multiple of `hidden`, [`GateError::NoArithmetic`] for rows of bytes. Then `x` is unchanged.
pub fn jitter<E: Element>(x: &mut [E], hidden: usize, eps: f32, draw: RngKey) -> Result<(), GateError> {
    share("eps", eps)?;
    let rows = x.len().checked_div(hidden).unwrap_or(0);
    shape("x", x.len(), rows, hidden)?;
    for (token, row) in (0..).zip(x.chunks_exact_mut(hidden.max(1))) {
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
