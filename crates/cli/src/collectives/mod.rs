//! `sidelane collectives`: all-reduce, broadcast, all-to-all, all-gather and reduce-scatter between real processes, checked, and
//! beside others who do the same. An all-to-all is measured twice: copied to the caller, and read where it lands.
//!
//! Elements are small whole numbers in f32, so sums are exact in any order, and whoever is right has the same bits.
//!
//! ```text
//!   for each size and operation:  check ours | w: theirs, compared by each rank | rounds: ours, MPI's, gloo's, ours, ...
//! ```

mod args;
mod operation;
mod rank;
mod report;
mod rivals;
mod task;

use std::process::ExitCode;

use task::Task;

use crate::bench::peers::Folder;
use crate::error::CliError;
use crate::ranks::{self, RankArgs};

pub use args::CollectivesArgs;

/// Starts the ranks and waits for what rank 0 reports.
pub fn main(args: &CollectivesArgs) -> Result<ExitCode, CliError> {
    let mut task = Task::resolve(args)?;
    args.machines.claim(&args.json)?;
    // Ranks may be killed: the folder is held here, where Ctrl-C is waited for.
    let folder = args.peers.then(Folder::make).transpose()?;
    task.peers = folder.as_ref().map(|folder| folder.path().to_owned());
    ranks::start("collectives-rank", &task.ranks_per_node, &args.machines, &task)
}

/// Runs one rank.
pub fn rank(args: &RankArgs) -> Result<ExitCode, CliError> {
    rank::main(&args.task()?)
}
