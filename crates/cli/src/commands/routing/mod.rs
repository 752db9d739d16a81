//! `sidelane routing`: load of experts, ranks and nodes by a router's decisions, and the cost of a
//! capacity.
//!
//! No rank is started and no row is moved: everything here follows from the decisions alone.
//!
//! ```text
//!   decisions --> Loads   choices per expert, rank, node; ranks and nodes per token      bars, table
//!            \--> Drops   what each way of dropping loses, factor by factor              table, curves
//! ```

mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use report::Report;
use sidelane::gate::Pattern;
use sidelane_model::Dropped;

use crate::command_frame::{self, Command};
use crate::error::CliError;
use crate::options::{JsonFile, RoutedArgs};
use crate::routing_source::{Decided, Source};

const EXAMPLES: &str = "\
Examples:
  sidelane routing --svg routing.svg                      # the recorded router
  sidelane routing zipf:1.2 --experts 256 --top-k 8 --factors 1,1.25,2";

/// Show how a router loads experts, ranks and nodes, and how many choices a capacity would drop
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct RoutingArgs {
    #[command(flatten)]
    pub routed: RoutedArgs<2, 4, 512>,

    /// Draw zipf:1.0
    #[arg(long, conflicts_with = "routing")]
    pub random: bool,

    /// Capacity factors of the table; each rank's tokens have a capacity of their own
    #[arg(long, value_name = "F[,F..]", value_delimiter = ',', default_values_t = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0],
          allow_negative_numbers = true)]
    pub factors: Vec<f64>,

    /// Draw load and losses as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    #[command(flatten)]
    pub report: JsonFile,
}

impl Command for RoutingArgs {
    const NAME: &'static str = "routing";

    fn run(self) -> Result<ExitCode, CliError> {
        let decided = self.decide()?;
        command_frame::claim(&self.report.json, &self.svg)?;
        let report = Report::new(&decided, &self.factors)?;
        if self.svg.is_some() {
            let curves = dropped(&decided, &curve_factors())?;
            command_frame::draw(&self.svg, || report::draw(&report, &decided.map, &curves))?;
        }
        command_frame::finish(&report, &self.report.json)
    }
}

impl RoutingArgs {
    fn decide(&self) -> Result<Decided, CliError> {
        // Expert and weight of a choice, and its place in the order of a drop policy.
        const CHOICE_BYTES: u64 = 24;
        self.routed.decide(self.random.then_some(Source::Pattern(Pattern::Zipf(1.0))), CHOICE_BYTES)
    }
}

fn curve_factors() -> Vec<f64> {
    (4..=64).map(|sixteenths| f64::from(sixteenths) / 16.0).collect()
}

fn dropped(decided: &Decided, factors: &[f64]) -> Result<Vec<Dropped>, CliError> {
    let Decided { conditions, routings, .. } = decided;
    factors.iter().map(|&factor| Ok(Dropped::at(factor, conditions.experts, routings)?)).collect()
}
