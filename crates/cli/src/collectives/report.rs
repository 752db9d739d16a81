//! What is reported: a table, or JSON, whose keys are described in `docs/collectives-json.md`.

use serde::{Deserialize, Serialize};

use super::operation::Operation;
use super::task::Run;
use crate::bench::peers::PeerPass;
use crate::command;
use crate::machines;
use crate::peers::Unavailable;
use crate::perf::Bytes;
use crate::stats::summary;
use crate::table::{self, time};

/// All that was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub config: Conditions,
    /// Whether all results were right.
    pub verified: bool,
    pub runs: Vec<RunReport>,
    pub absent: Vec<Unavailable>,
}

/// Under what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    pub ranks_per_node: Vec<u32>,
    pub machines: usize,
    pub cores: usize,
}

/// One operation and size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    pub operation: Operation,
    /// Of the larger tensor of a rank.
    pub bytes: u64,
    pub rounds: usize,
    pub p50_us: f64,
    pub max_us: f64,
    pub peers: Vec<Beside>,
}

/// Another, in the same rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    pub name: String,
    /// What it says that it is.
    pub version: String,
    /// Whether its result is ours, bit by bit.
    pub same: bool,
    pub times: PeerPass,
}

impl RunReport {
    /// Of these rounds.
    pub fn new(run: Run, rounds_us: &[f64], peers: Vec<Beside>) -> Self {
        let seen = summary(rounds_us);
        let Run { operation, bytes, .. } = run;
        RunReport { operation, bytes, rounds: rounds_us.len(), p50_us: seen.p50, max_us: seen.max, peers }
    }
}

impl Report {}

impl command::Report for Report {
    /// As people read it.
    fn text(&self) -> String {
        let Conditions { ranks_per_node, machines, cores } = &self.config;
        let ranks: u32 = ranks_per_node.iter().sum();
        let verified = if self.verified { "results verified" } else { "RESULTS ARE WRONG" };
        let of = ranks_per_node.iter().map(u32::to_string).collect::<Vec<_>>().join("+");
        let machines = machines::words(*machines);
        let mut text =
            format!("{ranks} ranks ({of} by node), f32, {machines} with {cores} cores; {verified}\n\n");
        let mut table = table::figures([
            "operation",
            "size",
            "p50",
            "max",
            "peer",
            "p50",
            "max",
            "x ours (95%)",
            "result",
        ]);
        for run in &self.runs {
            let ours = [
                run.operation.name().to_owned(),
                Bytes(run.bytes).to_string(),
                time(run.p50_us),
                time(run.max_us),
            ];
            if run.peers.is_empty() {
                table.add_row(ours.to_vec());
            }
            for peer in &run.peers {
                let PeerPass { p50_us, max_us, times, times_low, times_high } = peer.times;
                let result = if peer.same { "same bits" } else { "NOT THE SAME" };
                let times = format!("{times:.2} ({times_low:.2}-{times_high:.2})");
                let theirs = [peer.version.clone(), time(p50_us), time(max_us), times, result.into()];
                table.add_row(ours.iter().cloned().chain(theirs).collect::<Vec<_>>());
            }
        }
        text += &(table.trim_fmt() + "\n");
        self.absent.iter().fold(text, |text, peer| text + &peer.text() + "\n")
    }

    fn is_right(&self) -> bool {
        self.verified && self.runs.iter().flat_map(|run| &run.peers).all(|peer| peer.same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Report as _;
    use crate::command::tests::assert_page;
    use crate::error::failed;

    fn sample() -> Report {
        let run = Run { operation: Operation::AllReduce, bytes: 4096, rounds: 3 };
        let times = PeerPass::new(&[30.0, 10.0, 20.0], &[6.0, 2.0, 4.0]);
        let beside = Beside { name: "mpi".into(), version: "Open MPI v4".into(), same: true, times };
        Report {
            config: Conditions { ranks_per_node: vec![2, 1], machines: 1, cores: 2 },
            verified: true,
            runs: vec![RunReport::new(run, &[6.0, 2.0, 4.0], vec![beside])],
            absent: vec![Unavailable::new("gloo", &failed!("there is no python3"), "pip install torch")],
        }
    }

    #[test]
    fn the_page_names_exactly_the_keys_that_are_written() {
        let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/collectives-json.md"));
        assert_page(page, &[sample()], |key| Some(key.to_owned()));
    }

    #[test]
    fn the_text_says_who_ran_beside_and_who_did_not() {
        let text = sample().text();
        for words in [
            "3 ranks (2+1 by node)",
            "all-reduce",
            "4K",
            "4.00 us",
            "5.00 (5.00-5.00)",
            "same bits",
            "no python3",
        ] {
            assert!(text.contains(words), "{words:?} in\n{text}");
        }
        let mut wrong = sample();
        wrong.runs[0].peers[0].same = false;
        assert!(sample().is_right() && !wrong.is_right() && wrong.text().contains("NOT THE SAME"));
    }
}
