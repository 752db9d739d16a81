//! From the logits of one token to its scores, and from the scores of its choices to their weights.
//!
//! Scores are made in f64 and rounded once, so they are the nearest f32 but for a rare last bit.
//! Weights come from the unrounded scores.
//!
//! ```text
//!   logits [E] --begin--> parts [E] --last step--> scores [E] --of the chosen--> [K] --/ divisor, * scaling--> weights [K]
//! ```

use super::math::{exp_each, largest, ln_1p, sum};
use super::{Divisor, Normalize, ScoreFunction};

impl ScoreFunction {
    /// Whether scores are made of all experts; if not, of the chosen alone, after the choice.
    pub(super) fn before_choice(self) -> bool {
        self != ScoreFunction::SoftmaxOfChosen
    }

    /// Scores of all `logits`.
    pub(super) fn fill(self, logits: &[f32], scores: &mut [f64]) {
        let last = self.begin(logits, scores);
        scores.iter_mut().for_each(|score| *score = last.of(*score));
    }

    /// Scores of all `logits` but for the last step, which is returned.
    pub(super) fn begin(self, logits: &[f32], parts: &mut [f64]) -> Last {
        match self {
            ScoreFunction::Softmax | ScoreFunction::SoftmaxOfChosen => {
                let top = f64::from(largest(logits));
                exp_each(
                    logits,
                    #[inline(always)]
                    |x| x - top,
                    parts,
                );
                Last::Times(1.0 / sum(parts))
            }
            ScoreFunction::Sigmoid => {
                exp_each(
                    logits,
                    #[inline(always)]
                    |x| -x,
                    parts,
                );
                Last::Logistic
            }
            ScoreFunction::SqrtSoftplus => {
                exp_each(
                    logits,
                    #[inline(always)]
                    |x| -x.abs(),
                    parts,
                );
                for (part, &logit) in parts.iter_mut().zip(logits) {
                    // ln(1 + e^x), which is x and a rest for x above 0.
                    let positive = if logit > 0.0 { f64::from(logit) } else { 0.0 };
                    *part = (positive + ln_1p(*part)).sqrt();
                }
                Last::Times(1.0)
            }
        }
    }
}

/// The last step of scores: taken for all of them and rounded, and once more for the chosen.
#[derive(Clone, Copy, Debug)]
pub(super) enum Last {
    Times(f64),
    /// 1 / (1 + e).
    Logistic,
}

impl Last {
    #[inline(always)]
    pub(super) fn of(self, part: f64) -> f64 {
        match self {
            Last::Times(factor) => part * factor,
            Last::Logistic => 1.0 / (1.0 + part),
        }
    }

    pub(super) fn round(self, parts: &[f64], scores: &mut [f32]) {
        let pairs = scores.iter_mut().zip(parts);
        match self {
            Last::Times(_) => pairs.for_each(|(score, &part)| *score = self.of(part) as f32),
            Last::Logistic => pairs.for_each(|(score, &part)| *score = Last::Logistic.of(part) as f32),
        }
    }
}

/// Scores of one token's choices, made of their `logits` alone; ids of -1 have none.
pub(super) fn of_chosen(
    score: ScoreFunction,
    logits: &[f32],
    ids: &[i32],
    spare: &mut Vec<f32>,
    chosen: &mut [f64],
) {
    spare.clear();
    spare.extend(ids.iter().filter(|&&id| id >= 0).map(|&id| logits[id as usize]));
    let mut left = spare.len();
    score.fill(spare, &mut chosen[..left]);
    if left == ids.len() {
        return;
    }
    // From the back, so that none is overwritten before it has moved.
    for (k, &id) in ids.iter().enumerate().rev() {
        chosen[k] = if id < 0 {
            0.0
        } else {
            left -= 1;
            chosen[left]
        };
    }
}

impl Normalize {
    /// Divisor of weights before any is dropped.
    pub(super) fn before(self) -> Option<Divisor> {
        if let Normalize::BeforeDrop(divisor) = self { Some(divisor) } else { None }
    }

    /// Divisor of weights after some have been dropped.
    pub(super) fn after(self) -> Option<Divisor> {
        if let Normalize::AfterDrop(divisor) = self { Some(divisor) } else { None }
    }
}

impl Divisor {
    /// The divisor for the scores of those choices of a token that are not -1.
    pub(super) fn of(self, scores: &[f64], ids: &[i32]) -> f64 {
        let sum = scores.iter().zip(ids).filter(|&(_, &id)| id >= 0).map(|(score, _)| score).sum::<f64>();
        match self {
            Divisor::SumPlus(_) if ids.len() == 1 => 1.0,
            Divisor::SumPlus(more) => sum + f64::from(more),
            Divisor::SumAtLeast(least) => sum.max(f64::from(least)),
        }
    }
}

/// Weights of all choices, `[tokens, top_k]`: scores, divided by those of their token and scaled,
/// rounded once; 0 where the id is -1.
pub(super) fn weigh(
    divisor: Option<Divisor>,
    scaling: f32,
    top_k: usize,
    scores: &[f64],
    ids: &[i32],
    weights: &mut [f32],
) {
    let tokens = scores.chunks_exact(top_k).zip(ids.chunks_exact(top_k));
    for ((scores, ids), weights) in tokens.zip(weights.chunks_exact_mut(top_k)) {
        let divisor = divisor.map_or(1.0, |divisor| divisor.of(scores, ids));
        for ((weight, score), &id) in weights.iter_mut().zip(scores).zip(ids) {
            *weight = if id < 0 { 0.0 } else { (score / divisor * f64::from(scaling)) as f32 };
        }
    }
}
