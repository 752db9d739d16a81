//! From rounds to figures.
//!
//! Times of rounds are skewed and have outliers, so the middle is a median and nothing assumes a distribution.
//! The interval of a ratio of medians comes from resampling rounds (percentile bootstrap): a resample draws whole
//! rounds, real time and floor time together, because a busy moment of the machine slows both.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// From this many rounds on a 99th percentile rests on at least ten rounds beyond it.
pub const ROUNDS_FOR_P99: usize = 1000;

/// What rounds of one kind took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    pub min: f64,
    pub mean: f64,
    pub p50: f64,
    /// Only from [`ROUNDS_FOR_P99`] on.
    pub p99: Option<f64>,
    pub max: f64,
}

/// A ratio and its 95% interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

/// Of at least one sample.
pub fn summary(samples: &[f64]) -> Summary {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let rank = (sorted.len() * 99).div_ceil(100);
    Summary {
        min: sorted[0],
        mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
        p99: (sorted.len() >= ROUNDS_FOR_P99).then(|| sorted[rank - 1]),
        max: sorted[sorted.len() - 1],
        // The last, as it reorders them.
        p50: median(&mut sorted),
    }
}

/// Median of `above` by median of `below`, two samples of the same rounds. The interval is drawn from a fixed
/// seed: the same samples give the same figures.
pub fn ratio_of_medians(above: &[f64], below: &[f64]) -> Ratio {
    const RESAMPLES: usize = 2000;
    assert_eq!(above.len(), below.len(), "two samples of the same rounds");
    let rounds = above.len();
    let mut random = ChaCha8Rng::seed_from_u64(0);
    let (mut a, mut b) = (above.to_vec(), below.to_vec());
    let value = median(&mut a) / median(&mut b);
    let mut ratios: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            for (a, b) in a.iter_mut().zip(&mut b) {
                let round = random.random_range(0..rounds);
                (*a, *b) = (above[round], below[round]);
            }
            median(&mut a) / median(&mut b)
        })
        .collect();
    ratios.sort_unstable_by(f64::total_cmp);
    let tail = RESAMPLES / 40;
    Ratio { value, low: ratios[tail], high: ratios[RESAMPLES - 1 - tail] }
}

/// The middle, or the mean of the two in the middle. Reorders the samples.
fn median(samples: &mut [f64]) -> f64 {
    let half = samples.len() / 2;
    let even = samples.len().is_multiple_of(2);
    let (lower, &mut upper, _) = samples.select_nth_unstable_by(half, f64::total_cmp);
    if even { (lower.iter().copied().fold(f64::MIN, f64::max) + upper) / 2.0 } else { upper }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(rounds: usize) -> Vec<f64> {
        (1..=rounds).rev().map(|n| n as f64).collect()
    }

    #[test]
    fn figures_come_from_all_samples() {
        let seen = summary(&counted(1000));
        assert_eq!(seen, Summary { min: 1.0, mean: 500.5, p50: 500.5, p99: Some(990.0), max: 1000.0 });
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(summary(&[7.0]).p50, 7.0);
        assert_eq!(summary(&[4.0, 1.0]).p50, 2.5);
        assert_eq!(summary(&counted(5)).p50, 3.0);
        assert_eq!(summary(&counted(6)).p50, 3.5);
    }

    #[test]
    fn p99_needs_a_thousand_rounds() {
        assert_eq!(summary(&counted(999)).p99, None);
        assert_eq!(summary(&counted(1000)).p99, Some(990.0));
    }

    #[test]
    fn equal_samples_have_ratio_one_without_doubt() {
        let samples = counted(50);
        assert_eq!(ratio_of_medians(&samples, &samples), Ratio { value: 1.0, low: 1.0, high: 1.0 });
    }

    #[test]
    fn the_interval_holds_the_true_ratio_about_as_often_as_it_promises() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let mut noisy = || (0..101).map(|_| 100.0 + random.random_range(0.0..20.0)).collect::<Vec<f64>>();
        let trials = 100;
        let held = (0..trials)
            .map(|_| ratio_of_medians(&noisy(), &noisy()))
            .inspect(|ratio| assert!(ratio.low <= ratio.value && ratio.value <= ratio.high, "{ratio:?}"))
            .filter(|ratio| (ratio.low..=ratio.high).contains(&1.0))
            .count();
        assert!((88..100).contains(&held), "{held} of {trials} intervals hold the true ratio");
    }

    #[test]
    fn one_outlier_moves_nothing_but_the_maximum() {
        let (mut spiked, floor) = (vec![10.0; 99], vec![5.0; 99]);
        spiked[7] = 1e6;
        assert_eq!(ratio_of_medians(&floor, &spiked), Ratio { value: 0.5, low: 0.5, high: 0.5 });
        let seen = summary(&spiked);
        assert_eq!((seen.min, seen.p50, seen.p99, seen.max), (10.0, 10.0, None, 1e6));
    }

    #[test]
    fn the_same_samples_give_the_same_interval() {
        let (a, b) = (counted(40), counted(40).into_iter().rev().map(f64::sqrt).collect::<Vec<_>>());
        assert_eq!(ratio_of_medians(&a, &b), ratio_of_medians(&a, &b));
    }
}
