//! The command line of `engines`.

use std::path::PathBuf;

use clap::Args;

use crate::bench::RowType;
use crate::options::{NodeArgs, RouterArgs};
use crate::routing::Source;

/// Count what a dispatch asks of copy engines: copies, bytes and memory operations, and a time by arithmetic
#[derive(Args)]
pub struct EnginesArgs {
    /// recorded (a trained router's decisions, 64 experts, top-8), uniform, zipf:S, incast, or a file of JSON lines
    /// with topk_ids and topk_weights [default: recorded; zipf:1.0 if --experts or --top-k differ from it]
    #[arg(value_name = "recorded|PATTERN|FILE")]
    pub routing: Option<Source>,

    #[command(flatten)]
    pub nodes: NodeArgs<2, 8>,

    #[command(flatten)]
    pub router: RouterArgs<4096>,

    /// Elements of a row
    #[arg(long, value_name = "H", default_value_t = 7168)]
    pub hidden: u32,

    /// Type of an element
    #[arg(long, value_enum, default_value_t = RowType::Bf16)]
    pub dtype: RowType,

    /// Price of a copy in microseconds, however small; by default what was published of an H100
    #[arg(long, value_name = "US", default_value_t = 2.3, value_parser = positive)]
    pub per_copy: f64,

    /// Speed of a long copy in GB/s; by default what was published of NVLink on an H100
    #[arg(long, value_name = "GB/S", default_value_t = 380.0, value_parser = positive)]
    pub speed: f64,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        Ok(_) => Err("a number above 0".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
