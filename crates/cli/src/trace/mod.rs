//! `sidelane trace`: a dispatch and a combine of all ranks, operation by operation.
//!
//! The ranks are those of `bench`: processes that make the same calls on the same conditions. Each hands over what its
//! recorder saw, and rank 0 writes it for three kinds of reading:
//!
//! ```text
//!   trace --> Task --launch--> rank 0 .. n-1:  dispatch, check | combine, check | record rounds | check
//!                                  |
//!                                rank 0: Chrome trace (every operation), picture (at a glance), table and JSON (sums)
//! ```

mod args;
mod picture;
mod rank;
mod report;

use std::process::ExitCode;

use args::Task;

use crate::error::CliError;
use crate::ranks::{self, RankArgs};

pub use args::TraceArgs;

/// Starts the ranks and waits for what rank 0 writes.
pub fn main(args: &TraceArgs) -> Result<ExitCode, CliError> {
    let task = Task::resolve(args)?;
    let files = [&args.out].into_iter().chain(&args.svg).chain(&args.json);
    args.conditions.machines.claim(files)?;
    ranks::start("trace-rank", &task.config.ranks_per_node, &args.conditions.machines, &task)
}

/// Runs one rank.
pub fn rank(args: &RankArgs) -> Result<ExitCode, CliError> {
    rank::main(&args.task()?)
}
