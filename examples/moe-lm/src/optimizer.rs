//! AdamW, element by element: a rank with a part of the weights updates them as a rank with all
//! would.

const FIRST: f64 = 0.9;
const SECOND: f64 = 0.95;
const EPSILON: f32 = 1e-8;
const DECAY: f32 = 0.1;

/// Means of the gradient and of its square, one of each per weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdamW {
    /// Of the gradient.
    pub first: Vec<f32>,
    /// Of its square.
    pub second: Vec<f32>,
}

impl AdamW {
    /// For so many weights.
    pub fn new(weights: usize) -> AdamW {
        AdamW { first: vec![0.0; weights], second: vec![0.0; weights] }
    }

    /// Changes weights by their gradient, in the step with this number, which counts from 0.
    pub fn step(&mut self, values: &mut [f32], gradient: &[f32], step: usize, rate: f32) {
        let unbiased = |decay: f64| (1.0 / (1.0 - decay.powf((step + 1) as f64))) as f32;
        let (mean, square) = (unbiased(FIRST), unbiased(SECOND));
        let (near, far) = ((1.0 - FIRST) as f32, (1.0 - SECOND) as f32);
        let means = self.first.iter_mut().zip(&mut self.second);
        for ((value, &g), (first, second)) in values.iter_mut().zip(gradient).zip(means) {
            *first += near * (g - *first);
            *second += far * (g * g - *second);
            *value -= rate * (*first * mean / ((*second * square).sqrt() + EPSILON) + DECAY * *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_goes_against_the_gradient_by_the_rate() {
        let mut adam = AdamW::new(3);
        let mut values = [0.0, 0.0, 1.0];
        adam.step(&mut values, &[0.5, -2.0, 0.0], 0, 0.01);
        assert!((values[0] + 0.01).abs() < 1e-6 && (values[1] - 0.01).abs() < 1e-6, "{values:?}");
        assert_eq!(values[2], 1.0 - 0.01 * 0.1);
    }
}
