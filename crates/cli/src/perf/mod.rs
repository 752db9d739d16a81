//! `sidelane perf`: latency and bandwidth between two ranks, over the one-sided face alone.
//!
//! What a dispatch is made of, one thing at a time, in the tables that users of perftest know. Nothing here knows a lane:
//! what is measured is what a program sees that calls [`Window`](sidelane::Window), a wait that falls asleep included.
//!
//! ```text
//!   rank a ----- put, signal ----> rank b      a pair has a group and a window of its own
//!          <---- put, signal -----
//!   all others: in a gather, asleep on a socket, until the figures of this pair and size come round
//! ```

mod args;
mod measure;
mod pattern;
mod plot;
mod rank;
mod report;
mod sizes;
mod table;
mod task;
mod turns;
mod ucx;

use std::process::ExitCode;

use task::Task;

use crate::error::CliError;
use crate::ranks::{self, RankArgs};

pub use args::PerfArgs;
pub use sizes::{Bytes, Sizes};

/// Starts the ranks and waits for what rank 0 reports.
pub fn main(args: &PerfArgs) -> Result<ExitCode, CliError> {
    let task = Task::resolve(args)?;
    args.machines.claim(args.json.iter().chain(&args.svg))?;
    ranks::start("perf-rank", &task.ranks_per_node, &args.machines, &task)
}

/// Runs one rank.
pub fn rank(args: &RankArgs) -> Result<ExitCode, CliError> {
    rank::main(&args.task()?)
}
