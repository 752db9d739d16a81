//! `sidelane route`: what a router's decisions ask of experts, ranks and nodes, and what a capacity would cost.
//!
//! No rank is started and no row is moved: everything here follows from the decisions alone.
//!
//! ```text
//!   decisions --> Loads   choices per expert, rank, node; ranks and nodes per token      bars, table
//!            \--> Drops   what each way of dropping loses, factor by factor              table, curves
//! ```

mod args;
mod bars;
mod drops;
mod loads;
mod picture;
mod report;
mod task;

use std::process::ExitCode;

use report::Report;
use task::Task;

use crate::command::{self, Command};
use crate::error::CliError;

pub use args::RouteArgs;

impl Command for RouteArgs {
    const NAME: &'static str = "route";

    fn run(self) -> Result<ExitCode, CliError> {
        let task = Task::resolve(&self)?;
        command::claim(self.json.iter().chain(&self.svg))?;
        let report = Report::new(&task)?;
        if self.svg.is_some() {
            let curves = task.curves()?;
            command::draw(&self.svg, || picture::draw(&report, &task.map, &curves))?;
        }
        command::finish(&report, &self.json)
    }
}
