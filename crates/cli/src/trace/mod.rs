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

use crate::command::Command;
use crate::error::CliError;
use crate::ranks;

pub use args::TraceArgs;

impl Command for TraceArgs {
    const NAME: &'static str = "trace";

    fn run(self) -> Result<ExitCode, CliError> {
        let task = Task::resolve(&self)?;
        let machines = &self.conditions.machines;
        machines.claim([&self.out].into_iter().chain(&self.svg).chain(&self.json))?;
        ranks::start(Self::NAME, &task.config.ranks_per_node, machines, &task, Vec::new())
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        rank::main(&ranks::task(task)?)
    }
}
