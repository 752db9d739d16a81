//! Noise on the logits of one token.

use std::f64::consts::TAU;

use rand::Rng;

use super::random::{Purpose, unit};
use super::{Noise, RngKey};

impl Noise {
    /// Whether weights are made from the noisy logits too.
    pub(super) fn on_weights(self) -> bool {
        matches!(self, Noise::Jitter { .. } | Noise::Normal { .. })
    }

    /// What there is of it in a training pass, or in another.
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
pub(super) fn factor(eps: f32, random: &mut impl Rng) -> f64 {
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
