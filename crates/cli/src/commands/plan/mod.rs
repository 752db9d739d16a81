//! `sidelane plan`: the mesh that trains a model fastest on a number of devices, by rooflines
//! (`sidelane_model::parallel`).
//!
//! ```text
//!   model: a name or a configuration --\
//!   hardware: a name or a file ---------+--> Question --> the fastest meshes that fit: table, JSON
//!   devices, tokens, sequence ---------/                  the same by tokens: picture
//! ```

mod picture;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use report::Report;
use sidelane_model::parallel::{
    Candidate, Devices, Fixed, FoundMeshes, NoPeaks, Overlap, Precision, Question, SearchError, Transformer,
};

use crate::command_frame::{self, Command};
use crate::error::{CliError, usage};
use crate::options::{JsonFile, Scaled, hardware_or, known_or_file, one_of};
use crate::table::volume;

const EXAMPLES: &str = "\
Examples:
  sidelane plan --model deepseek-v3 --devices 256 --tokens 4M --svg plan.svg
  sidelane plan --model llama-2-13b --hardware tpu-v5p --devices 512 --tokens 3M
  sidelane plan --model config.json --devices 64 --tp 8 # one dimension given";

/// Find the meshes that train a model fastest on a number of devices, by rooflines, and the part of
/// a step that binds
#[derive(Args, Clone)]
#[command(after_help = EXAMPLES)]
pub struct PlanArgs {
    /// A model that is known (llama-2-13b, llama-3-70b, mixtral-8x7b, olmoe-1b-7b, qwen3-30b-a3b,
    /// qwen3-235b-a22b, deepseek-v3), or a config.json in the style of HuggingFace
    #[arg(long, value_name = "NAME|FILE", default_value = "deepseek-v3")]
    pub model: String,

    /// A machine that is known (h100-cx7, h100-cx7-cliff, h200-cx7, h800-400g, tpu-v5p), or a file
    /// as for `simulate`, with `peaks`
    #[arg(long, value_name = "NAME|FILE", default_value = "h100-cx7")]
    pub hardware: String,

    /// Number of devices
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=MOST_DEVICES))]
    pub devices: u32,

    /// Devices of each node [default: 8; of tpu-v5p a pod of 8960]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=MOST_DEVICES))]
    pub ranks_per_node: Option<u32>,

    /// Tokens of a step, of all devices; suffixes K, M, G
    #[arg(long, value_name = "T", default_value = "4M")]
    pub tokens: Scaled,

    /// Tokens of a sequence
    #[arg(long, value_name = "S", default_value = "4K")]
    pub sequence: Scaled,

    /// Bytes of a parameter: mixed (bf16, with gradients, master copy and Adam in f32: 18), book
    /// (bf16 with Adam in f32, gradients not held: 10), f32 (16)
    #[arg(long, default_value = "mixed", value_parser = one_of(Precision::ALL, |of: Precision| of.name))]
    pub precision: Precision,

    /// Repeat the forward pass in the backward pass, and keep inputs of layers alone
    #[arg(long)]
    pub recompute: bool,

    /// Transfers that run next to the compute: none, those of data parallelism, or all
    #[arg(long, default_value = "data", value_parser = one_of(Overlap::ALL, Overlap::name))]
    pub overlap: Overlap,

    /// TFLOP/s of products [default: the peak of the hardware]
    #[arg(long, value_name = "X", value_parser = clap::value_parser!(u32).range(1..))]
    pub tflops: Option<u32>,

    /// Pipeline stages [default: any]
    #[arg(long, value_name = "N")]
    pub pp: Option<u32>,

    /// Data parallel ranks [default: any]
    #[arg(long, value_name = "N")]
    pub dp: Option<u32>,

    /// Context parallel ranks [default: any]
    #[arg(long, value_name = "N")]
    pub cp: Option<u32>,

    /// Tensor parallel ranks [default: any]
    #[arg(long, value_name = "N")]
    pub tp: Option<u32>,

    /// Expert parallel ranks [default: any]
    #[arg(long, value_name = "N")]
    pub ep: Option<u32>,

    /// Meshes that are shown
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub top: u32,

    #[command(flatten)]
    pub report: JsonFile,

    /// Draw time by tokens, with the part that binds
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Shapes of more are too many to look at.
const MOST_DEVICES: i64 = 1 << 17;
/// Devices of a node, as in all machines that are known but the torus.
const PER_NODE: u32 = 8;

impl Command for PlanArgs {
    const NAME: &'static str = "plan";

    fn run(self) -> Result<ExitCode, CliError> {
        command_frame::claim(&self.report.json, &self.svg)?;
        let question = self.question()?;
        let report = Report::new(&question, self.fitting(&question)?, self.top);
        if self.svg.is_some() {
            let picture = picture::draw(&question)?;
            command_frame::draw(&self.svg, || picture)?;
        }
        command_frame::finish(&report, &self.report.json)
    }
}

impl PlanArgs {
    pub fn question(&self) -> Result<Question, CliError> {
        let sequence = u32::try_from(self.sequence.0).unwrap_or(u32::MAX);
        let (mut devices, hardware) = match self.hardware == Devices::TPU_V5P {
            true => (Devices::tpu_v5p(), None),
            false => {
                let hardware = hardware_or(&self.hardware, &[Devices::TPU_V5P])?;
                hardware.check()?;
                (Devices::of(&hardware, self.ranks_per_node.unwrap_or(PER_NODE))?, Some(hardware))
            }
        };
        devices.per_node = self.ranks_per_node.unwrap_or(devices.per_node);
        if let Some(tflops) = self.tflops {
            devices.flops = f64::from(tflops) * 1e12;
        }
        let (tokens, least) = (self.tokens.0, u64::from(sequence).max(self.devices.into()));
        if (1..least).contains(&tokens) {
            return Err(usage!(
                "--tokens is {tokens}, less than one sequence of {sequence} or one token for each of {} devices",
                self.devices
            ));
        }
        let &PlanArgs { pp, dp, cp, tp, ep, .. } = self;
        Ok(Question {
            model: self.model()?,
            devices,
            hardware,
            count: self.devices,
            tokens,
            sequence,
            precision: self.precision,
            recompute: self.recompute,
            overlap: self.overlap,
            fixed: Fixed { pp, dp, cp, tp, ep },
        })
    }

    fn model(&self) -> Result<Transformer, CliError> {
        let read = |text: &str| Transformer::from_config(&self.model, text);
        known_or_file(("--model", "model"), &self.model, &Transformer::NAMES, read)
    }

    /// The meshes that fit, the fastest first: one at least.
    pub fn fitting(&self, question: &Question) -> Result<Vec<Candidate>, CliError> {
        let FoundMeshes { fitting, smallest, .. } = question.search()?;
        match smallest {
            _ if !fitting.is_empty() => Ok(fitting),
            None => Err(usage!(
                "{} devices and {} tokens in sequences of {} make no mesh for {}{}",
                question.count,
                self.tokens,
                self.sequence,
                question.model.name,
                question.misfit().map_or(String::new(), |misfit| format!(": {misfit}"))
            )),
            Some(least) => Err(usage!(
                "{} fits no mesh of {} devices: {} ({}) takes least, {} of {} a device; more --devices or --recompute lower that",
                question.model.name,
                question.count,
                least.mesh.shape,
                least.mesh.zero.name(),
                volume(least.memory.total_bytes()),
                volume(question.devices.memory_bytes)
            )),
        }
    }
}

impl From<NoPeaks> for CliError {
    fn from(error: NoPeaks) -> Self {
        CliError::Usage(error.to_string())
    }
}

impl From<SearchError> for CliError {
    fn from(error: SearchError) -> Self {
        CliError::Usage(error.to_string())
    }
}
