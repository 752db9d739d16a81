//! Derivatives of a token's scores.

use crate::gate::ScoreFunction;
use crate::gate::math::exp;

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
