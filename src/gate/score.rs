//! From the logits of one token to its scores.
//!
//! Scores are made in f64 and rounded once, so that they are the nearest f32 but for a rare last bit; weights are made of
//! the unrounded ones.

use super::Score;
use super::math::{exp_each, largest, ln_1p, sum};

impl Score {
    /// Whether scores are made of all experts; if not, of the chosen alone, after the choice.
    pub(super) fn before_choice(self) -> bool {
        self != Score::SoftmaxOfChosen
    }

    /// Scores of all `logits`.
    pub(super) fn fill(self, logits: &[f32], scores: &mut [f64]) {
        match self {
            Score::Softmax | Score::SoftmaxOfChosen => {
                let top = f64::from(largest(logits));
                exp_each(logits, |x| x - top, scores);
                let factor = 1.0 / sum(scores);
                scores.iter_mut().for_each(|score| *score *= factor);
            }
            Score::Sigmoid => {
                exp_each(logits, |x| -x, scores);
                scores.iter_mut().for_each(|e| *e = 1.0 / (1.0 + *e));
            }
            Score::SqrtSoftplus => {
                exp_each(logits, |x| -x.abs(), scores);
                for (score, &logit) in scores.iter_mut().zip(logits) {
                    // ln(1 + e^x), which is x and a rest for x above 0.
                    let positive = if logit > 0.0 { f64::from(logit) } else { 0.0 };
                    *score = (positive + ln_1p(*score)).sqrt();
                }
            }
        }
    }
}

/// Scores of one token's choices where they are made of the chosen alone; ids of -1 have none.
pub(super) fn of_chosen(logits: &[f32], ids: &[i32], spare: &mut Vec<f32>, chosen: &mut [f64]) {
    spare.clear();
    spare.extend(ids.iter().filter(|&&id| id >= 0).map(|&id| logits[id as usize]));
    let mut left = spare.len();
    Score::Softmax.fill(spare, &mut chosen[..left]);
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
