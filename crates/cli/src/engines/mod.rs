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

use crate::error::CliError;
use crate::output;

pub use args::EnginesArgs;

/// Counts, and says what it counted.
pub fn main(args: &EnginesArgs) -> Result<ExitCode, CliError> {
    output::claim(&args.json)?;
    let report = Report::new(&Task::resolve(args)?)?;
    output::print(&report.text())?;
    if let Some(path) = &args.json {
        output::write(path, &(report.json() + "\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
