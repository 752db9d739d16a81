//! `sidelane bench`: dispatch and combine between real processes, checked bit by bit and held against a floor.
//!
//! A figure without its conditions is worth nothing, so everything that decides it is resolved once
//! ([`config::Config`]), handed to every rank, and printed with the result ([`report::Report`]). The floor is
//! measured round by round beside the real thing, so that both see the same machine ([`stats`]).
//!
//! ```text
//!   bench --> Task --launch--> rank 0 .. n-1:  dispatch, check | combine, check | rounds: real, floor, real, ... | check
//!                                  |
//!                                rank 0: table, JSON, trace
//! ```

mod args;
mod clock;
mod config;
mod passes;
mod progress;
mod rank;
mod recording;
mod report;
mod source;
mod stats;
mod table;
mod task;
mod tensor;
mod verify;

pub use args::BenchArgs;
pub use config::ConfigError;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use crate::error::CliError;
use crate::launch::Job;
use source::Source;
use task::Task;

/// Starts the ranks of a measurement and waits for rank 0's report.
pub fn main(args: &BenchArgs) -> Result<ExitCode, CliError> {
    let task = Task::resolve(args)?;
    if args.routing.is_none() && task.config.routing != Source::Recorded {
        let (experts, top_k) = (recording::EXPERTS, recording::TOP_K);
        eprintln!(
            "sidelane: routing is {}: the recorded one has {experts} experts, top-{top_k}",
            task.config.routing
        );
    }
    let program =
        std::env::current_exe().map_err(|source| CliError::Prepare { what: "find this program", source })?;
    let json = serde_json::to_string(&task).expect("numbers, names and paths are always JSON");
    let job = Job {
        nodes: task.config.ranks_per_node.clone(),
        command: vec![program.into(), "bench-rank".into(), json.into()],
        env: Vec::new(),
        grace: Duration::from_secs(5),
        tag: false,
    };
    Ok(ExitCode::from(job.run()?.exit_code()))
}

/// One rank of a measurement (started by `bench`).
#[derive(Args)]
pub struct RankArgs {
    /// What to measure, as JSON
    task: String,
}

/// Runs one rank.
pub fn rank(args: &RankArgs) -> Result<ExitCode, CliError> {
    let task: Task = serde_json::from_str(&args.task).map_err(CliError::Task)?;
    rank::main(&task)
}
