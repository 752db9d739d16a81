//! The result of a measurement, and its JSON. Keys are described in `docs/perf-json.md`.

use serde::{Deserialize, Serialize};

use super::args::Test;
use super::measure::Found;
use super::task::Run;
use crate::peers::Unavailable;
use crate::stats::{ratio_of_medians, summary};

/// Everything that is known after a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub config: Conditions,
    pub verified: bool,
    pub pairs: Vec<PairReport>,
    /// One that was to take turns with us, and could not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub absent: Option<Unavailable>,
}

/// What was measured, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    pub test: Test,
    pub nodes: usize,
    pub ranks_per_node: Vec<u32>,
    pub machines: usize,
    /// Of the machine of rank 0.
    pub cores: usize,
    pub route: String,
    /// Whether the pairs are all of nodes.
    pub matrix: bool,
}

/// Two ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairReport {
    pub from: End,
    pub to: End,
    pub lane: String,
    /// Why it is this one; null within a node, where there is no other.
    pub lane_reason: Option<String>,
    pub runs: Vec<RunReport>,
}

/// One end of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    pub rank: u32,
    pub node: u32,
}

/// One size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    #[serde(flatten)]
    pub run: Run,
    pub verified: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// Of one that took turns with us.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
}

/// Medians of runs in turn with another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    pub name: String,
    /// Of each turn.
    pub ours_us: Vec<f64>,
    pub theirs_us: Vec<f64>,
    /// By what factor ours is faster: median by median.
    pub times: f64,
    pub times_low: f64,
    pub times_high: f64,
}

/// Half round trips.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    pub min_us: f64,
    pub p50_us: f64,
    pub mean_us: f64,
    pub p99_us: Option<f64>,
    pub max_us: f64,
}

/// A stream.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Of the fastest window.
    pub peak_mib_s: f64,
    /// Of all windows.
    pub mean_mib_s: f64,
    /// In each direction.
    pub puts_per_s: f64,
    /// The same number of copies of the same bytes, where they move within a machine's memory.
    pub memcpy_mib_s: Option<f64>,
}

impl Latency {
    /// Of at least one half round trip, in microseconds.
    pub fn of(halves: &[f64]) -> Self {
        let seen = summary(halves);
        Latency { min_us: seen.min, p50_us: seen.p50, mean_us: seen.mean, p99_us: seen.p99, max_us: seen.max }
    }
}

impl Beside {
    /// Of at least one turn.
    pub fn new(name: &str, ours_us: Vec<f64>, theirs_us: Vec<f64>) -> Self {
        let times = ratio_of_medians(&theirs_us, &ours_us);
        let (times, times_low, times_high) = (times.value, times.low, times.high);
        Beside { name: name.into(), ours_us, theirs_us, times, times_low, times_high }
    }
}

impl Bandwidth {
    /// Of windows of (puts, microseconds), where `bytes` move with each put; beside copies of so many and so long.
    pub fn of(bytes: u64, windows: &[(u32, f64)], memcpy: Option<(u32, f64)>) -> Self {
        let speed = |puts: u64, us: f64| mib_s(bytes * puts, us);
        let (puts, us) =
            windows.iter().fold((0, 0.0), |sum, &(puts, us)| (sum.0 + u64::from(puts), sum.1 + us));
        let peaks = windows.iter().map(|&(puts, us)| speed(puts.into(), us));
        Bandwidth {
            peak_mib_s: peaks.fold(0.0, f64::max),
            mean_mib_s: speed(puts, us),
            puts_per_s: puts as f64 / us * 1e6,
            memcpy_mib_s: memcpy.map(|(copies, us)| speed(copies.into(), us)),
        }
    }
}

/// Powers of 1024, as perftest has it.
fn mib_s(bytes: u64, us: f64) -> f64 {
    bytes as f64 / f64::from(1 << 20) / us * 1e6
}

impl RunReport {
    /// From what both ranks have found: the first one timed.
    pub fn new(run: Run, first: Found, second: &Found) -> Self {
        let verified = first.verified && second.verified;
        RunReport { run, verified, latency: first.latency, bandwidth: first.bandwidth, beside: None }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    use crate::command::tests::assert_page;

    const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/perf-json.md"));

    /// A report of puts of 8 bytes and of 1 MiB between two nodes.
    pub fn sample(test: Test) -> Report {
        let run = |bytes, us: f64| {
            let halves: Vec<f64> = (1..=1000).map(|n| us * f64::from(n)).collect();
            let latency = test.is_latency().then(|| Latency::of(&halves));
            let windows = [(10, 2.0 * us), (10, us)];
            let bandwidth =
                (!test.is_latency()).then(|| Bandwidth::of(bytes, &windows, Some((10, us / 2.0))));
            let run = Run { bytes, iterations: 1000, warmup: 100 };
            let beside = test.is_latency().then(|| Beside::new("ucx", vec![us, 2.0 * us], vec![us; 2]));
            RunReport { run, verified: true, latency, bandwidth, beside }
        };
        let end = |rank, node| End { rank, node };
        Report {
            config: Conditions {
                test,
                nodes: 2,
                ranks_per_node: vec![2, 2],
                machines: 1,
                cores: 2,
                route: "direct".into(),
                matrix: false,
            },
            verified: true,
            pairs: vec![PairReport {
                from: end(0, 0),
                to: end(2, 1),
                lane: "loop".into(),
                lane_reason: Some("all nodes are on one machine".into()),
                runs: vec![run(8, 0.01), run(1 << 20, 100.0)],
            }],
            absent: Some(Unavailable {
                name: "ucx".into(),
                why: "there is no ucx_perftest".into(),
                install: "apt install ucx-utils".into(),
            }),
        }
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        let reports = [Test::PutLat, Test::PutBw].map(sample);
        assert_page(DOCUMENT, &reports, |key| Some(key.to_owned()));
    }

    #[test]
    fn speeds_follow_from_puts_and_times() {
        let seen = Bandwidth::of(1 << 20, &[(10, 2e4), (10, 1e4), (0, 5e3)], Some((20, 1e4)));
        assert_eq!(
            (seen.peak_mib_s, seen.puts_per_s.round(), seen.memcpy_mib_s),
            (1000.0, 571.0, Some(2000.0))
        );
        assert!((seen.mean_mib_s - 20.0 / 0.035).abs() < 1e-9);
    }

    #[test]
    fn a_run_is_verified_if_both_ranks_say_so() {
        let run = Run { bytes: 8, iterations: 1, warmup: 0 };
        let [good, bad] = [true, false].map(|verified| Found { verified, ..Found::default() });
        for (first, second) in [(&good, &bad), (&bad, &good)] {
            assert!(!RunReport::new(run, first.clone(), second).verified);
        }
        assert!(RunReport::new(run, good.clone(), &good).verified);
    }
}
