//! From rounds to figures.
//!
//! Times of rounds are skewed and have outliers, so the center is a median and no method assumes a
//! distribution. The interval of a ratio of medians comes from resampling rounds (percentile
//! bootstrap): a resample draws whole rounds, real time and floor time together, because a busy
//! moment of the machine slows both.
//!
//! Times of rounds: a round begins when the first rank begins and ends when the slowest ends.
//!
//! Clocks of different machines are not compared: there a round takes as long as on the machine on
//! which it takes longest. A round follows a barrier, so no machine begins later than another by
//! more than the latency of a signal.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use sidelane::exec::now;
use sidelane::{Error, Group};

use crate::machines::Machines;

/// From this many rounds on a 99th percentile rests on at least ten rounds beyond it.
const ROUNDS_FOR_P99: usize = 1000;

/// Times of rounds of one kind, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The shortest.
    pub min_us: f64,
    /// The mean.
    pub mean_us: f64,
    /// The median.
    pub p50_us: f64,
    /// Only from a thousand rounds on.
    pub p99_us: Option<f64>,
    /// The longest.
    pub max_us: f64,
}

/// Nearest-rank percentiles, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half take no longer.
    pub p50_us: f64,
    /// Nine of ten take no longer.
    pub p90_us: f64,
    /// 19 of 20 take no longer.
    pub p95_us: f64,
    /// 99 of 100 take no longer.
    pub p99_us: f64,
}

/// Of two medians, with an interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// The ratio.
    pub value: f64,
    /// The lower end of an interval that holds 95 of 100 true ratios.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Ratio {
    /// "1.02 (0.98-1.07)", with so many digits.
    pub fn text(self, digits: usize) -> String {
        let Ratio { value, low, high } = self;
        format!("{value:.digits$} ({low:.digits$}-{high:.digits$})")
    }
}

/// Figures of at least one sample.
pub fn summary(samples: &[f64]) -> Summary {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    Summary {
        min_us: sorted[0],
        mean_us: sorted.iter().sum::<f64>() / sorted.len() as f64,
        p99_us: (sorted.len() >= ROUNDS_FOR_P99).then(|| nearest(&sorted, 99)),
        max_us: sorted[sorted.len() - 1],
        // The last, as it reorders them.
        p50_us: median(&mut sorted),
    }
}

/// Percentiles of at least one sample.
pub fn percentiles(samples: &[f64]) -> Percentiles {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let [p50_us, p90_us, p95_us, p99_us] = [50, 90, 95, 99].map(|percent| nearest(&sorted, percent));
    Percentiles { p50_us, p90_us, p95_us, p99_us }
}

fn nearest(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() * percent).div_ceil(100) - 1]
}

/// Median of `above` by median of `below`, two samples of the same rounds. The interval is drawn
/// from a fixed seed: the same samples give the same figures.
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

/// The middle, or the mean of the two in the middle, of at least one sample. Reorders the samples.
pub fn median(samples: &mut [f64]) -> f64 {
    let half = samples.len() / 2;
    let even = samples.len().is_multiple_of(2);
    let (lower, &mut upper, _) = samples.select_nth_unstable_by(half, f64::total_cmp);
    if even { (lower.iter().copied().fold(f64::MIN, f64::max) + upper) / 2.0 } else { upper }
}

/// Begin and end of one rank's part of every round.
#[derive(Clone, Debug, Default)]
pub struct Laps(Vec<[u64; 2]>);

impl Laps {
    /// Times a lap.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begin = now();
        let done = work();
        self.0.push([begin, now()]);
        done
    }

    /// Length of every round, in microseconds, from what all ranks measured. Collective.
    pub fn rounds(&self, group: &Group, machines: &Machines) -> Result<Vec<f64>, Error> {
        Ok(Self::rounds_us(&self.of_ranks(group)?, machines))
    }

    /// Begin and end of every lap of each rank, in nanoseconds. Collective.
    pub fn of_ranks(&self, group: &Group) -> Result<Vec<Vec<[u64; 2]>>, Error> {
        let all = group.gather(bytemuck::cast_slice(&self.0))?;
        Ok(all.iter().map(|bytes| bytemuck::allocation::pod_collect_to_vec(bytes)).collect())
    }

    fn rounds_us(laps: &[Vec<[u64; 2]>], machines: &Machines) -> Vec<f64> {
        (0..laps.iter().map(Vec::len).min().unwrap_or(0))
            .map(|round| {
                let mut spans = vec![[u64::MAX, 0]; machines.count()];
                for (rank, laps) in laps.iter().enumerate() {
                    let ([begin, end], span) = (laps[round], &mut spans[machines.of_rank(rank) as usize]);
                    *span = [span[0].min(begin), span[1].max(end)];
                }
                spans.iter().map(|[begin, end]| end - begin).max().unwrap_or(0) as f64 / 1e3
            })
            .collect()
    }
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
        assert_eq!(
            seen,
            Summary { min_us: 1.0, mean_us: 500.5, p50_us: 500.5, p99_us: Some(990.0), max_us: 1000.0 }
        );
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(summary(&[7.0]).p50_us, 7.0);
        assert_eq!(summary(&[4.0, 1.0]).p50_us, 2.5);
        assert_eq!(summary(&counted(5)).p50_us, 3.0);
        assert_eq!(summary(&counted(6)).p50_us, 3.5);
    }

    #[test]
    fn p99_needs_a_thousand_rounds() {
        assert_eq!(summary(&counted(999)).p99_us, None);
        assert_eq!(summary(&counted(1000)).p99_us, Some(990.0));
    }

    #[test]
    fn percentiles_are_samples_of_the_nearest_rank() {
        let of = |percentiles: Percentiles| [percentiles.p50_us, percentiles.p90_us, percentiles.p99_us];
        assert_eq!(of(percentiles(&counted(448))), [224.0, 404.0, 444.0]);
        assert_eq!(of(percentiles(&[3.0, 1.0])), [1.0, 3.0, 3.0]);
    }

    #[test]
    fn equal_samples_have_ratio_one_without_doubt() {
        let samples = counted(50);
        assert_eq!(ratio_of_medians(&samples, &samples), Ratio { value: 1.0, low: 1.0, high: 1.0 });
    }

    #[test]
    fn ratio_interval_covers_true_ratio_about_as_often_as_stated() {
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
        assert_eq!((seen.min_us, seen.p50_us, seen.p99_us, seen.max_us), (10.0, 10.0, None, 1e6));
    }

    #[test]
    fn the_same_samples_give_the_same_interval() {
        let (a, b) = (counted(40), counted(40).into_iter().rev().map(f64::sqrt).collect::<Vec<_>>());
        assert_eq!(ratio_of_medians(&a, &b), ratio_of_medians(&a, &b));
    }

    #[test]
    fn a_round_spans_from_the_first_begin_to_the_last_end() {
        let (a, b) = (Laps(vec![[1000, 3000], [9000, 9500]]), Laps(vec![[2000, 6000], [8000, 9100]]));
        assert_eq!(Laps::rounds_us(&[a.0, b.0], &vec![0, 0].into()), [5.0, 1.5]);
    }

    #[test]
    fn round_takes_time_of_slower_machine_despite_clock_offsets() {
        let laps = [[1000, 3000], [2000, 6000], [900_000, 904_500], [901_000, 902_000]];
        assert_eq!(Laps::rounds_us(&laps.map(|lap| vec![lap]), &vec![0, 0, 1, 1].into()), [5.0]);
    }
}
