//! The command line.

use std::num::NonZero;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, ValueEnum};
use moe_lm::batches::Batches;
use moe_lm::mesh::{Context, ScheduleName, Sizes, Strategy, Zero};
use moe_lm::parallel::{Chunks, Device, Plan};
use moe_lm::settings::{Settings, Shape};
use serde_json::json;
use sidelane::layer::Products;

/// Trains a small mixture-of-experts language model: alone, or as a rank of `sidelane launch`,
/// torchrun, srun or mpirun.
///
/// Every rank computes on one core with RAYON_NUM_THREADS=1.
#[derive(Debug, Parser)]
pub struct Arguments {
    /// Text to learn from: the body of a page (.html), or any other file unchanged. Default: the
    /// book that comes with the Rust toolchain.
    pub text: Option<PathBuf>,
    /// Folder for checkpoints, the losses and their curve, and the router's decisions: one for all
    /// ranks, on all machines.
    #[arg(long, default_value = "moe-lm-out")]
    pub out: PathBuf,
    /// Steps of the whole run.
    #[arg(long, default_value_t = 300)]
    pub steps: usize,
    /// Windows of a step, over all ranks.
    #[arg(long, default_value_t = 16)]
    pub batch: usize,
    /// Ranks over which the experts of a layer are spread; it divides the number of ranks. Default:
    /// all.
    #[arg(long)]
    pub expert_parallel: Option<usize>,
    /// Plays this many ranks in this process, one after another: the same bits. 4,3@5 plays 4, and
    /// 3 from step 5 on. With --mesh, all ranks of the mesh.
    #[arg(
        long,
        value_name = "RANKS[,RANKS@STEP..]",
        value_parser = played_ranks,
        conflicts_with_all = ["overlap", "token_chunks", "device", "products", "survive", "kill", "grow_every", "spare"]
    )]
    pub reference: Option<PlayedRanks>,
    /// Sizes of the mesh of ranks. The model is then made of tensor, context and pipeline parallel
    /// layers, all on the host. Experts are spread over ep ranks of dp x cp x tp. Needs --balance 0
    /// where cp or tp cut windows.
    #[arg(
        long,
        value_name = "pp=2,dp=2,cp=1,tp=2,ep=4",
        conflicts_with_all = ["expert_parallel", "overlap", "token_chunks", "device", "products", "survive", "kill", "grow_every", "spare", "warm_up"]
    )]
    pub mesh: Option<Sizes>,
    /// With --mesh: cuts the optimizer's states (1), gradients, too (2), and parameters between
    /// steps (3) over the ranks that have the same. Layers keep theirs whole. The same bits.
    #[arg(long, value_name = "1|2|3", requires = "mesh", value_parser = zero)]
    pub zero: Option<Zero>,
    /// With --mesh: order of the passes of stages. The same bits. Default: 1f1b.
    #[arg(long, value_name = "gpipe|1f1b|interleaved[:CHUNKS]|zb-h1", requires = "mesh")]
    pub schedule: Option<ScheduleName>,
    /// With --mesh: parts of a data parallel rank's windows, which pass the stages one after
    /// another. Default: as many as there are stages.
    #[arg(long, requires = "mesh")]
    pub microbatches: Option<u32>,
    /// With --mesh: attention over cp. Default: ulysses where cp divides the heads of a rank, else
    /// ring.
    #[arg(long, value_enum, requires = "mesh")]
    pub attention: Option<Attention>,
    /// With --mesh: keeps the inputs of model chunks alone, and repeats forward passes before
    /// backward passes. The same bits.
    #[arg(long, requires = "mesh")]
    pub recompute: bool,
    /// Whether transfers overlap with compute: the same bits.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub overlap: Switch,
    /// Chunks of the tokens of a layer, or auto: chosen by its sizes. The same bits.
    #[arg(long, value_name = "auto|N", default_value = "auto", value_parser = chunks)]
    pub token_chunks: Chunks,
    /// Where the MoE layers compute: on the host, or each rank on the GPU of its number
    /// on its machine, or, where there are fewer, on one that it shares. The same bits.
    #[arg(long, value_enum, default_value_t = On::Cpu)]
    pub device: On,
    /// Products of layers on a GPU: by our own kernel, with the same bits, or by cuBLAS, which is
    /// faster and has sums in another order. Needs --device cuda.
    #[arg(long, value_enum, default_value_t = By::Own)]
    pub products: By,
    /// Goes on without ranks that are lost, as long as more than half are left, from the last step
    /// that all others have made. Each rank keeps a copy of another one's experts for that.
    #[arg(long)]
    pub survive: bool,
    /// While ranks are missing that were lost, takes spares in before every so many steps.
    #[arg(long, value_name = "STEPS", requires = "survive")]
    pub grow_every: Option<NonZero<usize>>,
    /// Waits so long for a place in a run that grows, and takes it. All else is as the ranks of the
    /// run have it, the launcher's variables too.
    #[arg(long, value_name = "SECONDS", requires = "grow_every",
          value_parser = clap::value_parser!(u64).range(..=31_536_000))]
    pub spare: Option<u64>,
    /// For tests: this rank kills itself in the middle of this step. May be given several times.
    #[arg(long, value_name = "RANK@STEP", value_parser = at_step)]
    pub kill: Vec<(usize, usize)>,
    /// A checkpoint after so many steps each; there is one at the end anyway.
    #[arg(long)]
    pub checkpoint_every: Option<NonZero<usize>>,
    /// Goes on from the latest checkpoint in the folder.
    #[arg(long)]
    pub resume: bool,
    /// Losses of another run (its losses.json), to draw and compare with these.
    #[arg(long, value_name = "FILE")]
    pub beside: Option<PathBuf>,
    /// Of weights and of windows.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Highest learning rate.
    #[arg(long, default_value_t = 2e-3)]
    pub rate: f64,
    /// Steps in which it is reached.
    #[arg(long, default_value_t = 100)]
    pub warm_up: usize,
    /// Coefficient of the loss that keeps experts in use.
    #[arg(long, default_value_t = 0.001)]
    pub balance: f32,
    /// One JSON object per line: each step, each evaluation of held-out tokens, each written file.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    sizes: ModelSizes,
}

/// Attention over the ranks that cut windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attention {
    Ulysses,
    Ring,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

/// Where layers compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum On {
    Cpu,
    Cuda,
}

/// Makers of products on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    Own,
    Cublas,
    CublasTf32,
}

fn chunks(said: &str) -> Result<Chunks, String> {
    if said == "auto" {
        return Ok(Chunks::AUTO);
    }
    let number = said.parse::<NonZero<u32>>();
    number
        .map(|number| Chunks::Number(number.get()))
        .map_err(|error| format!("neither auto nor a number: {error}"))
}

fn zero(said: &str) -> Result<Zero, String> {
    match said {
        "1" => Ok(Zero::One),
        "2" => Ok(Zero::Two),
        "3" => Ok(Zero::Three),
        _ => Err("not 1, 2 or 3".to_owned()),
    }
}

/// Ranks that a process plays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlayedRanks {
    /// At first.
    pub ranks: usize,
    /// Later numbers: `(step, ranks)`.
    pub changes: Vec<(usize, usize)>,
}

/// A number of ranks, and others from later steps on.
fn played_ranks(said: &str) -> Result<PlayedRanks, String> {
    let (ranks, later) = said.split_once(',').unwrap_or((said, ""));
    let ranks = ranks.parse().map_err(|error| format!("not a number of ranks: {error}"))?;
    let changes = later.split_terminator(',').map(|said| at_step(said).map(|(ranks, step)| (step, ranks)));
    let changes = changes.collect::<Result<Vec<_>, _>>()?;
    match changes.is_sorted_by(|(before, _), (step, _)| before < step) {
        true => Ok(PlayedRanks { ranks, changes }),
        false => Err("steps must ascend".to_owned()),
    }
}

/// A number, and a step.
fn at_step(said: &str) -> Result<(usize, usize), String> {
    let parsed = said.split_once('@').map(|(number, step)| Some((number.parse().ok()?, step.parse().ok()?)));
    parsed.flatten().ok_or_else(|| format!("{said:?} is not two numbers, as 3@5"))
}

/// Sizes of the model.
#[derive(Debug, Args)]
struct ModelSizes {
    /// Different tokens.
    #[arg(long, default_value_t = Shape::default().vocabulary)]
    vocabulary: usize,
    /// Tokens that see each other.
    #[arg(long, default_value_t = Shape::default().window)]
    window: usize,
    /// Blocks of attention and experts.
    #[arg(long, default_value_t = Shape::default().layers)]
    layers: usize,
    /// Elements of a token.
    #[arg(long, default_value_t = Shape::default().width)]
    width: usize,
    /// Heads of attention.
    #[arg(long, default_value_t = Shape::default().heads)]
    heads: usize,
    /// Heads of keys and values. Default: as many.
    #[arg(long)]
    kv_heads: Option<usize>,
    /// Experts of a layer.
    #[arg(long, default_value_t = Shape::default().experts)]
    experts: usize,
    /// Experts that a token chooses.
    #[arg(long, default_value_t = Shape::default().top_k)]
    top_k: usize,
    /// Inner width of an expert.
    #[arg(long, default_value_t = Shape::default().expert_width)]
    expert_width: usize,
    /// The head has the weights of the embedding.
    #[arg(long)]
    tied: bool,
}

impl Arguments {
    /// Those of the command line. Ends the process where they do not fit together.
    pub fn of_process() -> Self {
        let arguments = Arguments::parse();
        if arguments.products != By::Own && arguments.device == On::Cpu {
            let message = "--products cublas and cublas-tf32 need --device cuda";
            Arguments::command().error(ErrorKind::ArgumentConflict, message).exit();
        }
        if arguments.survive && arguments.device == On::Cuda {
            let message = "--survive needs --device cpu: layers on a GPU cannot be rebuilt";
            Arguments::command().error(ErrorKind::ArgumentConflict, message).exit();
        }
        let changes = arguments.reference.as_ref().is_some_and(|played| !played.changes.is_empty());
        if arguments.mesh.is_some() && changes {
            let message = "--reference with --mesh is one number: a mesh keeps its ranks";
            Arguments::command().error(ErrorKind::ArgumentConflict, message).exit();
        }
        arguments
    }

    /// The run that is asked for, on so many ranks.
    pub fn settings(&self, ranks: usize) -> Settings {
        let ModelSizes {
            vocabulary,
            window,
            layers,
            width,
            heads,
            kv_heads,
            experts,
            top_k,
            expert_width,
            tied,
        } = self.sizes;
        let kv_heads = kv_heads.unwrap_or(heads);
        let shape =
            Shape { vocabulary, window, layers, width, heads, kv_heads, experts, top_k, expert_width, tied };
        Settings {
            shape,
            batch: self.batch,
            steps: self.steps,
            rate: self.rate,
            warm_up: self.warm_up,
            balance: self.balance,
            seed: self.seed,
            ranks,
            expert_parallel: self.expert_parallel.unwrap_or(ranks),
        }
    }

    /// The strategy of a run over a mesh, if one is asked for.
    pub fn strategy(&self) -> Option<Strategy> {
        let context = self.attention.map(|attention| match attention {
            Attention::Ulysses => Context::Ulysses,
            Attention::Ring => Context::Ring,
        });
        self.mesh.map(|sizes| Strategy {
            sizes,
            zero: self.zero.unwrap_or_default(),
            order: self.schedule,
            microbatches: self.microbatches.unwrap_or(sizes.pp),
            context,
            recompute: self.recompute,
        })
    }

    /// Settings that all ranks must share: model, data, and the steps of collective work. See
    /// [`Options::job_fingerprint`](sidelane::Options::job_fingerprint).
    pub fn conditions(&self, settings: &Settings, batches: &Batches) -> String {
        json!({
            "moe-lm": env!("CARGO_PKG_VERSION"),
            "settings": settings,
            "strategy": self.strategy(),
            "text": batches.digest(),
            "token_chunks": format!("{:?}", self.token_chunks),
            "device": format!("{:?}", self.device),
            "products": format!("{:?}", self.products),
            "survive": self.survive,
            "grow_every": self.grow_every,
            "checkpoint_every": self.checkpoint_every,
            "resume": self.resume,
        })
        .to_string()
    }

    /// How it is carried out by a rank of this number, and of this one on its machine.
    pub fn plan(&self, rank: usize, local_rank: u32) -> Plan {
        let products = match self.products {
            By::Own => Products::Own,
            By::Cublas => Products::Cublas,
            By::CublasTf32 => Products::CublasTf32,
        };
        let device = match self.device {
            On::Cpu => Device::Host,
            On::Cuda => Device::Cuda(local_rank, products),
        };
        let killed_in = self.kill.iter().find(|&&(killed, _)| killed == rank).map(|&(_, step)| step);
        let (chunks, overlap) = (self.token_chunks, self.overlap == Switch::On);
        Plan { chunks, overlap, device, survives: self.survive, killed_in }
    }
}
