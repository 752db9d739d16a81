//! `sidelane engines`: what a dispatch asks of copy engines, way by way, counted from the schedules that would run.
//!
//! No rank is started and no row is moved. Times are arithmetic: a price per copy and a speed, which the command line names.
//!
//! ```text
//!   decisions of all ranks --> Plan   layouts, blocks in the order of tokens or of relays
//!                                \--> EngineWork of every rank --> mean, most, time
//! ```

mod args;
mod plan;
mod report;
mod task;
mod ways;

use std::process::ExitCode;

use report::Report;
use task::Task;

use crate::command::{self, Command};
use crate::error::CliError;

pub use args::EnginesArgs;

impl Command for EnginesArgs {
    const NAME: &'static str = "engines";

    fn run(self) -> Result<ExitCode, CliError> {
        command::claim(&self.json)?;
        command::finish(&Report::new(&Task::resolve(&self)?)?, &self.json)
    }
}
