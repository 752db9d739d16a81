//! Adam with decoupled weight decay (AdamW), element by element.
//!
//! The order of operations is fixed, so that every strategy gives the same bits. All are in `f32`
//! and each is rounded, but for the powers, which are of `f64` and rounded once:
//!
//! ```text
//!   m = beta1 * m + (1 - beta1) * g
//!   v = beta2 * v + (1 - beta2) * (g * g)
//!   p = p * (1 - learning_rate * weight_decay)
//!   p = p - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
//! ```

use std::ops::Range;

use super::error::DataError;

/// Settings of the optimizer. All ranks must have the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Size of a step. It may change between steps
    /// ([`set_learning_rate`](super::DataParallel::set_learning_rate)).
    pub learning_rate: f32,
    /// Decay of the mean of gradients.
    pub beta1: f32,
    /// Decay of the mean of their squares.
    pub beta2: f32,
    /// Addend of the divisor.
    pub epsilon: f32,
    /// Share of a parameter that a step of size 1 takes away.
    pub weight_decay: f32,
}

impl Default for Adam {
    fn default() -> Self {
        Adam { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 }
    }
}

impl Adam {
    pub(super) fn check(&self) -> Result<(), DataError> {
        let bad = |setting, seen: f32, expected| {
            Err(DataError::BadSetting { setting, seen: f64::from(seen), expected })
        };
        for (setting, seen) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&seen) {
                return bad(setting, seen, "at least 0 and below 1");
            }
        }
        check_rate(self.learning_rate)?;
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            return bad("weight_decay", self.weight_decay, "a finite number, at least 0");
        }
        if !(self.epsilon > 0.0 && self.epsilon.is_finite()) {
            return bad("epsilon", self.epsilon, "a finite number above 0");
        }
        Ok(())
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        let Adam { learning_rate, beta1, beta2, epsilon, weight_decay } = *self;
        [learning_rate, beta1, beta2, epsilon, weight_decay].into_iter().map(|of| of.to_bits().into())
    }

    /// The settings with another size of steps.
    pub(super) fn at_rate(self, learning_rate: f32) -> Result<Adam, DataError> {
        check_rate(learning_rate)?;
        Ok(Adam { learning_rate, ..self })
    }
}

fn check_rate(learning_rate: f32) -> Result<(), DataError> {
    if learning_rate.is_finite() {
        return Ok(());
    }
    let (setting, seen, expected) = ("learning_rate", learning_rate.into(), "a finite number");
    Err(DataError::BadSetting { setting, seen, expected })
}

/// The optimizer's states of a shard.
#[derive(Clone, Debug)]
pub(super) struct States {
    pub steps: u64,
    /// Means of gradients.
    pub first: Vec<f32>,
    /// Means of their squares.
    pub second: Vec<f32>,
}

impl States {
    pub fn new(len: usize) -> States {
        States { steps: 0, first: vec![0.0; len], second: vec![0.0; len] }
    }

    /// A copy of some states, for the step that follows.
    pub fn next(&self, part: Range<usize>) -> States {
        let [first, second] = [&self.first, &self.second].map(|of| of[part.clone()].to_vec());
        States { steps: self.steps.saturating_add(1), first, second }
    }

    /// Takes states back that [`next`](States::next) gave and a step changed.
    pub fn put(&mut self, part: Range<usize>, of: &States) {
        self.first[part.clone()].copy_from_slice(&of.first);
        self.second[part].copy_from_slice(&of.second);
    }

    /// Changes the parameters of these states, in the step that is counted.
    pub fn update(&mut self, adam: &Adam, parameters: &mut [f32], gradients: &[f32]) {
        let Adam { learning_rate, beta1, beta2, epsilon, weight_decay } = *adam;
        let kept = 1.0 - learning_rate * weight_decay;
        let left = |beta: f32| (1.0 - libm::pow(beta.into(), self.steps as f64)) as f32;
        let (first_left, second_left) = (left(beta1), left(beta2));
        let states = self.first.iter_mut().zip(&mut self.second);
        for ((parameter, gradient), (first, second)) in parameters.iter_mut().zip(gradients).zip(states) {
            *first = beta1 * *first + (1.0 - beta1) * gradient;
            *second = beta2 * *second + (1.0 - beta2) * (gradient * gradient);
            *parameter *= kept;
            *parameter -= learning_rate * (*first / first_left) / ((*second / second_left).sqrt() + epsilon);
        }
    }
}
