//! The loss that keeps experts evenly loaded.
//!
//! All systems use the same formula, with different inputs. N tokens, E experts, K choices per
//! token:
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

use super::gradient::{shares, shares_backward};
use super::{finite, known, rows_of, shape};
use crate::error::GateError;
use crate::gate::top_k::TopK;
use crate::gate::{Preset, ScoreFunction};

/// A loss that is least where all experts are chosen equally often, as data.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalanceLoss {
    /// Factor on all.
    pub coefficient: f32,
    /// What shares are made of: the softmax of all, or scores divided by their sum.
    pub score: ScoreFunction,
    /// Which choices are counted: always before any is dropped.
    pub map: CountedChoices,
    /// What counts are divided by.
    pub share: CountDivisor,
    /// What becomes of tokens that are not used.
    pub unused: PaddingTokens,
    /// Parts of the tokens that are balanced each for itself; the loss is the mean of theirs.
    pub parts: TokenGroups,
}

/// Which choices are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CountedChoices {
    /// The first choice of each token.
    FirstChoices,
    /// All choices of each token.
    AllChoices,
    /// The `top_k` best experts by the logits anew: without bias, groups, noise or replay.
    Fresh,
}

/// What counts are divided by, so that they become shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CountDivisor {
    /// The tokens.
    OfTokens,
    /// The tokens times `top_k`.
    OfChoices,
}

/// What becomes of tokens that are not used. They are never counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
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
    pub fn check(&self, input: &LossInput<'_>) -> Result<usize, GateError> {
        let (experts, k) = (input.experts as usize, input.top_k as usize);
        let tokens = rows_of(input.logits, experts)?;
        let bad = |parameter, seen, expected| Err(GateError::BadNumber { parameter, seen, expected });
        if k == 0 || k > experts {
            return bad("top_k", input.top_k.into(), "1 to the number of experts");
        }
        finite("coefficient", self.coefficient)?;
        let parts = self.parts.count();
        if parts == 0 || !tokens.is_multiple_of(parts) {
            return bad("parts", parts as f64, "a divisor of the number of tokens");
        }
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
                if !(seen.is_finite() && seen >= 0.0) {
                    return bad(parameter, seen, "0 or more");
                }
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
