//! Losses on a router's logits, and the gradient from the weights of choices to the logits.
//!
//! ```text
//!   logits --+--> scores --> choices, weights --> exchange, experts --> loss of the model
//!            |       |                 |                                        |
//!            |       +--> BalanceLoss  +<------- d weight [T,K] ----------------+
//!            |              |          | weights_backward
//!            +--> z_loss, importance_loss
//!                    |      |          |
//!                    +------+----------+--> d logit [T,E]: all of them add to one array
//! ```
//!
//! Sums are taken in f64, in the order of tokens and experts, and rounded once: results repeat bit
//! for bit. Further divisors of a system (ranks that share a loss, micro-batches) belong into the
//! coefficient.

mod balance;
#[cfg(test)]
mod tests;

pub use balance::{
    BalanceLoss, CountDivisor, CountedChoices, ImportanceInput, LossInput, PaddingTokens, TokenGroups,
    Totals, importance_loss, update_bias,
};

use super::math::{exp, largest};
use super::score::of_chosen;
use super::{Divisor, GateConfig, ScoreFunction, ensure, shape};
use crate::error::GateError;

/// The number of rows of finite logits.
fn rows_of(logits: &[f32], experts: usize) -> Result<usize, GateError> {
    ensure(experts > 0, "experts", 0.0, "at least 1")?;
    let tokens = logits.len() / experts;
    shape("logits", logits.len(), tokens, experts)?;
    let bad = logits.iter().position(|logit| !logit.is_finite());
    bad.map_or(Ok(tokens), |at| {
        let (token, expert) = ((at / experts) as u32, (at % experts) as u32);
        Err(GateError::NotFinite { token, expert, seen: logits[at] })
    })
}

/// Whether all ids are experts, or -1.
fn known(ids: &[i32], top_k: usize, experts: usize) -> Result<(), GateError> {
    let bad = ids.iter().position(|&id| id != -1 && usize::try_from(id).map_or(true, |id| id >= experts));
    bad.map_or(Ok(()), |at| {
        let (token, k) = ((at / top_k) as u32, (at % top_k) as u32);
        Err(GateError::BadChoice { token, k, expert: ids[at], experts: experts as u32 })
    })
}

fn finite(parameter: &'static str, seen: f32) -> Result<(), GateError> {
    ensure(seen.is_finite(), parameter, seen.into(), "finite")
}

/// A router's decision, and how the loss changes with its weights.
#[derive(Clone, Copy, Debug)]
pub struct WeightsInput<'a> {
    /// `[tokens, experts]`: the logits behind the weights. If noise enters the weights, too, these
    /// are the noisy logits ([`Gate::noisy_logits`](crate::gate::Gate::noisy_logits)). The clean
    /// logits then have the same gradient, times the factor if the noise multiplies.
    pub logits: &'a [f32],
    /// `[tokens, top_k]`: the choices before dropping
    /// ([`Decision::choices`](crate::gate::Decision::choices)).
    pub choices: &'a [i32],
    /// `[tokens, top_k]`: the choices after dropping
    /// ([`Decision::experts`](crate::gate::Decision::experts)).
    pub experts: &'a [i32],
    /// `[tokens, top_k]`: d loss / d weight; what stands at a dropped choice counts for nothing.
    pub d_weights: &'a [f32],
}

/// Adds d loss / d logit to `gradient`, `[tokens, experts]`: back through scaling, normalization
/// (before or after dropping, as the weights were made) and scores. Neither the choices nor the
/// bias have a gradient.
///
/// # Errors
/// [`GateError::WrongShape`], [`GateError::NotFinite`], [`GateError::BadChoice`], and the errors of
/// [`GateConfig::check`]. Then the gradient is unchanged.
pub fn weights_backward(
    config: &GateConfig,
    input: &WeightsInput<'_>,
    gradient: &mut [f32],
) -> Result<(), GateError> {
    config.check()?;
    let (experts, k) = (config.experts as usize, config.top_k as usize);
    let tokens = rows_of(input.logits, experts)?;
    for (what, ids) in [("choices", input.choices), ("experts", input.experts)] {
        shape(what, ids.len(), tokens, k)?;
        known(ids, k, experts)?;
    }
    shape("weight gradients", input.d_weights.len(), tokens, k)?;
    shape("gradient", gradient.len(), tokens, experts)?;

    let (mut scores, mut d_scores) = (vec![0.0; experts], vec![0.0; experts]);
    let (mut chosen, mut d_chosen, mut few) = (vec![0.0; k], vec![0.0; k], Vec::new());
    for (token, gradient) in gradient.chunks_exact_mut(experts).enumerate() {
        let logits = &input.logits[token * experts..][..experts];
        let row = token * k..(token + 1) * k;
        let (choices, left) = (&input.choices[row.clone()], &input.experts[row.clone()]);
        let of_all = config.score.before_choice();
        if of_all {
            config.score.fill(logits, &mut scores);
            let score = |&id: &i32| usize::try_from(id).map_or(0.0, |id| scores[id]);
            chosen.iter_mut().zip(choices).for_each(|(to, id)| *to = score(id));
        } else {
            of_chosen(config.score, logits, choices, &mut few, &mut chosen);
        }

        for ((d, &id), &weight) in d_chosen.iter_mut().zip(left).zip(&input.d_weights[row]) {
            *d = if id < 0 { 0.0 } else { f64::from(weight) * f64::from(config.scaling) };
        }
        if let Some(divisor) = config.normalize.before() {
            divisor.backward(&chosen, choices, &mut d_chosen);
        } else if let Some(divisor) = config.normalize.after() {
            divisor.backward(&chosen, left, &mut d_chosen);
        }
        d_scores.fill(0.0);
        if !of_all {
            softmax_backward(&chosen, &mut d_chosen);
        }
        let named = choices.iter().zip(&d_chosen);
        named.filter(|&(&id, _)| id >= 0).for_each(|(&id, d)| d_scores[id as usize] += d);
        if of_all {
            config.score.backward(logits, &scores, &mut d_scores);
        }
        gradient.iter_mut().zip(&d_scores).for_each(|(to, &d)| *to += d as f32);
    }
    Ok(())
}

impl Divisor {
    /// From d/d (score / divisor) to d/d score, in place, where the divisor is that of the choices
    /// `ids`.
    fn backward(self, scores: &[f64], ids: &[i32], d: &mut [f64]) {
        let divisor = self.of(scores, ids);
        let moves = match self {
            Divisor::SumPlus(_) => ids.len() > 1,
            Divisor::SumAtLeast(least) => divisor > f64::from(least),
        };
        let pull: f64 = d.iter().zip(scores).map(|(d, score)| d * score).sum::<f64>() / divisor;
        for (d, &id) in d.iter_mut().zip(ids) {
            *d = (*d - if moves && id >= 0 { pull } else { 0.0 }) / divisor;
        }
    }
}

/// `coefficient * mean over tokens of (ln of the sum of e^logit)^2` (ST-MoE; Megatron's
/// `moe_z_loss_coeff`, divided by the ranks that share the tokens). `logits` are
/// `[tokens, experts]`; tokens that are not `used`, `[tokens]`, count neither in the sum nor in the
/// mean. The gradient is added to `gradient`, `[tokens, experts]`. Without tokens there is no loss.
///
/// ```
/// let mut gradient = [0.0; 2];
/// let loss = sidelane_core::gate::z_loss(0.5, &[1.0, 1.0], 2, None, Some(&mut gradient))?;
/// let z = 1.0 + 2f32.ln();
/// assert!((loss - 0.5 * z * z).abs() < 1e-6 && (gradient[0] - 0.5 * z).abs() < 1e-6);
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
///
/// # Errors
/// [`GateError::WrongShape`], [`GateError::NotFinite`], [`GateError::BadNumber`] for a coefficient
/// that is not finite, or no experts. Then the gradient is unchanged.
pub fn z_loss(
    coefficient: f32,
    logits: &[f32],
    experts: u32,
    used: Option<&[bool]>,
    mut gradient: Option<&mut [f32]>,
) -> Result<f32, GateError> {
    let experts = experts as usize;
    let tokens = rows_of(logits, experts)?;
    finite("coefficient", coefficient)?;
    used.map_or(Ok(()), |used| shape("used", used.len(), tokens, 1))?;
    gradient.as_ref().map_or(Ok(()), |gradient| shape("gradient", gradient.len(), tokens, experts))?;

    let counts = |token: &usize| used.is_none_or(|used| used[*token]);
    let factor = f64::from(coefficient) / (0..tokens).filter(counts).count().max(1) as f64;
    let mut sum = 0.0;
    for token in (0..tokens).filter(counts) {
        let row = token * experts..(token + 1) * experts;
        let top = f64::from(largest(&logits[row.clone()]));
        let of_top = |&logit: &f32| exp(f64::from(logit) - top);
        let all: f64 = logits[row.clone()].iter().map(of_top).sum();
        let z = top + all.ln();
        sum += z * z;
        if let Some(gradient) = gradient.as_deref_mut() {
            let slope = factor * 2.0 * z / all;
            for (d, logit) in gradient[row.clone()].iter_mut().zip(&logits[row]) {
                *d += (slope * of_top(logit)) as f32;
            }
        }
    }
    Ok((factor * sum) as f32)
}

impl ScoreFunction {
    /// From d/d score to d/d logit, in place. `scores` are those of all `logits`.
    pub(super) fn backward(self, logits: &[f32], scores: &[f64], d: &mut [f64]) {
        match self {
            ScoreFunction::Softmax | ScoreFunction::SoftmaxOfChosen => softmax_backward(scores, d),
            ScoreFunction::Sigmoid => d.iter_mut().zip(scores).for_each(|(d, s)| *d *= s * (1.0 - s)),
            ScoreFunction::SqrtSoftplus => {
                for ((d, s), &logit) in d.iter_mut().zip(scores).zip(logits) {
                    *d *= 0.5 / (s * (1.0 + exp(-f64::from(logit))));
                }
            }
        }
    }
}

/// From d/d score of a softmax to d/d logit, in place.
pub(super) fn softmax_backward(scores: &[f64], d: &mut [f64]) {
    let mean: f64 = d.iter().zip(scores).map(|(d, s)| d * s).sum();
    d.iter_mut().zip(scores).for_each(|(d, s)| *d = s * (*d - mean));
}

/// Added to the sum of scores before they are divided by it (Megatron).
const MORE: f64 = 1e-20;

/// Scores that add up to 1: those of a softmax, and others divided by their sum.
pub(super) fn shares(score: ScoreFunction, logits: &[f32], scores: &mut [f64], shares: &mut [f64]) {
    score.fill(logits, scores);
    let sum = sum_of(score, scores);
    shares.iter_mut().zip(scores).for_each(|(share, score)| *share = *score / sum);
}

/// From d/d share to d/d logit, in place.
pub(super) fn shares_backward(
    score: ScoreFunction,
    logits: &[f32],
    scores: &[f64],
    shares: &[f64],
    d: &mut [f64],
) {
    if matches!(score, ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus) {
        let mean: f64 = d.iter().zip(shares).map(|(d, s)| d * s).sum();
        let sum = sum_of(score, scores);
        d.iter_mut().for_each(|d| *d = (*d - mean) / sum);
    }
    score.backward(logits, scores, d);
}

fn sum_of(score: ScoreFunction, scores: &[f64]) -> f64 {
    match score {
        ScoreFunction::Softmax | ScoreFunction::SoftmaxOfChosen => 1.0,
        ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus => scores.iter().sum::<f64>() + MORE,
    }
}
