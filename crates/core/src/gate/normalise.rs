//! From the scores of choices to their weights.

use super::{Divisor, Normalize};

impl Normalize {
    /// What weights are divided by before any is dropped.
    pub(super) fn before(self) -> Option<Divisor> {
        if let Normalize::BeforeDrop(divisor) = self { Some(divisor) } else { None }
    }

    /// What weights are divided by after some have been dropped.
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
