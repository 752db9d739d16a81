//! The command line of `layer`.

use std::path::PathBuf;

use clap::Args;

use super::pace::PaceArg;
use crate::launch::MachineArgs;
use crate::options::NodeArgs;

const EXAMPLES: &str = "\
Examples:
  sidelane layer                                      # two ranks, a link as fast as the experts
  sidelane layer --pace 1G/10 --backward              # 1 GiB/s, 10 us
  sidelane layer --pace none --nodes 1 --ranks-per-node 2";

/// Time a MoE layer with its transfers in turn with the experts and beside them, and how much of them hides
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct LayerArgs {
    #[command(flatten)]
    pub nodes: NodeArgs<2, 1>,

    /// Tokens of each rank
    #[arg(long, value_name = "T", default_value_t = 4096)]
    pub tokens: u32,

    /// Elements of a row, of bf16
    #[arg(long, value_name = "H", default_value_t = 512)]
    pub hidden: u32,

    /// Width of an expert
    #[arg(long, value_name = "F", default_value_t = 512)]
    pub ffn: u32,

    /// Number of experts
    #[arg(long, value_name = "E", default_value_t = 16)]
    pub experts: u32,

    /// Experts that each token chooses
    #[arg(long, value_name = "K", default_value_t = 4)]
    pub top_k: u32,

    /// Into how many chunks tokens are cut
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub chunks: u32,

    /// Transfers under way at once [default: 2, or 1 where there is but one chunk]
    #[arg(long, value_name = "N")]
    pub transfers: Option<u32>,

    /// The link between nodes of one machine: `even` (as fast as the experts), `none` (copies), or bytes per second, a slash
    /// and microseconds
    #[arg(long, value_name = "even|none|RATE/US", default_value = "even")]
    pub pace: PaceArg,

    /// Time gradients as well
    #[arg(long)]
    pub backward: bool,

    /// Rounds to time
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,

    /// Draws tokens and weights
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Write the report as JSON, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Write one overlapped step as a Chrome trace, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub trace_out: Option<PathBuf>,

    /// Draw one overlapped step as a picture, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    #[command(flatten)]
    pub machines: MachineArgs,
}
