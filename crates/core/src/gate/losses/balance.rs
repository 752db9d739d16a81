//! Even load of experts: a loss on what the choices count, a loss on what noise makes likely, and a
//! bias that needs no loss.
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

use std::f64::consts::{PI, SQRT_2};

use super::{finite, known, rows_of, shares, shares_backward, softmax_backward};
use crate::error::GateError;
use crate::gate::math::exp;
use crate::gate::top_k::TopK;
use crate::gate::{Preset, ScoreFunction, ensure, shape};
use crate::with_methods;

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
    pub used: Option<&'a [bool]>,
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
        input.used.map_or(Ok(()), |used| shape("used", used.len(), tokens, 1))?;
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
        self.used.is_none_or(|used| used[token])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_equal_to_the_mean_moves_nothing() {
        let mut bias = [0.25, -0.5, 1.0, 0.0];
        update_bias(&mut bias, &[3, 3, 3, 3], 0.125).unwrap();
        assert_eq!(bias, [0.25, -0.5, 1.0, 0.0]);
        // No f64 tells this mean from the counts.
        let large = 1 << 60;
        update_bias(&mut bias, &[large + 1, large, large, large], 0.125).unwrap();
        assert_eq!(bias, [0.125, -0.375, 1.125, 0.125]);
    }

    #[test]
    fn wrong_lengths_and_rates_are_refused() {
        let mut bias = [0.0; 2];
        let wrong = GateError::WrongShape { what: "counts", seen: 3, rows: 2, columns: 1 };
        assert_eq!(update_bias(&mut bias, &[1, 2, 3], 0.1), Err(wrong));
        for rate in [-0.1, f32::NAN, f32::INFINITY] {
            assert!(matches!(update_bias(&mut bias, &[1, 2], rate), Err(GateError::BadNumber { .. })));
        }
        assert_eq!(bias, [0.0; 2]);
    }
}
