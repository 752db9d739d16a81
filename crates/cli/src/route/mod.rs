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

use crate::error::CliError;
use crate::output;

pub use args::RouteArgs;

/// Looks at the routing and says what it sees.
pub fn main(args: &RouteArgs) -> Result<ExitCode, CliError> {
    let task = Task::resolve(args)?;
    output::claim(args.json.iter().chain(&args.svg))?;
    let report = Report::new(&task)?;
    output::print(&report.text())?;
    if let Some(path) = &args.json {
        output::write(path, &(report.json() + "\n"))?;
    }
    if let Some(path) = &args.svg {
        output::write(path, &picture::draw(&report, &task.map, &task.curves()?))?;
    }
    Ok(ExitCode::SUCCESS)
}
