//! The command line of `route`.

use std::path::PathBuf;

use clap::Args;

use crate::options::{NodeArgs, RouterArgs};
use crate::routing::Source;

/// Show how a router loads experts, ranks and nodes, and what it would lose to a capacity
#[derive(Args)]
pub struct RouteArgs {
    /// recorded (a trained router's decisions, 64 experts, top-8), uniform, zipf:S, incast, or a file of JSON lines
    /// with topk_ids and topk_weights [default: recorded; zipf:1.0 if --experts or --top-k differ from it]
    #[arg(value_name = "recorded|PATTERN|FILE")]
    pub routing: Option<Source>,

    /// Draw zipf:1.0
    #[arg(long, conflicts_with = "routing")]
    pub random: bool,

    #[command(flatten)]
    pub nodes: NodeArgs<2, 4>,

    #[command(flatten)]
    pub router: RouterArgs<512>,

    /// Capacity factors of the table; each rank's tokens have a capacity of their own
    #[arg(long, value_name = "F[,F..]", value_delimiter = ',', default_values_t = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0],
          allow_negative_numbers = true)]
    pub factors: Vec<f64>,

    /// Draw load and losses as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
