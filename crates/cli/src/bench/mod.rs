//! `sidelane bench`: dispatch and combine between real processes, checked bit by bit and held against a floor.
//!
//! A figure without its conditions is worth nothing, so everything that decides it is resolved once
//! ([`config::Config`]), handed to every rank, and printed with the result ([`report::Report`]). The floor is
//! measured round by round beside the real thing, so that both see the same machine ([`stats`](crate::stats)).
//!
//! ```text
//!   bench --> Task --launch--> rank 0 .. n-1:  dispatch, check | combine, check | rounds: real, floor, real, ... | check
//!                                  |
//!                                rank 0: table, JSON, trace
//! ```
//!
//! The ranks of `sidelane trace` are started in the same way and make the same calls, on the same [`Layer`].

mod args;
mod cards;
mod clock;
mod config;
mod crossing;
mod layer;
mod passes;
pub mod peers;
mod placement;
mod rank;
mod recording;
mod report;
mod room;
mod row_type;
mod table;
mod task;
mod tensor;
mod verify;
mod words;

use std::process::ExitCode;

use peers::Folder;
use task::Task;

use crate::error::CliError;
use crate::ranks::{self, RankArgs};

pub use args::{BenchArgs, ConditionArgs, one_of};
pub use clock::Laps;
pub use config::Config;
pub use layer::{Layer, Verdict};
pub use recording::{CALLS, EVENTS, record, share, write_trace};
pub use row_type::RowType;
pub use task::sizes;
pub use tensor::Number;
pub use words::Words;

#[cfg(test)]
pub use report::tests::sample;

/// Starts the ranks of a measurement and waits for rank 0's report.
pub fn main(args: &BenchArgs) -> Result<ExitCode, CliError> {
    let mut task = Task::resolve(args)?;
    args.conditions.machines.claim(args.json.iter().chain(&args.trace_out))?;
    // Ranks may be killed: the folder is held here, where Ctrl-C is waited for.
    let folder = args.peers.then(Folder::make).transpose()?;
    task.peers = folder.as_ref().map(|folder| folder.path().to_owned());
    task.config.routing.say_if_drawn(args.conditions.routing.as_ref());
    ranks::start("bench-rank", &task.config.ranks_per_node, &args.conditions.machines, &task)
}

/// Runs one rank.
pub fn rank(args: &RankArgs) -> Result<ExitCode, CliError> {
    rank::main(&args.task()?)
}
