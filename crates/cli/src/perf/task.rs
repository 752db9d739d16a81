//! What the ranks of a measurement do, resolved.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::args::{PerfArgs, Test};
use super::sizes::Sizes;
use crate::error::{CliError, usage};
use crate::options::at_least_one;
use crate::ranks;

/// Everything a rank needs to know, and every rank the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub test: Test,
    pub ranks_per_node: Vec<u32>,
    /// Who is measured with whom, one pair after the other.
    pub pairs: Vec<(u32, u32)>,
    /// Whether they are all pairs of nodes.
    pub matrix: bool,
    pub runs: Vec<Run>,
    /// Whether another takes turns with us.
    pub peers: bool,
    pub json: Option<PathBuf>,
    pub svg: Option<PathBuf>,
}

/// One size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Of a put; 0 if there are only signals.
    pub bytes: u64,
    pub iterations: u32,
    pub warmup: u32,
}

impl Task {
    /// From the command line.
    pub fn resolve(args: &PerfArgs) -> Result<Self, CliError> {
        let mut ranks_per_node = args.nodes.sizes()?;
        if args.peers && args.nodes.ranks_per_node.is_empty() {
            ranks_per_node = vec![2];
        }
        if args.peers && (args.test != Test::PutLat || ranks_per_node.len() > 1) {
            return Err(usage!("--peers is for put-lat between the ranks of one node: --ranks-per-node 2"));
        }
        let matrix = args.pairs.is_some();
        let pairs =
            if matrix { all_pairs(&ranks_per_node)? } else { vec![(0, peer(args.peer, &ranks_per_node)?)] };
        at_least_one(&[("--iterations", args.iterations.unwrap_or(1))])?;
        let run = |&bytes: &u64| {
            let iterations = args.iterations.unwrap_or_else(|| usual(args.test, bytes));
            Run { bytes, iterations, warmup: args.warmup.unwrap_or(iterations.div_ceil(10)) }
        };
        Ok(Task {
            test: args.test,
            pairs,
            matrix,
            runs: sizes(args, matrix)?.iter().map(run).collect(),
            peers: args.peers,
            json: args.json.clone(),
            svg: args.svg.clone(),
            ranks_per_node,
        })
    }

    /// What all ranks must have in common. Only rank 0 writes files.
    pub fn conditions(&self) -> String {
        let [sizes, iterations, warmup] =
            [|run: &Run| run.bytes, |run: &Run| run.iterations.into(), |run: &Run| run.warmup.into()]
                .map(|of: fn(&Run) -> u64| self.runs.iter().map(of).collect::<Vec<_>>());
        let Task { test, ranks_per_node, pairs, .. } = self;
        let conditions = json!({
            "test": test, "ranks_per_node": ranks_per_node, "pairs": pairs,
            "sizes": sizes, "iterations": iterations, "warmup": warmup, "peers": self.peers,
        });
        ranks::conditions("perf", &conditions)
    }

    /// Of the largest put.
    pub fn most(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes).max().unwrap_or(0)
    }

    /// Room for a window, and in the pool for as much again.
    pub fn sizes(&self) -> ranks::Sizes {
        let symmetric = self.most() + (4 << 20);
        ranks::Sizes { heap: (symmetric + self.most() + (4 << 20)).next_multiple_of(2 << 20), symmetric }
    }
}

fn sizes(args: &PerfArgs, matrix: bool) -> Result<Vec<u64>, CliError> {
    match (args.test, &args.sizes) {
        (Test::Signal, Some(_)) => Err(usage!("--sizes means nothing for signal: a signal has no size")),
        (Test::Signal, None) if args.svg.is_some() => {
            Err(usage!("--svg means nothing for signal: a signal has no size"))
        }
        (Test::Signal, None) => Ok(vec![0]),
        (_, Some(Sizes(sizes))) => Ok(sizes.clone()),
        (Test::PutLat, None) if matrix => Ok(vec![8]),
        (_, None) if matrix => Ok(vec![1 << 20]),
        (_, None) => Ok((3..=22).map(|power| 1 << power).collect()),
    }
}

/// The rank that rank 0 is measured with.
fn peer(asked: Option<u32>, ranks_per_node: &[u32]) -> Result<u32, CliError> {
    let ranks = ranks_per_node.iter().sum();
    match (asked, ranks_per_node) {
        _ if ranks == 1 => {
            Err(usage!("a job of one rank has no pair: give it more --nodes or --ranks-per-node"))
        }
        (Some(0), _) => Err(usage!("--peer is rank 0 itself")),
        (Some(peer), _) if peer >= ranks => {
            Err(usage!("--peer is {peer}, but the job has {ranks} ranks, counted from 0"))
        }
        (Some(peer), _) => Ok(peer),
        (None, [_]) => Ok(1),
        (None, sizes) => Ok(sizes[0]),
    }
}

/// The first ranks of every two nodes, in both directions.
fn all_pairs(ranks_per_node: &[u32]) -> Result<Vec<(u32, u32)>, CliError> {
    let ends = ranks_per_node.iter().scan(0, |end, size| {
        *end += size;
        Some(*end)
    });
    let first: Vec<u32> = ends.zip(ranks_per_node).map(|(end, size)| end - size).collect();
    match first.as_slice() {
        [_] => Err(usage!("--pairs all is for two nodes or more")),
        first => Ok(first
            .iter()
            .flat_map(|&from| first.iter().map(move |&to| (from, to)))
            .filter(|(from, to)| from != to)
            .collect()),
    }
}

/// As many as small messages need and large ones can be had of in a few seconds on a slow network.
fn usual(test: Test, bytes: u64) -> u32 {
    const VOLUME: u64 = 256 << 20;
    let (least, most) = if test.is_latency() { (20, 1000) } else { (80, 5000) };
    (VOLUME / bytes.max(1)).clamp(least, most) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::tests::parsed;

    fn resolve(line: &str) -> Result<Task, CliError> {
        Task::resolve(&parsed(line).unwrap())
    }

    #[test]
    fn rank_0_is_measured_with_another_node_if_there_is_one() {
        for (line, peer) in [
            ("put-lat", 1),
            ("put-lat --nodes 2 --ranks-per-node 3", 3),
            ("put-lat --ranks-per-node 3,1", 3),
            ("put-lat --ranks-per-node 3", 1),
            ("put-lat --nodes 1 --ranks-per-node 3 --peer 2", 2),
        ] {
            assert_eq!(resolve(line).unwrap().pairs, [(0, peer)], "{line}");
        }
    }

    #[test]
    fn all_pairs_are_those_of_first_ranks_in_both_directions() {
        let task = resolve("put-bw --ranks-per-node 2,1,3 --pairs all").unwrap();
        assert_eq!(task.pairs, [(0, 2), (0, 3), (2, 0), (2, 3), (3, 0), (3, 2)]);
        assert_eq!(task.runs.iter().map(|run| run.bytes).collect::<Vec<_>>(), [1 << 20]);
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for (line, error) in [
            (
                "put-lat --nodes 1",
                usage!("a job of one rank has no pair: give it more --nodes or --ranks-per-node"),
            ),
            (
                "put-lat --nodes 1 --ranks-per-node 2 --pairs all",
                usage!("--pairs all is for two nodes or more"),
            ),
            ("put-lat --peer 0", usage!("--peer is rank 0 itself")),
            (
                "put-lat --peer 2",
                usage!(
                    "--peer is {peer}, but the job has {ranks} ranks, counted from 0",
                    peer = 2,
                    ranks = 2
                ),
            ),
            (
                "put-bw --peers",
                usage!("--peers is for put-lat between the ranks of one node: --ranks-per-node 2"),
            ),
            (
                "put-lat --peers --ranks-per-node 1,1",
                usage!("--peers is for put-lat between the ranks of one node: --ranks-per-node 2"),
            ),
            ("put-lat --iterations 0", usage!("--iterations must be at least 1")),
            ("signal --sizes 8", usage!("--sizes means nothing for signal: a signal has no size")),
            ("signal --svg x", usage!("--svg means nothing for signal: a signal has no size")),
            ("put-lat --nodes 0", usage!("--nodes must be at least 1")),
        ] {
            assert_eq!(resolve(line).unwrap_err().to_string(), error.to_string(), "{line}");
        }
    }

    #[test]
    fn large_puts_are_fewer_unless_a_number_is_given() {
        let runs = resolve("put-lat --sizes 8,4M").unwrap().runs;
        assert_eq!(runs[0], Run { bytes: 8, iterations: 1000, warmup: 100 });
        assert_eq!(runs[1], Run { bytes: 4 << 20, iterations: 64, warmup: 7 });
        let runs = resolve("exchange --sizes 8,4M --iterations 7 --warmup 0").unwrap().runs;
        assert!(runs.iter().all(|run| (run.iterations, run.warmup) == (7, 0)));
        assert_eq!(resolve("signal").unwrap().runs, [Run { bytes: 0, iterations: 1000, warmup: 100 }]);
    }
}
