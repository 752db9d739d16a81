//! What many runs of the same thing say.

use serde::Serialize;

/// Minimum, median and the middle half of many samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How many.
    pub samples: usize,
    /// The least.
    pub minimum: f64,
    /// A quarter is below.
    pub low: f64,
    /// Half is below.
    pub median: f64,
    /// A quarter is above.
    pub high: f64,
}

impl Summary {
    /// Of at least one sample; quantiles between two samples are interpolated.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            samples: sorted.len(),
            minimum: *sorted.first()?,
            low: quantile(&sorted, 0.25),
            median: quantile(&sorted, 0.5),
            high: quantile(&sorted, 0.75),
        })
    }
}

/// Of sorted samples, at least one.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let place = q * (sorted.len() - 1) as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_samples_have_no_summary() {
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn one_sample_is_everything() {
        let one = Summary { samples: 1, minimum: 3.0, low: 3.0, median: 3.0, high: 3.0 };
        assert_eq!(Summary::of(&[3.0]), Some(one));
    }

    #[test]
    fn quartiles_lie_between_samples() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!(summary, Summary { samples: 4, minimum: 1.0, low: 1.75, median: 2.5, high: 3.25 });
    }
}
