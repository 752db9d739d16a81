//! `sidelane simulate`: how long a dispatch and a combine would take on a machine that is described, by the schedules that
//! would run there (`sidelane_model::time`).
//!
//! ```text
//!   model, routing, ranks --> Placed for each way --\
//!                                                    +--> Timing: table, JSON, picture by number of ranks
//!   hardware: a name, a file, or --calibrate --------/
//! ```

mod args;
mod calibrate;
mod layer;
mod model;
mod picture;
mod report;
mod task;
mod ways;

use std::process::ExitCode;

use report::Report;
use task::Task;

use crate::error::CliError;
use crate::output;

pub use args::SimulateArgs;

/// Measures the machine if asked to, and times.
pub fn main(args: &SimulateArgs) -> Result<ExitCode, CliError> {
    output::claim(args.json.iter().chain(&args.svg).chain(&args.calibrate))?;
    if let Some(path) = &args.calibrate {
        let hardware = calibrate::measure()?;
        let figures = serde_json::to_string_pretty(&hardware).expect("numbers and names are always JSON");
        output::write(path, &(figures + "\n"))?;
        output::print(&calibrate::words_of(&hardware))?;
        return Ok(ExitCode::SUCCESS);
    }
    let report = Report::new(&Task::resolve(args)?)?;
    output::print(&report.text())?;
    if let Some(path) = &args.json {
        output::write(path, &(report.json() + "\n"))?;
    }
    if let Some(path) = &args.svg {
        output::write(path, &picture::draw(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}
