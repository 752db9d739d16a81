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
//!
//! # Even load of experts
//!
//! A loss on what the choices count, a loss on what noise makes likely, and a bias that needs no
//! loss.
//!
//! All systems use the same formula for the balance loss, with different inputs. N tokens, E
//! experts, K choices per token:
//!
//! ```text
//!   loss = coefficient * E * sum over experts e of  count_e / (N or K N)  *  (sum over tokens t of share_te) / N
//!                                                   no gradient              gradient to the logits
//! ```
//!
//! | | counted | divided by | share | tokens that are not used | parts |
//! |---|---|---|---|---|---|
//! | Megatron | best K of the scores anew | K N | softmax, or others by their sum | left out, of N too | whole; its sequence variant interleaved |
//! | DeepSpeed top-1 | first choices | N | softmax | not counted, but have shares | whole |
//! | DeepSpeed top-2, Switch, Tutel | first choices | N | softmax | zero | whole |
//! | DeepSpeed top-k | all choices | K N | softmax | zero | whole |
//! | GShard's code | first choices | N | softmax | zero | its local groups, consecutive |
//! | Mixtral, Qwen3, OLMoE | all choices | N | softmax | left out | whole |
//!
//! GShard's paper divides by E where its code multiplies: a coefficient of 1 / E^2.
//!
//! The importance loss is Shazeer's two losses (2017) as in Tutel (`load_importance_loss`), where
//! noise of standard deviation d = `noise` / E on the logits chooses:
//!
//! ```text
//!   p_te    = softmax of the clean logits
//!   line_t  = the noisy logit of token t's last choice: what an expert has to beat
//!   importance_e = sum over t of p_te
//!   load_e       = sum over t of Phi((p_te - line_t) / d)          Phi: the normal distribution
//!   loss = coefficient * (cv2(importance) + cv2(load)) / 2          cv2(x) = variance(x) / (mean(x)^2 + 1e-10), over E - 1
//! ```
//!
//! A probability is held against a logit, as Tutel does it. All of it has a gradient, `line_t` too.

#[cfg(test)]
mod tests;

use std::f64::consts::{PI, SQRT_2};

use super::math::{exp, largest};
use super::route_token::of_chosen;
use super::top_k::TopK;
use super::{Divisor, GateConfig, Preset, ScoreFunction, ensure, shape};
use crate::error::GateError;
use crate::with_methods;

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
/// `moe_z_loss_coeff`, divided by the ranks that share the tokens). `logits` are `[tokens,
/// experts]`; tokens that are not in `token_mask`, `[tokens]`, count neither in the sum nor in the
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
    token_mask: Option<&[bool]>,
    mut gradient: Option<&mut [f32]>,
) -> Result<f32, GateError> {
    let experts = experts as usize;
    let tokens = rows_of(logits, experts)?;
    finite("coefficient", coefficient)?;
    token_mask.map_or(Ok(()), |mask| shape("token_mask", mask.len(), tokens, 1))?;
    gradient.as_ref().map_or(Ok(()), |gradient| shape("gradient", gradient.len(), tokens, experts))?;

    let counts = |token: &usize| token_mask.is_none_or(|mask| mask[*token]);
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

/// A loss that is least where all experts are chosen equally often, as data: that of a preset
/// ([`of`](BalanceLoss::of)), with a coefficient of the caller's.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct BalanceLoss {
    /// Factor on all.
    pub coefficient: f32,
    /// Source of shares: the softmax of all, or scores divided by their sum.
    pub score: ScoreFunction,
    /// Which choices are counted: always before any is dropped.
    #[doc(hidden)]
    pub map: CountedChoices,
    /// Divisor of counts.
    #[doc(hidden)]
    pub share: CountDivisor,
    /// Treatment of tokens that are not used.
    #[doc(hidden)]
    pub unused: PaddingTokens,
    /// Parts of the tokens that are balanced each for itself; the loss is the mean of theirs.
    pub parts: TokenGroups,
}

/// Which choices are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CountedChoices {
    /// The first choice of each token.
    FirstChoices,
    /// All choices of each token.
    AllChoices,
    /// The `top_k` best experts by the logits anew: without bias, groups, noise or replay.
    Fresh,
}

/// Divisor that turns counts into shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CountDivisor {
    /// The tokens.
    OfTokens,
    /// The tokens times `top_k`.
    OfChoices,
}

/// Treatment of tokens that are not used. They are never counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PaddingTokens {
    /// They do not exist: means are over the other tokens. As in Megatron, parts with different
    /// numbers of used tokens are all divided by the mean of these numbers.
    LeftOut,
    /// Their shares are zero: means are over all tokens.
    Zero,
    /// Their shares are as those of the others.
    Shared,
}

/// How tokens are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TokenGroups {
    /// All tokens together.
    Whole,
    /// So many parts, one after another.
    Consecutive(u32),
    /// So many parts; token t is of part t mod this (Megatron's `[sequence, batch]`).
    Interleaved(u32),
}

/// Input of a loss.
#[derive(Clone, Copy, Debug, Default)]
pub struct LossInput<'a> {
    /// `[tokens, experts]`.
    pub logits: &'a [f32],
    /// Experts.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// `[tokens, top_k]`: the choices before dropping, -1 for none. [`CountedChoices::Fresh`] needs
    /// none.
    pub choices: &'a [i32],
    /// `[tokens]`: which tokens count; all where it is not given.
    pub token_mask: Option<&'a [bool]>,
    /// Counts of more than these tokens: of all ranks that balance together, of several
    /// micro-batches.
    pub totals: Option<Totals<'a>>,
}

/// Counts that replace the rank's own. The loss is then the own tokens' part of the whole: ranks
/// add their parts up.
///
/// ```
/// use sidelane_core::gate::{BalanceLoss, LossInput, Preset, Totals};
/// // Megatron's global variant: counts are the average over micro-batches so far.
/// let balance = BalanceLoss::of(Preset::Megatron);
/// let batches = [[0.5, 0.0, 1.0, 2.0], [3.0, 0.0, 1.0, 0.5]];
/// let mut sums = [0.0; 2];
/// for (batch, logits) in (1..).zip(&batches) {
///     let input = LossInput { logits, experts: 2, top_k: 1, ..LossInput::default() };
///     let mut counts = [0.0; 2];
///     balance.counts(&input, &mut counts)?;                // sum these over ranks
///     sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
///     let averages = sums.map(|sum| sum / batch as f64);
///     let totals = Totals { counts: &averages, tokens: 2.0 };
///     balance.loss(&LossInput { totals: Some(totals), ..input }, None)?;
/// }
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Totals<'a> {
    /// `[parts, experts]`, as [`BalanceLoss::counts`] gives them, summed or averaged.
    pub counts: &'a [f64],
    /// Tokens of all parts that one of these counts is of: of all ranks, of one micro-batch. With
    /// [`PaddingTokens::LeftOut`] those that are used.
    pub tokens: f64,
}

impl TokenGroups {
    /// How many.
    pub fn count(self) -> usize {
        match self {
            TokenGroups::Whole => 1,
            TokenGroups::Consecutive(parts) | TokenGroups::Interleaved(parts) => parts as usize,
        }
    }

    fn of(self, token: usize, tokens: usize) -> usize {
        match self {
            TokenGroups::Whole => 0,
            TokenGroups::Consecutive(parts) => token / (tokens / parts as usize),
            TokenGroups::Interleaved(parts) => token % parts as usize,
        }
    }
}

impl BalanceLoss {
    with_methods! {
        with_coefficient(coefficient: f32),
        with_score(score: ScoreFunction),
        #[doc(hidden)]
        with_map(map: CountedChoices),
        #[doc(hidden)]
        with_share(share: CountDivisor),
        #[doc(hidden)]
        with_unused(unused: PaddingTokens),
        with_parts(parts: TokenGroups),
    }

    /// The loss that belongs to a preset, with a coefficient of 1 and all tokens in one part.
    pub fn of(preset: Preset) -> BalanceLoss {
        let first = BalanceLoss {
            coefficient: 1.0,
            score: ScoreFunction::Softmax,
            map: CountedChoices::FirstChoices,
            share: CountDivisor::OfTokens,
            unused: PaddingTokens::Zero,
            parts: TokenGroups::Whole,
        };
        let all = BalanceLoss { map: CountedChoices::AllChoices, unused: PaddingTokens::LeftOut, ..first };
        let fresh = BalanceLoss { map: CountedChoices::Fresh, share: CountDivisor::OfChoices, ..all };
        match preset {
            Preset::Megatron => fresh,
            Preset::DeepseekV3 => BalanceLoss { score: ScoreFunction::Sigmoid, ..fresh },
            Preset::DeepspeedTop1 => BalanceLoss { unused: PaddingTokens::Shared, ..first },
            Preset::DeepspeedTopk => {
                BalanceLoss { share: CountDivisor::OfChoices, unused: PaddingTokens::Zero, ..all }
            }
            Preset::DeepspeedTop2 | Preset::Gshard | Preset::Switch | Preset::Tutel => first,
            Preset::Mixtral | Preset::Qwen3 | Preset::Olmoe => all,
        }
    }

    /// Adds the number of choices of each expert to `counts`, `[parts, experts]`: ranks add these
    /// up for [`Totals`].
    ///
    /// # Errors
    /// As [`loss`](BalanceLoss::loss).
    #[doc(hidden)]
    pub fn counts(&self, input: &LossInput<'_>, counts: &mut [f64]) -> Result<(), GateError> {
        let tokens = self.check(input)?;
        let (experts, k) = (input.experts as usize, input.top_k as usize);
        shape("counts", counts.len(), self.parts.count(), experts)?;
        let mut top = TopK::default();
        for token in (0..tokens).filter(|&token| input.uses(token)) {
            let counts = &mut counts[self.parts.of(token, tokens) * experts..][..experts];
            let chosen = match self.map {
                CountedChoices::Fresh => {
                    let logits = &input.logits[token * experts..][..experts];
                    top.of(logits, k).for_each(|expert| counts[expert as usize] += 1.0);
                    continue;
                }
                CountedChoices::FirstChoices => &input.choices[token * k..][..1],
                CountedChoices::AllChoices => &input.choices[token * k..][..k],
            };
            chosen.iter().filter(|&&id| id >= 0).for_each(|&id| counts[id as usize] += 1.0);
        }
        Ok(())
    }

    /// The loss; its gradient is added to `gradient`, `[tokens, experts]`. Without tokens it is 0.
    ///
    /// # Errors
    /// [`GateError::WrongShape`], [`GateError::NotFinite`], [`GateError::BadChoice`], and
    /// [`GateError::BadNumber`] for tokens that cannot be split into the parts, more choices than
    /// experts, a coefficient or totals that are not finite. Then the gradient is unchanged.
    #[doc(hidden)]
    pub fn loss(&self, input: &LossInput<'_>, mut gradient: Option<&mut [f32]>) -> Result<f32, GateError> {
        let tokens = self.check(input)?;
        let experts = input.experts as usize;
        let parts = self.parts.count();
        gradient.as_ref().map_or(Ok(()), |gradient| shape("gradient", gradient.len(), tokens, experts))?;
        if tokens == 0 {
            return Ok(0.0);
        }
        // No more parts than tokens: these are no longer than the logits.
        let mut own = vec![0.0; parts * experts];
        let counts = match &input.totals {
            Some(totals) => totals.counts,
            None => {
                self.counts(input, &mut own)?;
                &own
            }
        };
        let left_out = self.unused == PaddingTokens::LeftOut;
        let here = (0..tokens).filter(|&token| !left_out || input.uses(token)).count();
        let all = input.totals.map_or(here as f64, |totals| totals.tokens) / parts as f64;
        let choices = match self.share {
            CountDivisor::OfTokens => 1.0,
            CountDivisor::OfChoices => f64::from(input.top_k),
        };
        if all == 0.0 {
            return Ok(0.0);
        }
        let factor = f64::from(self.coefficient) * experts as f64 / (choices * all * all * parts as f64);

        let (mut scores, mut share, mut d) = (vec![0.0; experts], vec![0.0; experts], vec![0.0; experts]);
        let mut sums = vec![0.0; parts * experts];
        let takes_part = |&token: &usize| self.unused == PaddingTokens::Shared || input.uses(token);
        for token in (0..tokens).filter(takes_part) {
            let row = token * experts..(token + 1) * experts;
            let logits = &input.logits[row.clone()];
            let part = self.parts.of(token, tokens) * experts;
            shares(self.score, logits, &mut scores, &mut share);
            sums[part..][..experts].iter_mut().zip(&share).for_each(|(sum, share)| *sum += share);
            if let Some(gradient) = gradient.as_deref_mut() {
                d.iter_mut().zip(&counts[part..]).for_each(|(d, count)| *d = factor * count);
                shares_backward(self.score, logits, &scores, &share, &mut d);
                gradient[row].iter_mut().zip(&d).for_each(|(to, &d)| *to += d as f32);
            }
        }
        let sum: f64 = sums.iter().zip(counts).map(|(sum, count)| sum * count).sum();
        Ok((factor * sum) as f32)
    }

    /// Checks everything but the output arrays and returns the number of tokens. If there are
    /// tokens, there are at most as many parts.
    ///
    /// # Errors
    /// As [`loss`](BalanceLoss::loss).
    #[doc(hidden)]
    pub fn check(&self, input: &LossInput<'_>) -> Result<usize, GateError> {
        let (experts, k) = (input.experts as usize, input.top_k as usize);
        let tokens = rows_of(input.logits, experts)?;
        ensure((1..=experts).contains(&k), "top_k", input.top_k.into(), "1 to the number of experts")?;
        finite("coefficient", self.coefficient)?;
        let parts = self.parts.count();
        let divides = parts > 0 && tokens.is_multiple_of(parts);
        ensure(divides, "parts", parts as f64, "a divisor of the number of tokens")?;
        if self.map != CountedChoices::Fresh {
            shape("choices", input.choices.len(), tokens, k)?;
            known(input.choices, k, experts)?;
        }
        input.token_mask.map_or(Ok(()), |mask| shape("token_mask", mask.len(), tokens, 1))?;
        if let Some(totals) = &input.totals {
            shape("total counts", totals.counts.len(), parts, experts)?;
            for (parameter, &seen) in totals
                .counts
                .iter()
                .map(|count| ("total count", count))
                .chain([("total tokens", &totals.tokens)])
            {
                ensure(seen.is_finite() && seen >= 0.0, parameter, seen, "0 or more")?;
            }
        }
        Ok(tokens)
    }
}

impl LossInput<'_> {
    fn uses(&self, token: usize) -> bool {
        self.token_mask.is_none_or(|mask| mask[token])
    }
}

/// Avoids a division by zero for experts that no token wants.
const EPSILON: f64 = 1e-10;

/// Input of the loss.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImportanceInput<'a> {
    /// `[tokens, experts]`, without noise.
    pub logits: &'a [f32],
    /// `[tokens, experts]`: the logits that chose
    /// ([`Gate::noisy_logits`](crate::gate::Gate::noisy_logits)). Without them, the clean logits.
    pub noisy: Option<&'a [f32]>,
    /// Experts, 2 at least.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// `[tokens, top_k]`: the choices before dropping. Tokens whose last one is -1 do not count.
    pub choices: &'a [i32],
    /// Tutel's `gate_noise`, above 0: the standard deviation of the noise times the experts.
    pub noise: f32,
}

/// The loss. Its gradient with respect to the clean logits, of which the noisy ones are a sum, is
/// added to `gradient`, `[tokens, experts]`. Without tokens there is no loss.
///
/// ```
/// use sidelane_core::gate::{ImportanceInput, importance_loss};
/// // Expert 0 is wanted twice, and as much as expert 1 is not.
/// let input = ImportanceInput {
///     logits: &[0.0, -200.0, 0.0, -200.0], experts: 2, top_k: 1, choices: &[0, 0], noise: 2.0, ..ImportanceInput::default()
/// };
/// // Importance 2 and 0, load 2 Phi(1) and 2 Phi(0): variances over squared means are 2 and 0.1295.
/// let loss = importance_loss(1.0, &input, None)?;
/// assert!((loss - 1.064_759_8).abs() < 1e-6, "{loss}");
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
///
/// # Errors
/// [`GateError::WrongShape`], [`GateError::NotFinite`], [`GateError::BadChoice`], and
/// [`GateError::BadNumber`] for fewer than two experts, no choices or more than experts, a noise
/// that is not above 0, a coefficient that is not finite. Then the gradient is unchanged.
pub fn importance_loss(
    coefficient: f32,
    input: &ImportanceInput<'_>,
    gradient: Option<&mut [f32]>,
) -> Result<f32, GateError> {
    let tokens = check_importance(coefficient, input)?;
    let (experts, k) = (input.experts as usize, input.top_k as usize);
    gradient.as_ref().map_or(Ok(()), |gradient| shape("gradient", gradient.len(), tokens, experts))?;
    let noisy = input.noisy.unwrap_or(input.logits);
    let deviation = f64::from(input.noise) / experts as f64;
    // Of each token that has a part: its row, its last choice, and the line.
    let rows = || {
        let last = input.choices.chunks_exact(k).map(|choices| choices[k - 1]).enumerate();
        last.filter_map(|(token, last)| {
            let (at, last) = (token * experts, usize::try_from(last).ok()?);
            Some((at..at + experts, last, f64::from(noisy[at + last])))
        })
    };

    let mut shares = vec![0.0; experts];
    let (mut importance, mut load) = (vec![0.0; experts], vec![0.0; experts]);
    for (row, _, line) in rows() {
        ScoreFunction::Softmax.fill(&input.logits[row], &mut shares);
        for ((importance, load), share) in importance.iter_mut().zip(&mut load).zip(&shares) {
            *importance += share;
            *load += normal((share - line) / deviation);
        }
    }
    let half = 0.5 * f64::from(coefficient);
    let loss = half * (uneven(&mut importance) + uneven(&mut load));
    let Some(gradient) = gradient else { return Ok(loss as f32) };

    // Both sums are slopes now.
    let mut d = vec![0.0; experts];
    for (row, last, line) in rows() {
        ScoreFunction::Softmax.fill(&input.logits[row.clone()], &mut shares);
        let mut d_line = 0.0;
        for (e, (d, share)) in d.iter_mut().zip(&shares).enumerate() {
            let of_load = half * load[e] * density((share - line) / deviation) / deviation;
            *d = half * importance[e] + of_load;
            d_line -= of_load;
        }
        softmax_backward(&shares, &mut d);
        d[last] += d_line;
        gradient[row].iter_mut().zip(&d).for_each(|(to, &d)| *to += d as f32);
    }
    Ok(loss as f32)
}

fn check_importance(coefficient: f32, input: &ImportanceInput<'_>) -> Result<usize, GateError> {
    let (experts, k) = (input.experts as usize, input.top_k as usize);
    ensure(experts >= 2, "experts", input.experts.into(), "2 at least: of one there is no variance")?;
    ensure((1..=experts).contains(&k), "top_k", input.top_k.into(), "1 to the number of experts")?;
    let has_noise = input.noise.is_finite() && input.noise > 0.0;
    ensure(has_noise, "noise", input.noise.into(), "a finite number above 0")?;
    finite("coefficient", coefficient)?;
    let tokens = rows_of(input.logits, experts)?;
    if let Some(noisy) = input.noisy {
        shape("noisy logits", noisy.len(), tokens, experts)?;
        rows_of(noisy, experts)?;
    }
    shape("choices", input.choices.len(), tokens, k)?;
    known(input.choices, k, experts)?;
    Ok(tokens)
}

/// Variance over squared mean; the values become its slopes.
fn uneven(values: &mut [f64]) -> f64 {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let square = mean * mean + EPSILON;
    let of_mean = variance * 2.0 * mean / (count * square * square);
    for value in values {
        *value = 2.0 * (*value - mean) / ((count - 1.0) * square) - of_mean;
    }
    variance / square
}

/// The normal distribution.
fn normal(x: f64) -> f64 {
    0.5 * libm::erfc(-x / SQRT_2)
}

/// Its density.
fn density(x: f64) -> f64 {
    exp(-0.5 * x * x) / (2.0 * PI).sqrt()
}

/// One step of a bias that balances without a loss: experts that were chosen too often lose a
/// little, the others gain it. `bias += rate * sign(mean(counts) - counts)`.
///
/// `bias` and `counts` are `[experts]`. Counts are those of a whole batch: the caller sums
/// [`counts_after`] over micro-batches and ranks, so that all ranks keep the same bias. As in
/// Megatron, they count the choices left after dropping, of used tokens, in training passes alone.
/// A pass that recomputes activations is not counted again.
///
/// [`counts_after`]: crate::gate::Decision::counts_after
///
/// ```
/// let mut bias = [0.0; 3];
/// sidelane_core::gate::update_bias(&mut bias, &[7, 4, 1], 1e-3)?;
/// assert_eq!(bias, [-1e-3, 0.0, 1e-3]);
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
///
/// # Errors
/// [`GateError::WrongShape`] if the lengths differ, [`GateError::BadNumber`] if `rate` is negative
/// or not finite; the bias is left as it was.
pub fn update_bias(bias: &mut [f32], counts: &[u64], rate: f32) -> Result<(), GateError> {
    shape("counts", counts.len(), bias.len(), 1)?;
    ensure(rate.is_finite() && rate >= 0.0, "rate", rate.into(), "0 or more")?;
    // Compared as integers, the mean is exact.
    let sum: u128 = counts.iter().map(|&count| u128::from(count)).sum();
    for (bias, &count) in bias.iter_mut().zip(counts) {
        *bias += match (u128::from(count) * counts.len() as u128).cmp(&sum) {
            std::cmp::Ordering::Less => rate,
            std::cmp::Ordering::Equal => 0.0,
            std::cmp::Ordering::Greater => -rate,
        };
    }
    Ok(())
}
