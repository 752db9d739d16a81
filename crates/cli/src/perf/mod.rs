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

use crate::command::Command;
use crate::error::CliError;
use crate::ranks;

pub use args::PerfArgs;
pub use sizes::{Bytes, Sizes};

impl Command for PerfArgs {
    const NAME: &'static str = "perf";

    fn run(self) -> Result<ExitCode, CliError> {
        let task = Task::resolve(&self)?;
        self.machines.claim(self.json.iter().chain(&self.svg))?;
        ranks::start(Self::NAME, &task.ranks_per_node, &self.machines, &task, Vec::new())
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        rank::main(&ranks::task(task)?)
    }
}
