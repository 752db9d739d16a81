//! The command line of `gpu-check`.

use std::path::PathBuf;

use clap::Args;

const EXAMPLES: &str = "\
Examples:
  scp target/release/sidelane gpu-machine:                     # the program is all it takes
  ssh gpu-machine ./sidelane gpu-check --json gpu-check.json";

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

    /// Rows and columns of the matrix products, a multiple of 128 [default: 8192, or what half of the free memory holds]
    #[arg(long, value_name = "N", value_parser = size)]
    pub size: Option<u32>,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

fn size(text: &str) -> Result<u32, String> {
    let size: u32 = text.parse().map_err(|_| "not a number".to_owned())?;
    if size == 0 || size > 1 << 16 || !size.is_multiple_of(sidelane::device::TILE) {
        return Err("not a multiple of 128 up to 65536".to_owned());
    }
    Ok(size)
}
