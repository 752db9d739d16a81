//! `sidelane put-bench`: latency and bandwidth between two ranks, over the one-sided face alone.
//!
//! Parts of a dispatch, one at a time, in the tables that users of perftest know. No code here
//! knows a lane: the figures are those of a program that calls [`Window`](sidelane::Window),
//! including waits that fall asleep.
//!
//! ```text
//!   rank a ----- put, signal ----> rank b      a pair has a group and a window of its own
//!          <---- put, signal -----
//!   all others: in a gather, asleep on a socket, until the figures of this pair and size come round
//! ```

mod measure;
mod rank;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::command_frame::Command;
use crate::commands::launch::{MachineArgs, places};
use crate::error::{CliError, usage};
use crate::options::{JsonFile, NodeArgs, Scaled, at_least_one};
use crate::ranks::{self, Assignment, Files, RankMemory};

/// Measured operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Test {
    /// Half the round trip of a put with its signal
    PutLat,
    /// A stream of puts
    PutBw,
    /// Half the round trip of a signal alone
    Signal,
    /// Streams of puts in both directions at once
    PutBibw,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pairs {
    /// The first ranks of every two nodes, one pair after the other, in both directions
    All,
}

const EXAMPLES: &str = "\
Examples:
  sidelane put-bench put-lat                               # two nodes of 1 rank
  sidelane put-bench put-bw --nodes 1 --ranks-per-node 2   # within a node
  sidelane put-bench put-bw --nodes 4 --pairs all          # a matrix
  # Between two machines; the other one has --node-rank 1.
  sidelane put-bench put-lat --master node0 --node-rank 0";

/// Measure latency and bandwidth of puts and signals between ranks
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct PutBenchArgs {
    /// Operation to measure
    #[arg(value_enum)]
    pub test: Test,

    /// Bytes of a put: a list, or all powers of two in a range; suffixes K, M, G
    /// [default: 8..4M; with --pairs all 8 for put-lat, otherwise 1M]
    #[arg(long, value_name = "SIZE,..|FROM..TO")]
    pub sizes: Option<Sizes>,

    /// The rank that rank 0 exchanges with [default: the first one of node 1, or rank 1 if there is
    /// only one node]
    #[arg(long, value_name = "RANK")]
    pub peer: Option<u32>,

    /// Measure several pairs, and print a matrix
    #[arg(long, value_enum, conflicts_with_all = ["peer", "svg"])]
    pub pairs: Option<Pairs>,

    /// Take turns with ucx_perftest, if it is installed: put-lat between two ranks of one node
    #[arg(long, conflicts_with_all = ["master", "pairs", "nodes", "peer"])]
    pub baselines: bool,

    #[command(flatten)]
    pub nodes: NodeArgs<2, 1>,

    /// Round trips, or puts in each direction, that are timed for each size [default: by size, at
    /// most 1000 or 5000]
    #[arg(long, value_name = "N")]
    pub iterations: Option<u32>,

    /// As many before them that are not [default: a tenth]
    #[arg(long, value_name = "N")]
    pub warmup: Option<u32>,

    #[command(flatten)]
    pub report: JsonFile<true>,

    /// Draw the figures by size, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    #[command(flatten)]
    pub machines: MachineArgs,
}

impl Command for PutBenchArgs {
    const NAME: &'static str = "put-bench";

    fn run(self) -> Result<ExitCode, CliError> {
        let task = Task::resolve(&self)?;
        let files =
            Files { json: self.report.json, svg: self.svg, ..Files::default() }.claimed(&self.machines)?;
        let (nodes, memory) = (task.ranks_per_node.clone(), task.memory());
        ranks::start(Self::NAME, &nodes, &self.machines, &Assignment { task, files }, Vec::new(), &memory)
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        rank::main(&ranks::task(task)?)
    }
}

impl Test {
    pub fn title(self) -> &'static str {
        match self {
            Test::PutLat => "half the round trip of a put with its signal",
            Test::PutBw => "a stream of puts",
            Test::Signal => "half the round trip of a signal",
            Test::PutBibw => "streams of puts in both directions at once",
        }
    }

    /// Whether single round trips are timed; otherwise streams are.
    pub fn is_latency(self) -> bool {
        matches!(self, Test::PutLat | Test::Signal)
    }
}

/// Bytes of puts or tensors, in the order in which they are measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

/// The largest one: windows and tensors lie in memory.
const MOST: u64 = 1 << 30;

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((from, to)) = text.split_once("..") else {
            return text.split(',').map(size).collect::<Result<_, _>>().map(Sizes);
        };
        let (from, to) = (size(from)?, size(to)?);
        let powers: Vec<u64> = (0..=MOST.ilog2()).map(|power| 1 << power).collect();
        let within: Vec<u64> = powers.into_iter().filter(|power| (from..=to).contains(power)).collect();
        if within.is_empty() {
            Err(format!("no power of two lies in {from}..{to}"))
        } else {
            Ok(Sizes(within))
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    let none =
        |_| format!("{text:?} is no size: expected bytes, or a number with K, M or G (as in 8..4M or 4K,1M)");
    let Scaled(bytes) = text.parse().map_err(none)?;
    if (1..=MOST).contains(&bytes) {
        Ok(bytes)
    } else {
        Err(format!("sizes are from 1 byte to 1G, not {bytes}"))
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub test: Test,
    pub ranks_per_node: Vec<u32>,
    /// Pairs of ranks, measured one after the other.
    pub pairs: Vec<(u32, u32)>,
    /// Whether they are all pairs of nodes.
    pub matrix: bool,
    pub runs: Vec<Run>,
    /// Whether another takes turns with us.
    pub baselines: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Of a put; 0 if there are only signals.
    pub bytes: u64,
    pub iterations: u32,
    pub warmup: u32,
}

impl Task {
    pub fn resolve(args: &PutBenchArgs) -> Result<Self, CliError> {
        let mut ranks_per_node = args.nodes.sizes()?;
        if args.baselines && args.nodes.ranks_per_node.is_empty() {
            ranks_per_node = vec![2];
        }
        if args.baselines && (args.test != Test::PutLat || ranks_per_node.len() > 1) {
            return Err(usage!(
                "--baselines is for put-lat between the ranks of one node: --ranks-per-node 2"
            ));
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
            baselines: args.baselines,
            ranks_per_node,
        })
    }

    pub fn most(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes).max().unwrap_or(0)
    }

    /// Room for a window, and in the pool for as much again.
    pub fn sizes(&self) -> ranks::Sizes {
        let symmetric = self.most() + (4 << 20);
        ranks::Sizes { heap: (symmetric + self.most() + (4 << 20)).next_multiple_of(2 << 20), symmetric }
    }

    fn memory(&self) -> RankMemory {
        // The bytes to put.
        let (heap, other) = (self.sizes().heap, self.most());
        RankMemory { heap, other, options: "--sizes or the number of ranks" }
    }
}

fn sizes(args: &PutBenchArgs, matrix: bool) -> Result<Vec<u64>, CliError> {
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

fn all_pairs(ranks_per_node: &[u32]) -> Result<Vec<(u32, u32)>, CliError> {
    let places = places(ranks_per_node).into_iter().filter(|place| place.local == 0);
    let first: Vec<u32> = places.map(|place| place.rank).collect();
    if first.len() == 1 {
        return Err(usage!("--pairs all is for two nodes or more"));
    }
    let pairs = first.iter().flat_map(|&from| first.iter().map(move |&to| (from, to)));
    Ok(pairs.filter(|(from, to)| from != to).collect())
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
    use crate::command_frame::tests::parsed;

    #[test]
    fn a_range_is_every_power_of_two_in_it() {
        assert_eq!("8..64".parse(), Ok(Sizes(vec![8, 16, 32, 64])));
        assert_eq!("5..40".parse(), Ok(Sizes(vec![8, 16, 32])));
        assert_eq!("2k..8K".parse(), Ok(Sizes(vec![2048, 4096, 8192])));
        assert_eq!("8..4M".parse::<Sizes>().unwrap().0.len(), 20);
        assert_eq!("1G..1G".parse(), Ok(Sizes(vec![1 << 30])));
    }

    #[test]
    fn a_list_is_taken_as_it_is() {
        assert_eq!("1000, 8,4M".parse(), Ok(Sizes(vec![1000, 8, 4 << 20])));
    }

    #[test]
    fn text_that_is_no_size_is_refused_by_name() {
        for text in ["", "8,", "x", "4KB", "KM", "8..", "-1", "1.5M", "K", "4KK", "8...64"] {
            let error = text.parse::<Sizes>().unwrap_err();
            assert!(error.contains("is no size"), "{text}: {error}");
        }
        for (text, bytes) in [("0", 0), ("0..8", 0), ("2G", 2u64 << 30), ("8,0", 0)] {
            assert_eq!(text.parse::<Sizes>(), Err(format!("sizes are from 1 byte to 1G, not {bytes}")));
        }
        for text in ["9..15", "64..8"] {
            assert_eq!(text.parse::<Sizes>(), Err(format!("no power of two lies in {text}")));
        }
    }

    fn resolve(line: &str) -> Task {
        Task::resolve(&parsed(line).unwrap()).unwrap()
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
            assert_eq!(resolve(line).pairs, [(0, peer)], "{line}");
        }
    }

    #[test]
    fn all_pairs_are_those_of_first_ranks_in_both_directions() {
        let task = resolve("put-bw --ranks-per-node 2,1,3 --pairs all");
        assert_eq!(task.pairs, [(0, 2), (0, 3), (2, 0), (2, 3), (3, 0), (3, 2)]);
        assert_eq!(task.runs.iter().map(|run| run.bytes).collect::<Vec<_>>(), [1 << 20]);
    }

    #[test]
    fn large_puts_are_fewer_unless_a_number_is_given() {
        let runs = resolve("put-lat --sizes 8,4M").runs;
        assert_eq!(runs[0], Run { bytes: 8, iterations: 1000, warmup: 100 });
        assert_eq!(runs[1], Run { bytes: 4 << 20, iterations: 64, warmup: 7 });
        let runs = resolve("put-bibw --sizes 8,4M --iterations 7 --warmup 0").runs;
        assert!(runs.iter().all(|run| (run.iterations, run.warmup) == (7, 0)));
        assert_eq!(resolve("signal").runs, [Run { bytes: 0, iterations: 1000, warmup: 100 }]);
    }
}
