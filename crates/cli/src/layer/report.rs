//! What was found, and its JSON. Keys are described in `docs/layer-json.md`.

use serde::Serialize;
use sidelane::World;
use sidelane::config::Pace;

use super::task::{Shape, Task};
use crate::command;
use crate::launch::shape_words;
use crate::machines;
use crate::stats::summary;
use crate::table;

/// Everything that is known after a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: Conditions,
    /// Whether overlapped steps gave the bits of those in turn.
    pub verified: bool,
    pub forward: Pass,
    pub backward: Option<Pass>,
}

/// What was measured, and where.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conditions {
    #[serde(flatten)]
    pub shape: Shape,
    pub rounds: u32,
    pub lane: Option<String>,
    pub pace: Option<Link>,
    /// Of the machine of rank 0.
    pub cores: usize,
}

/// The link whose time wires kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Link {
    pub bytes_per_second: u64,
    pub latency_us: u64,
}

/// One direction: medians of rounds, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pass {
    /// At the slowest rank, in turn.
    pub experts_us: f64,
    /// With experts that do nothing.
    pub transfers_us: f64,
    pub in_turn_us: f64,
    pub overlapped_us: f64,
    /// What overlap saves, of the shorter of experts and transfers.
    pub hidden: f64,
}

impl Pass {
    /// From what rounds took.
    pub fn of_rounds(experts: &[f64], transfers: &[f64], in_turn: &[f64], overlapped: &[f64]) -> Self {
        let [experts_us, transfers_us, in_turn_us, overlapped_us] =
            [experts, transfers, in_turn, overlapped].map(|rounds| summary(rounds).p50);
        let hidden = (in_turn_us - overlapped_us) / experts_us.min(transfers_us);
        Pass { experts_us, transfers_us, in_turn_us, overlapped_us, hidden }
    }
}

impl From<Pace> for Link {
    fn from(pace: Pace) -> Self {
        let latency_us = u64::try_from(pace.latency.as_micros()).unwrap_or(u64::MAX);
        Link { bytes_per_second: pace.bytes_per_second.get(), latency_us }
    }
}

impl Report {
    /// Of a forward pass and, if there is one, a backward pass.
    pub fn new(task: &Task, world: &World, pace: Option<Pace>, verified: bool, passes: &[Pass]) -> Self {
        let cores = machines::cores();
        let lane = machines::rail(world).map(|(lane, _)| lane);
        let pace = pace.filter(|_| lane.as_deref() == Some("paced")).map(Link::from);
        let config = Conditions { shape: task.shape.clone(), rounds: task.rounds, lane, pace, cores };
        Report { config, verified, forward: passes[0], backward: passes.get(1).copied() }
    }
}

const NOTES: &str = "\
Experts: at work, at the slowest rank, in turn. Transfers: a step whose experts do nothing. Hidden: what overlap saves of the
shorter of the two; 1 is all of it.";

impl command::Report for Report {
    /// Conditions, and a line for each direction.
    fn text(&self) -> String {
        let Conditions { shape, rounds, lane, pace, cores } = &self.config;
        let link = match pace {
            Some(Link { bytes_per_second, latency_us }) => {
                format!(", at {} a second and {latency_us} us", table::volume(*bytes_per_second))
            }
            None => String::new(),
        };
        let lane = lane.as_deref().unwrap_or("shm");
        let mut table = table::figures(["", "experts", "transfers", "in turn", "overlapped", "hidden"]);
        for (name, pass) in [("forward", Some(self.forward)), ("backward", self.backward)] {
            let Some(Pass { experts_us, transfers_us, in_turn_us, overlapped_us, hidden }) = pass else {
                continue;
            };
            let times = [experts_us, transfers_us, in_turn_us, overlapped_us].map(table::time);
            table.add_row(std::iter::once(name.to_owned()).chain(times).chain([format!("{hidden:.2}")]));
        }
        let bits = if self.verified { "the same bits in turn and overlapped" } else { "DIFFERENT BITS" };
        format!(
            "ranks     {}, on {cores} cores\nlayer     {}\nlane      {lane}{link}\nchecked   {bits}; medians of {rounds} rounds\n\n{}\n\n{NOTES}",
            shape_words(&shape.ranks_per_node),
            shape.words(),
            table.trim_fmt(),
        )
    }

    fn is_right(&self) -> bool {
        self.verified
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Report as _;
    use crate::command::tests::assert_page;

    fn sample() -> Report {
        let shape = super::super::task::sample();
        let pace = Some(Link { bytes_per_second: 1 << 30, latency_us: 10 });
        let config = Conditions { shape, rounds: 3, lane: Some("paced".into()), pace, cores: 2 };
        let forward = Pass::of_rounds(&[90.0, 100.0, 110.0], &[120.0; 3], &[240.0; 3], &[150.0; 3]);
        Report { config, verified: true, forward, backward: Some(forward) }
    }

    #[test]
    fn hidden_is_what_is_saved_of_the_shorter_part() {
        assert_eq!(sample().forward.hidden, 0.9);
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        let document = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/layer-json.md"));
        assert_page(document, &[sample()], |key| Some(key.to_owned()));
    }

    #[test]
    fn the_text_has_a_line_for_each_direction() {
        let text = sample().text();
        for words in
            ["2 on 2 nodes (1 + 1)", "paced, at 1.1 GB a second and 10 us", "forward", "backward", "0.90"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
    }
}
