//! Sinkhorn's balancing: factors for tokens and experts, in turn, until all tokens and all experts
//! weigh the same.
//!
//! ```text
//!   cost = e^logits [T,E];  to begin with, every expert's factor is 1
//!   factor of a token  = 1 / T / (sum over experts: factor * cost + 1e-8)
//!   factor of an expert = 1 / E / (sum over tokens: factor * cost + 1e-8)     until it changes by <= tolerance, on average
//!   keys = cost * factor of the token * factor of the expert
//! ```
//!
//! All in f64. It ends after [`ROUNDS`] in any case and uses the result so far: the choice needs an
//! order, not a fixed point.

use super::math::{exp_each, sum};
use crate::error::GateError;

/// So many rounds at most. What balances at all has done so within some tens.
const ROUNDS: u32 = 1000;

/// Keeps a sum of nothing from being divided by.
const EPSILON: f64 = 1e-8;

/// The largest logit whose exponential is finite in f32.
const LARGEST: f32 = 88.0;

/// Balances; keeps its memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Sinkhorn {
    cost: Vec<f64>,
    /// Per token; 0 for those that do not count.
    tokens: Vec<f64>,
    experts: Vec<f64>,
    sums: Vec<f64>,
    products: Vec<f64>,
}

impl Sinkhorn {
    /// Finds the factors for finite `logits`, `[tokens, experts]`; tokens that are not `used` do
    /// not count.
    ///
    /// # Errors
    /// [`GateError::BadNumber`] if a logit is above 88.
    pub(super) fn balance(
        &mut self,
        logits: &[f32],
        experts: usize,
        used: Option<&[bool]>,
        tolerance: f32,
    ) -> Result<(), GateError> {
        let large = logits.iter().find(|&&logit| logit > LARGEST);
        if let Some(&logit) = large {
            let (parameter, seen) = ("logit", f64::from(logit));
            return Err(GateError::BadNumber {
                parameter,
                seen,
                expected: "at most 88 for Sinkhorn's balancing",
            });
        }
        self.cost.resize(logits.len(), 0.0);
        exp_each(logits, |x| x, &mut self.cost);
        let counts = |token: usize| used.is_none_or(|used| used[token]);
        self.tokens.clear();
        self.tokens.extend((0..logits.len() / experts).map(|token| f64::from(u8::from(counts(token)))));
        let share = 1.0 / sum(&self.tokens).max(1.0);
        for (list, value) in [(&mut self.experts, 1.0), (&mut self.sums, 0.0), (&mut self.products, 0.0)] {
            list.clear();
            list.resize(experts, value);
        }
        for _ in 0..ROUNDS {
            if self.round(share, &counts) <= f64::from(tolerance) {
                break;
            }
        }
        Ok(())
    }

    /// One round; how much the factors of the experts have changed, on average.
    fn round(&mut self, share: f64, counts: &impl Fn(usize) -> bool) -> f64 {
        let count = self.experts.len();
        self.sums.fill(0.0);
        for (token, (factor, cost)) in self.tokens.iter_mut().zip(self.cost.chunks_exact(count)).enumerate() {
            if counts(token) {
                let pairs = self.experts.iter().zip(cost);
                self.products.iter_mut().zip(pairs).for_each(|(to, (factor, cost))| *to = factor * cost);
                *factor = share / (sum(&self.products) + EPSILON);
                self.sums.iter_mut().zip(cost).for_each(|(sum, cost)| *sum += *factor * cost);
            }
        }
        let mut change = 0.0;
        for (factor, sum) in self.experts.iter_mut().zip(&self.sums) {
            let next = 1.0 / count as f64 / (sum + EPSILON);
            change += (*factor - next).abs();
            *factor = next;
        }
        change / count as f64
    }

    /// What token `token` chooses by.
    pub(super) fn keys(&self, token: usize, keys: &mut [f32]) {
        let cost = &self.cost[token * self.experts.len()..];
        for ((key, factor), cost) in keys.iter_mut().zip(&self.experts).zip(cost) {
            *key = (factor * cost * self.tokens[token]) as f32;
        }
    }
}
