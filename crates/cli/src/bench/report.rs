//! The result of a measurement, and its JSON. Keys are described in `docs/bench-json.md`.

use serde::{Deserialize, Serialize};

use super::cards::Cards;
use super::config::Config;
use super::crossing::Crossing;
use super::peers::Peers;
use crate::stats::{ratio_of_medians, summary};

/// Everything that is known after a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub config: Conditions,
    pub verified: bool,
    pub rows_verified: u64,
    /// Of the rank that needs most.
    pub required_rows: u32,
    /// Of all ranks.
    pub dropped_choices: u64,
    pub memcpy_gbps: f64,
    pub first: First,
    pub lanes: Lanes,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cards: Option<Cards>,
    pub crossing: Crossing,
    pub dispatch: Pass,
    pub combine: Pass,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dispatch_backward: Option<Pass>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub combine_backward: Option<Pass>,
    /// Others that took turns with us, if they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<Peers>,
}

/// What was asked for, and what the machine made of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    #[serde(flatten)]
    pub config: Config,
    /// How many machines the nodes are.
    pub machines: usize,
    /// Of the machine of rank 0.
    pub cores: usize,
    /// On the machine of rank 0. Read from the mapping: what the kernel granted, not what was asked for.
    pub huge_pages_granted: bool,
}

/// The first calls of a world: what later ones find touched, they touch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct First {
    pub dispatch_us: f64,
    pub combine_us: f64,
}

/// Which lane the hops took; none where there was no such hop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lanes {
    pub local: Option<String>,
    pub rail: Option<String>,
    /// Why it is this one.
    pub rail_reason: Option<String>,
}

/// One kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    pub p50_us: f64,
    pub p99_us: Option<f64>,
    pub max_us: f64,
    pub bytes_landed: u64,
    pub bytes_rail: u64,
    pub bytes_rail_logical: u64,
    pub gbps: f64,
    pub floor_us: f64,
    pub share_of_floor: f64,
    pub share_low: f64,
    pub share_high: f64,
}

/// What all ranks together did in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Volume {
    pub landed: u64,
    /// What crossed between nodes.
    pub rail: u64,
    /// What would have crossed with a row for each (token, expert).
    pub rail_logical: u64,
}

impl Pass {
    /// From the slowest rank's time of each round, in microseconds, and the floor's of the same rounds.
    pub fn of_rounds(real_us: &[f64], floor_us: &[f64], volume: Volume) -> Self {
        let (real, floor) = (summary(real_us), summary(floor_us));
        let share = ratio_of_medians(floor_us, real_us);
        Pass {
            p50_us: real.p50,
            p99_us: real.p99,
            max_us: real.max,
            bytes_landed: volume.landed,
            bytes_rail: volume.rail,
            bytes_rail_logical: volume.rail_logical,
            gbps: gbps(volume.landed, real.p50),
            floor_us: floor.p50,
            share_of_floor: share.value,
            share_low: share.low,
            share_high: share.high,
        }
    }

    /// Speed of the floor: a slow floor flatters, so it is shown beside memcpy.
    pub fn floor_gbps(&self) -> f64 {
        gbps(self.bytes_landed, self.floor_us)
    }
}

/// 10^9 bytes per second.
fn gbps(bytes: u64, us: f64) -> f64 {
    bytes as f64 / us / 1e3
}

impl Report {
    /// The passes that were timed, by the names of their keys.
    pub fn passes(&self) -> Vec<(&'static str, Pass)> {
        let always = [("dispatch", Some(self.dispatch)), ("combine", Some(self.combine))];
        let backward =
            [("dispatch_backward", self.dispatch_backward), ("combine_backward", self.combine_backward)];
        always.into_iter().chain(backward).filter_map(|(name, pass)| Some((name, pass?))).collect()
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
pub mod tests;
