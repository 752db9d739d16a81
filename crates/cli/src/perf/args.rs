//! The command line of `perf`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::sizes::Sizes;
use crate::launch::MachineArgs;
use crate::options::NodeArgs;

/// What is measured.
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
    Exchange,
}

/// Several pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pairs {
    /// The first ranks of every two nodes, one pair after the other, in both directions
    All,
}

const EXAMPLES: &str = "\
Examples:
  sidelane perf put-lat                                  # two nodes of one rank
  sidelane perf put-bw --nodes 1 --ranks-per-node 2      # within a node
  sidelane perf put-bw --nodes 4 --pairs all             # a matrix
  sidelane perf put-lat --master node0 --node-rank 0     # between machines; on the other one: --node-rank 1";

/// Measure latency and bandwidth of puts and signals between ranks
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct PerfArgs {
    /// What to measure
    #[arg(value_enum)]
    pub test: Test,

    /// Bytes of a put: a list, or all powers of two in a range; suffixes K, M, G
    /// [default: 8..4M; with --pairs all 8 for put-lat, otherwise 1M]
    #[arg(long, value_name = "SIZE,..|FROM..TO")]
    pub sizes: Option<Sizes>,

    /// The rank that rank 0 is measured with [default: the first one of node 1, or rank 1 if there is only one node]
    #[arg(long, value_name = "RANK")]
    pub peer: Option<u32>,

    /// Measure several pairs, and print a matrix
    #[arg(long, value_enum, conflicts_with_all = ["peer", "svg"])]
    pub pairs: Option<Pairs>,

    /// Take turns with ucx_perftest, if it is installed: put-lat between two ranks of one node
    #[arg(long, conflicts_with_all = ["master", "pairs", "nodes", "peer"])]
    pub peers: bool,

    #[command(flatten)]
    pub nodes: NodeArgs<2, 1>,

    /// Round trips, or puts in each direction, that are timed for each size [default: by size, at most 1000 or 5000]
    #[arg(long, value_name = "N")]
    pub iterations: Option<u32>,

    /// As many before them that are not [default: a tenth]
    #[arg(long, value_name = "N")]
    pub warmup: Option<u32>,

    /// Write the report as JSON, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Draw the figures by size, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    #[command(flatten)]
    pub machines: MachineArgs,
}

impl Test {
    /// The word of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Test::PutLat => "put-lat",
            Test::PutBw => "put-bw",
            Test::Signal => "signal",
            Test::Exchange => "exchange",
        }
    }

    /// What it is.
    pub fn title(self) -> &'static str {
        match self {
            Test::PutLat => "half the round trip of a put with its signal",
            Test::PutBw => "a stream of puts",
            Test::Signal => "half the round trip of a signal",
            Test::Exchange => "streams of puts in both directions at once",
        }
    }

    /// Whether single round trips are timed; otherwise streams are.
    pub fn is_latency(self) -> bool {
        matches!(self, Test::PutLat | Test::Signal)
    }
}
