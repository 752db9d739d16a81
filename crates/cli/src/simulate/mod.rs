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

use crate::command::{self, Command};
use crate::error::CliError;

pub use args::SimulateArgs;

impl Command for SimulateArgs {
    const NAME: &'static str = "simulate";

    /// Measures the machine if asked to, or times.
    fn run(self) -> Result<ExitCode, CliError> {
        command::claim(self.json.iter().chain(&self.svg).chain(&self.calibrate))?;
        if self.calibrate.is_some() {
            let hardware = calibrate::measure()?;
            let figures = serde_json::to_string_pretty(&hardware).expect("numbers and names are always JSON");
            command::draw(&self.calibrate, || {
                figures
                    + "
"
            })?;
            command::print(&calibrate::words_of(&hardware))?;
            return Ok(ExitCode::SUCCESS);
        }
        let report = Report::new(&Task::resolve(&self)?)?;
        command::draw(&self.svg, || picture::draw(&report))?;
        command::finish(&report, &self.json)
    }
}
