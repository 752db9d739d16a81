//! The command line of `collectives`.

use std::path::PathBuf;

use clap::Args;

use super::operation::Operation;
use crate::launch::MachineArgs;
use crate::options::NodeArgs;
use crate::perf::Sizes;

/// Time all-reduce, broadcast, all-to-all, all-gather and reduce-scatter between processes, verified
#[derive(Args)]
pub struct CollectivesArgs {
    /// What to measure: a list [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "OPERATION,..")]
    pub operations: Vec<Operation>,

    /// Bytes of the larger tensor of a rank: a list, or all powers of two in a range; suffixes K, M, G [default: 4K,16M]
    #[arg(long, value_name = "SIZE,..|FROM..TO")]
    pub sizes: Option<Sizes>,

    #[command(flatten)]
    pub nodes: NodeArgs<1, 8>,

    /// Rounds to time [default: by size, 15 to 200]
    #[arg(long, value_name = "N")]
    pub rounds: Option<u32>,

    /// Take turns with Open MPI and torch's gloo, if they are installed, on one machine
    #[arg(long, conflicts_with = "master")]
    pub peers: bool,

    /// Write the report as JSON, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    #[command(flatten)]
    pub machines: MachineArgs,
}
