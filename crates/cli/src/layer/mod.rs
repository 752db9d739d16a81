//! `sidelane layer`: a whole MoE layer between real processes, transfers in turn with compute and beside it.
//!
//! What hides is seen where transfers cost time and no core: on wires that keep the time of a slower link
//! ([`Pace`](sidelane::config::Pace)). Unless told otherwise, the link takes as long as the experts: then overlap saves half of the time at
//! most.
//!
//! ```text
//!   layer --> Task --launch--> rank 0 .. n-1:  check | rounds: transfers alone, in turn, overlapped, ... | trace
//!                                 |
//!                               rank 0: table, JSON, trace, picture
//! ```

mod args;
mod pace;
mod picture;
mod rank;
mod report;
mod task;
mod watched;

use std::process::ExitCode;

use task::Task;

use crate::error::CliError;
use crate::ranks::{self, RankArgs};

pub use args::LayerArgs;

/// Starts the ranks and waits for what rank 0 reports.
pub fn main(args: &LayerArgs) -> Result<ExitCode, CliError> {
    let task = Task::resolve(args)?;
    args.machines.claim(args.json.iter().chain(&args.trace_out).chain(&args.svg))?;
    ranks::start_with("layer-rank", &task.shape.ranks_per_node, &args.machines, &task, task.variables())
}

/// Runs one rank.
pub fn rank(args: &RankArgs) -> Result<ExitCode, CliError> {
    rank::main(&args.task()?)
}
