//! The command line of `gpu-check`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::task::{CASE_SECONDS, Part};

const EXAMPLES: &str = "\
Examples:
  scp target/release/sidelane gpu-machine:                     # the program is all it takes
  ssh gpu-machine ./sidelane gpu-check --json gpu-check.json
  sidelane gpu-check --quick --minutes 10                      # the first ten minutes
  sidelane gpu-check --part locks,queues                       # two parts alone";

/// Check what one GPU does for Sidelane, audit that transfers need no SM, and measure what they cost
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct GpuCheckArgs {
    /// The device, in the driver's order
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,

    /// Fewer rounds and smaller exchanges: a minute in place of several
    #[arg(long)]
    pub quick: bool,

    /// Run these parts alone; several by commas, or by the option again [default: all, in this
    /// order]
    #[arg(long = "part", value_name = "NAME", value_delimiter = ',', value_parser = parts())]
    pub parts: Vec<Part>,

    /// Begin no part behind so many minutes, and end the one that runs: what is left is skipped
    #[arg(long, value_name = "N", value_parser = minutes)]
    pub minutes: Option<f64>,

    /// What one case of the parts locks and queues may stand still before it counts as held up, in
    /// seconds
    #[arg(long, value_name = "N", default_value_t = CASE_SECONDS, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub case_seconds: u64,

    /// Rows and columns of the matrix products, a multiple of 128 [default: 8192, or what half of the free memory holds]
    #[arg(long, value_name = "N", value_parser = size)]
    pub size: Option<u32>,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

fn parts() -> impl TypedValueParser<Value = Part> {
    PossibleValuesParser::new(Part::ALL.map(Part::name))
        .map(|name| Part::named(&name).expect("a possible value is a part's name"))
}

fn minutes(text: &str) -> Result<f64, String> {
    let minutes: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if minutes > 0.0 && minutes <= 1440.0 {
        Ok(minutes)
    } else {
        Err("not above 0 and up to 1440".to_owned())
    }
}

fn size(text: &str) -> Result<u32, String> {
    let size: u32 = text.parse().map_err(|_| "not a number".to_owned())?;
    if size == 0 || size > 1 << 16 || !size.is_multiple_of(sidelane::device::TILE) {
        return Err("not a multiple of 128 up to 65536".to_owned());
    }
    Ok(size)
}
