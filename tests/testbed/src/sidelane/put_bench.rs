//! `sidelane put-bench`: what dispatch and combine are made of.

use serde::Deserialize;

use super::{CALM, LANE, Nics, command, report};
use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::perftest::Reading;

/// A `sidelane put-bench` between the first ranks of both machines.
#[derive(Clone, Copy, Debug)]
pub struct PutBench {
    /// Measured operation.
    pub test: Test,
    /// Bytes a put.
    pub size: usize,
    /// Round trips, or puts.
    pub iterations: usize,
}

/// Measured operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// Half the round trip of a put with its signal.
    PutLatency,
    /// Half the round trip of a signal.
    Signal,
    /// A stream of puts.
    PutBandwidth,
}

impl Test {
    /// As the program names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::PutLatency => "put-lat",
            Self::Signal => "signal",
            Self::PutBandwidth => "put-bw",
        }
    }
}

/// The used part of its report.
#[derive(Debug, Deserialize)]
struct Seen {
    verified: bool,
    pairs: Vec<Pair>,
}

#[derive(Debug, Deserialize)]
struct Pair {
    lane: String,
    runs: Vec<Run>,
}

#[derive(Debug, Deserialize)]
struct Run {
    latency: Option<Latency>,
    bandwidth: Option<Bandwidth>,
}

#[derive(Debug, Deserialize)]
struct Latency {
    min_us: f64,
    p50_us: f64,
}

#[derive(Debug, Deserialize)]
struct Bandwidth {
    peak_mib_s: f64,
    mean_mib_s: f64,
}

impl PutBench {
    fn command(&self, machine: usize) -> String {
        let sizes = match self.test {
            Test::Signal => String::new(),
            Test::PutLatency | Test::PutBandwidth => format!(" --sizes {}", self.size),
        };
        let what = format!("put-bench {}{sizes} --iterations {}", self.test.name(), self.iterations);
        command(machine, 1, &what, Nics::First, CALM)
    }

    /// Runs it to its end.
    pub fn run(&self, bed: &Bed, deadline: Deadline) -> Result<Reading> {
        let seen: Seen = report(bed, deadline, |machine| self.command(machine))?;
        seen.reading().ok_or_else(|| Error::NotVerified { program: "put-bench", seen: format!("{seen:?}") })
    }
}

impl Seen {
    /// Of the one run of the one pair, verified, over the lane that was asked for.
    fn reading(&self) -> Option<Reading> {
        let [Pair { lane, runs }] = &self.pairs[..] else { return None };
        let [run] = &runs[..] else { return None };
        if !self.verified || lane != LANE {
            return None;
        }
        match run {
            Run { latency: Some(latency), bandwidth: None } => {
                Some(Reading { best: latency.min_us, typical: latency.p50_us })
            }
            Run { latency: None, bandwidth: Some(bandwidth) } => {
                Some(Reading { best: bandwidth.peak_mib_s, typical: bandwidth.mean_mib_s })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn reading(report: Value) -> Option<Reading> {
        serde_json::from_value::<Seen>(report).unwrap().reading()
    }

    fn report_with(verified: bool, lane: &str, run: Value) -> Value {
        json!({ "verified": verified, "pairs": [{ "lane": lane, "runs": [run] }] })
    }

    #[test]
    fn a_verified_run_over_verbs_is_read() {
        let run = json!({ "latency": { "min_us": 1.0, "p50_us": 2.0 } });
        assert_eq!(reading(report_with(true, "verbs", run)), Some(Reading { best: 1.0, typical: 2.0 }));
        let run = json!({ "bandwidth": { "peak_mib_s": 4.0, "mean_mib_s": 3.0 } });
        assert_eq!(reading(report_with(true, "verbs", run)), Some(Reading { best: 4.0, typical: 3.0 }));
    }

    #[test]
    fn another_lane_or_wrong_bytes_are_no_reading() {
        let run = || json!({ "latency": { "min_us": 1.0, "p50_us": 2.0 } });
        assert_eq!(reading(report_with(true, "tcp", run())), None);
        assert_eq!(reading(report_with(false, "verbs", run())), None);
        assert_eq!(reading(report_with(true, "verbs", json!({}))), None);
    }
}
