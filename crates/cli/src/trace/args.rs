//! The command line of `trace`, and what the ranks learn from it.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::bench::{ConditionArgs, Config, sizes};
use crate::error::CliError;
use crate::ranks;
use crate::ranks::Sizes;

/// Record a dispatch and a combine of all ranks as a timeline that opens in Perfetto
#[derive(Args)]
pub struct TraceArgs {
    #[command(flatten)]
    pub conditions: ConditionArgs,

    /// Write the timeline as a Chrome trace, on the machine of rank 0: open it in https://ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,

    /// Draw the timeline as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Write the sums of each rank as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Everything a rank needs to know, and every rank the same.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    pub config: Config,
    pub out: PathBuf,
    pub svg: Option<PathBuf>,
    pub json: Option<PathBuf>,
    pub sizes: Sizes,
}

impl Task {
    /// From the command line. One round is recorded.
    pub fn resolve(args: &TraceArgs) -> Result<Self, CliError> {
        let config = Config::resolve(&args.conditions, false, Some(1))?;
        let sizes = sizes(&config)?;
        Ok(Task { config, out: args.out.clone(), svg: args.svg.clone(), json: args.json.clone(), sizes })
    }

    /// What all ranks must have in common. Only rank 0 writes files.
    pub fn conditions(&self) -> Result<String, CliError> {
        Ok(ranks::conditions("trace", &self.config.conditions()?))
    }
}
