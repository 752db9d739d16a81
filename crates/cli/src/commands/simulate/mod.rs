//! `sidelane simulate`: how long a dispatch and a combine would take on a described machine, by the
//! schedules that would run there (`sidelane_model::time`).
//!
//! ```text
//!   model, routing, ranks --> Placed for each way --\
//!                                                    +--> Timing: table, JSON, picture by number of ranks
//!   hardware: a name, a file, or --calibrate --------/
//! ```

mod calibrate_host;
mod layer_time;
mod report;
mod tensor_time;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use report::Report;
use serde::Serialize;
use sidelane::dtype::PartialDtype;
use sidelane::gate::{Gate, GateInput, Preset, Routing};
use sidelane::plan::{ExpertMap, RowLayout, SlotShape, SumOrder};
use sidelane::topology::Route;
use sidelane_model::parallel::{Experts, Transformer};
use sidelane_model::time::{Case, Executor, Hardware, Placed, Timing, Variant, Wishes, slots};

use crate::command_frame::{self, Command};
use crate::error::{CliError, usage};
use crate::options::{JsonFile, RouterArgs, RowArgs, RowType, at_most, hardware, one_of};
use crate::routing_source::{Routed, Router, Share, Source};
use crate::table;

const EXAMPLES: &str = "\
Examples:
  sidelane simulate --nodes 128 --ranks-per-node 8 --hardware h100-cx7
  sidelane simulate --nodes 1 --tokens 128 --mode slots
  sidelane simulate --calibrate machine.json  # measures this machine";

/// Predict the times of dispatch and combine on a described machine, from the schedules that would
/// run there
#[derive(Args, Clone)]
#[command(after_help = EXAMPLES)]
pub struct SimulateArgs {
    /// Model whose experts, choices, row and router are used. deepseek-v3 has 256 experts in 8
    /// groups, of which 4 are taken, top-8 and rows of 7168; qwen3-235b-a22b 128, top-8, 4096;
    /// mixtral-8x7b 8, top-2, 4096; olmoe-1b-7b 64, top-8, 2048
    #[arg(long, default_value = "deepseek-v3", value_parser = one_of(MODELS, |model: Model| model.name))]
    pub model: Model,

    /// A machine that is known (h100-cx7, h100-cx7-cliff, h200-cx7, h800-400g), or a file as
    /// --calibrate or `gpu-check --calibrate` writes it
    #[arg(long, value_name = "NAME|FILE", default_value = "h100-cx7")]
    pub hardware: String,

    /// Number of nodes [default: 8; with --ranks-per-node, one]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MOST_RANKS.into()))]
    pub nodes: Option<u32>,

    /// Ranks of each node [default: 8]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=MOST_RANKS.into()))]
    pub ranks_per_node: Option<u32>,

    #[command(flatten)]
    pub router: RouterArgs<4096, true>,

    #[command(flatten)]
    pub row: RowArgs<0>,

    /// Source of decisions: recorded, uniform, zipf:S, incast, or a file [default: the model's
    /// router, on random logits]
    #[arg(long, value_name = "recorded|PATTERN|FILE")]
    pub routing: Option<Source>,

    /// Exact sizes, or fixed slots on a stream (rank-major, one node; full for any routing)
    #[arg(long, value_enum, default_value_t = ReceiveKind::Exact)]
    pub mode: ReceiveKind,

    /// Order of received rows [default: both]
    #[arg(long, value_parser = one_of(RowLayout::ALL, RowLayout::name))]
    pub layout: Option<RowLayout>,

    /// Route of rows to other nodes [default: both]
    #[arg(long, value_parser = one_of(Route::ALL, Route::name))]
    pub route: Option<Route>,

    /// Order of sums; relays make partial sums of ranks or nodes, and devices those of ranks where
    /// the experts are [default: expert and, over pxn, rank and node]
    #[arg(long, value_parser = one_of(SumOrder::ALL, SumOrder::name))]
    pub sum_order: Option<SumOrder>,

    /// Type in which partial sums cross [default: both]
    #[arg(long, value_parser = one_of(PartialDtype::ALL, PartialDtype::name))]
    pub partial_dtype: Option<PartialDtype>,

    /// In how many parts a block goes to its relay; a list compares them [default: by its size]
    #[arg(long, value_name = "N[,N..]", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..))]
    pub relay_parts: Vec<u8>,

    /// How weights and choices travel: as copies next to the rows, or with the counts [default:
    /// rows]
    #[arg(long, value_enum)]
    pub metadata_with: Option<MetadataWith>,

    /// Time a whole layer, forward and backward, with its tokens in this many chunks: transfers
    /// overlap with the experts; a list compares them
    #[arg(long, value_name = "N[,N..]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub token_chunks: Vec<u32>,

    /// Width of an expert, with --token-chunks [default: the model's]
    #[arg(long, value_name = "F", requires = "token_chunks", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub ffn: Option<u32>,

    /// TFLOP/s of products, with --token-chunks: 600 is six tenths of the bf16 peak of
    /// an H100
    #[arg(long, value_name = "X", default_value_t = 600, requires = "token_chunks", value_parser = clap::value_parser!(u32).range(1..))]
    pub tflops: u32,

    /// Time a pair of tensor parallel layers, too, with --token-chunks: F elements between them,
    /// cut over the ranks of a node, and activations that are sequence parallel
    #[arg(long, value_name = "F", requires = "token_chunks", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub tensor_ffn: Option<u32>,

    /// Play every rank of a group of more than 64, not one node that stands for all
    #[arg(long)]
    all_ranks: bool,

    #[command(flatten)]
    pub report: JsonFile,

    /// Draw times by number of ranks, in powers of two of nodes up to --max-ranks
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Most ranks of the picture
    #[arg(long, value_name = "R", default_value_t = 1024, requires = "svg")]
    max_ranks: u32,

    /// Measure this machine instead, and write its figures
    #[arg(long, value_name = "FILE", exclusive = true)]
    calibrate: Option<PathBuf>,
}

impl Command for SimulateArgs {
    const NAME: &'static str = "simulate";

    fn run(self) -> Result<ExitCode, CliError> {
        command_frame::claim(&self.report.json, self.svg.iter().chain(&self.calibrate))?;
        if self.calibrate.is_some() {
            let hardware = calibrate_host::measure()?;
            command_frame::draw(&self.calibrate, || command_frame::pretty(&hardware) + "\n")?;
            command_frame::print(&table::fitted(calibrate_host::words_of(&hardware).trim_end()))?;
            return Ok(ExitCode::SUCCESS);
        }
        let report = Report::new(&Task::resolve(&self)?)?;
        command_frame::draw(&self.svg, || report::draw(&report))?;
        command_frame::finish(&report, &self.report.json)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ReceiveKind {
    Exact,
    Slots,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MetadataWith {
    Rows,
    Counts,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSettings {
    pub model: &'static str,
    /// The model's own router where there is none.
    pub routing: Option<Source>,
    pub experts: u32,
    pub top_k: u32,
    pub nodes: u32,
    pub ranks_per_node: u32,
    pub tokens: u32,
    pub hidden: u32,
    pub dtype: RowType,
    pub mode: ReceiveKind,
    pub metadata_with: MetadataWith,
    pub seed: u64,
}

/// Conditions, and how to answer for any number of nodes.
pub struct Task<'a> {
    pub args: &'a SimulateArgs,
    pub conditions: RunSettings,
    pub hardware: Hardware,
    router: Option<Router>,
    row_bytes: u64,
    return_bytes: u64,
}

/// Groups of more ranks are one node that stands for all.
const PLAYED: u32 = 64;
const MOST_RANKS: u32 = 4096;
/// Logits of so many are drawn for each token.
const MOST_EXPERTS: u32 = 1 << 14;
/// A gigabyte of logits of one rank, and of choices of all.
const MOST_VALUES: u32 = 1 << 28;

impl<'a> Task<'a> {
    pub fn resolve(args: &'a SimulateArgs) -> Result<Self, CliError> {
        let (own_hidden, own) = args.model.sizes();
        let hardware = hardware(&args.hardware)?;
        // One number of ranks is one node, as for all commands.
        let nodes = args.nodes.unwrap_or(args.ranks_per_node.map_or(8, |_| 1));
        let ranks_per_node = args.ranks_per_node.unwrap_or(8);
        let ranks = nodes * ranks_per_node;
        at_most(&[("--nodes x --ranks-per-node", ranks, MOST_RANKS)])?;
        let RouterArgs { experts, top_k, .. } = args.router;
        let (router, experts, top_k) = match &args.routing {
            None => (None, experts.unwrap_or(own.count), top_k.unwrap_or(own.top_k)),
            Some(source) => {
                let drawn = matches!(source, Source::Pattern(_));
                let or = |asked: Option<u32>, own| asked.or(drawn.then_some(own));
                let (experts, top_k) = (or(experts, own.count), or(top_k, own.top_k));
                let Routed { router, experts, top_k, .. } =
                    Routed::resolve(Some(source.clone()), experts, top_k)?;
                (Some(router), experts, top_k)
            }
        };
        let (tokens, hidden) = (args.router.tokens(), args.row.hidden.unwrap_or(own_hidden));
        at_most(&[
            ("--experts", experts, MOST_EXPERTS),
            ("--tokens", tokens, 1 << 20),
            ("--hidden", hidden, 1 << 24),
        ])?;
        let drawn = if args.all_ranks { ranks } else { ranks.min(PLAYED.max(ranks_per_node)) };
        let all = u64::from(tokens);
        at_most(&[
            ("--tokens x --experts", all * u64::from(experts), MOST_VALUES),
            ("--tokens x --top-k of all ranks", all * u64::from(top_k) * u64::from(drawn), MOST_VALUES),
        ])?;
        let (row_bytes, return_bytes) = args.row.dtype.bytes(hidden);
        let one_device_node = nodes == 1 && hardware.executor == Executor::Device;
        if args.mode == ReceiveKind::Slots && !one_device_node {
            return Err(usage!(
                "--mode slots is timed on one node (--nodes 1) of a machine with copy engines"
            ));
        }
        if !args.token_chunks.is_empty() && (hosted(&hardware) || args.mode == ReceiveKind::Slots) {
            return Err(usage!(
                "--token-chunks is for a machine whose copies take no core, with exact sizes (--mode exact)"
            ));
        }
        if let Some(ffn) = args.tensor_ffn
            && !ffn.is_multiple_of(ranks_per_node)
        {
            return Err(usage!(
                "--tensor-ffn {ffn} is cut over the ranks of a node: {ranks_per_node} do not divide it"
            ));
        }
        let chunks = args.token_chunks.iter().copied().max().unwrap_or(1);
        at_most(&[("--token-chunks", chunks, tokens)])?;
        if let Some(option) = no_option_of_slots(args) {
            return Err(usage!(
                "--mode slots has one way for one group, and slots are full for any routing: {option} has no effect there"
            ));
        }
        if args.mode == ReceiveKind::Exact {
            let ways = Variant::all(&wishes(args), nodes);
            if args.partial_dtype.is_some() && ways.iter().all(|way| way.partial_dtype.is_none()) {
                let why = "sums have parts in --sum-order rank or node, where relays make them over --route pxn \
                           between several nodes, or ranks those of rows by expert";
                return Err(usage!("--partial-dtype has no effect here: {why}"));
            }
            if !args.relay_parts.is_empty() && ways.iter().all(|way| way.relay_parts.is_none()) {
                let why = "blocks go to relays over --route pxn, between several nodes";
                return Err(usage!("--relay-parts has no effect here: {why}"));
            }
        }
        let conditions = RunSettings {
            model: args.model.name,
            routing: args.routing.clone(),
            experts,
            top_k,
            nodes,
            ranks_per_node,
            tokens,
            hidden,
            dtype: args.row.dtype,
            mode: args.mode,
            metadata_with: args.metadata_with.unwrap_or(MetadataWith::Rows),
            seed: args.router.seed(),
        };
        Ok(Task { args, conditions, hardware, router, row_bytes, return_bytes })
    }

    /// The ways of a call on so many nodes.
    pub fn ways(&self, nodes: u32) -> Vec<Variant> {
        Variant::all(&wishes(self.args), nodes)
    }

    /// Dispatch and combine of fixed slots on a machine.
    pub fn slots(&self, hardware: &Hardware) -> Result<[Timing; 2], CliError> {
        let RunSettings { ranks_per_node, tokens, top_k, .. } = self.conditions;
        let shape = SlotShape::new(tokens, top_k, self.row_bytes)?;
        Ok(slots(ranks_per_node, shape, self.return_bytes, hardware)?)
    }

    /// Numbers of nodes that the picture has: powers of two.
    pub fn nodes_of_picture(&self) -> impl Iterator<Item = u32> + use<> {
        let most = if self.args.svg.is_some() { self.args.max_ranks.min(MOST_RANKS) } else { 0 };
        let each = self.conditions.ranks_per_node;
        (0..32).map(|power| 1 << power).take_while(move |nodes| nodes * each <= most)
    }

    /// Decisions and expert placement of this number of nodes, to time one variant after the other.
    pub fn group(&self, nodes: u32) -> Result<Group<'_>, CliError> {
        let RunSettings { experts, top_k, ranks_per_node, tokens, seed, .. } = self.conditions;
        let ranks = nodes * ranks_per_node;
        let map = match experts < ranks {
            // One copy of an expert on each rank, in turn.
            true => {
                let held: Vec<Vec<u32>> = (0..ranks).map(|rank| vec![rank % experts]).collect();
                ExpertMap::from_slots(experts, &held)?
            }
            false => ExpertMap::contiguous(experts, ranks)?,
        };
        let even = map.slots().is_multiple_of(ranks);
        let whole = ranks <= PLAYED || self.args.all_ranks || hosted(&self.hardware) || !even;
        let share = Share { experts, top_k, tokens, seed };
        let decide = |rank| match &self.router {
            Some(router) => Ok(router.routing(share, rank)?),
            None => self.args.model.routing(share, rank),
        };
        let drawn = if whole { ranks } else { ranks_per_node };
        let routings = (0..drawn).map(decide).collect::<Result<_, CliError>>()?;
        Ok(Group { task: self, nodes, map, routings })
    }
}

pub struct Group<'a> {
    task: &'a Task<'a>,
    nodes: u32,
    map: ExpertMap,
    routings: Vec<Routing<'static>>,
}

impl Group<'_> {
    pub fn case(&self, way: &Variant) -> Case<'_> {
        let Task { ref conditions, row_bytes, return_bytes, .. } = *self.task;
        let partial = way.partial_dtype.map_or(4, |wire| wire.size() as u64);
        Case {
            nodes: self.nodes,
            map: &self.map,
            routings: &self.routings,
            layout: way.layout,
            route: way.route,
            order: way.sum_order,
            chunks: way.relay_parts,
            row_bytes,
            return_bytes,
            partial_bytes: u64::from(conditions.hidden) * partial,
            metadata: conditions.metadata_with == MetadataWith::Rows,
        }
    }

    pub fn placed(&self, way: &Variant) -> Result<Placed, CliError> {
        Ok(Placed::new(&self.case(way), &self.task.hardware)?)
    }
}

fn wishes(args: &SimulateArgs) -> Wishes {
    let &SimulateArgs { layout, route, sum_order, partial_dtype, .. } = args;
    Wishes { layout, route, sum_order, partial_dtype, relay_parts: args.relay_parts.clone() }
}

fn hosted(hardware: &Hardware) -> bool {
    hardware.executor == Executor::Host
}

/// An option that was given and that slots do not know.
fn no_option_of_slots(args: &SimulateArgs) -> Option<&'static str> {
    let given = [
        ("--svg", args.svg.is_some()),
        ("--routing", args.routing.is_some()),
        ("--experts", args.router.experts.is_some()),
        ("--layout", args.layout.is_some()),
        ("--route", args.route.is_some()),
        ("--sum-order", args.sum_order.is_some()),
        ("--partial-dtype", args.partial_dtype.is_some()),
        ("--relay-parts", !args.relay_parts.is_empty()),
        ("--metadata-with", args.metadata_with.is_some()),
        ("--seed", args.router.seed.is_some()),
        ("--all-ranks", args.all_ranks),
    ];
    let slots = args.mode == ReceiveKind::Slots;
    given.into_iter().find(|&(_, given)| slots && given).map(|(option, _)| option)
}

/// A model of `plan` whose router has a preset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    pub name: &'static str,
    preset: Preset,
}

const MODELS: [Model; 4] = [
    Model { name: "deepseek-v3", preset: Preset::DeepseekV3 },
    Model { name: "qwen3-235b-a22b", preset: Preset::Qwen3 },
    Model { name: "mixtral-8x7b", preset: Preset::Mixtral },
    Model { name: "olmoe-1b-7b", preset: Preset::Olmoe },
];

impl Model {
    /// Elements of a row, and experts.
    pub fn sizes(self) -> (u32, Experts) {
        let model: Transformer = self.name.parse().expect("`plan` knows the model");
        (model.hidden, model.experts.expect("the model has experts"))
    }

    /// Decisions of the model's router for one rank whose logits are random, and about normal: all
    /// experts are alike, in the long run.
    pub fn routing(self, share: Share, rank: u32) -> Result<Routing<'static>, CliError> {
        let Share { experts, top_k, tokens, seed } = share;
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(u64::from(rank));
        let mut logit = || (0..4).map(|_| random.random::<f32>() - 0.5).sum::<f32>();
        let logits: Vec<f32> = (0..tokens as usize * experts as usize).map(|_| logit()).collect();
        let mut gate = Gate::new(self.preset.config(experts, top_k)?)?;
        let bias = vec![0.0; experts as usize];
        let bias = (self.preset == Preset::DeepseekV3).then_some(&bias[..]);
        let decision = gate.route(&GateInput::new(&logits).with_bias(bias))?;
        let (experts, weights) = (decision.experts().to_vec(), decision.weights().to_vec());
        Ok(Routing::new(top_k, experts, weights)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_knows_the_sizes_of_every_model() {
        let sizes = |model: Model| {
            let (hidden, Experts { count, top_k, ffn, shared_ffn, .. }) = model.sizes();
            [hidden, count, top_k, ffn, shared_ffn]
        };
        let expected = [
            [7168, 256, 8, 2048, 2048],
            [4096, 128, 8, 1536, 0],
            [4096, 8, 2, 14_336, 0],
            [2048, 64, 8, 1024, 0],
        ];
        assert_eq!(MODELS.map(sizes), expected);
    }
}
