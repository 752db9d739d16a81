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

use crate::command::Command;
use crate::error::CliError;
use crate::ranks;

pub use args::LayerArgs;

impl Command for LayerArgs {
    const NAME: &'static str = "layer";

    fn run(self) -> Result<ExitCode, CliError> {
        let task = Task::resolve(&self)?;
        self.machines.claim(self.json.iter().chain(&self.trace_out).chain(&self.svg))?;
        ranks::start(Self::NAME, &task.shape.ranks_per_node, &self.machines, &task, task.variables())
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        rank::main(&ranks::task(task)?)
    }
}
