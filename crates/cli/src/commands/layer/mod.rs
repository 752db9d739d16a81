//! `sidelane layer`: a whole MoE layer between real processes, transfers in turn with compute and
//! concurrent with it.
//!
//! Overlap shows where transfers cost time and no core: on connections that emulate a slower link
//! ([`EmulatedLink`]). By default, the link is as fast as the experts: half of the time at most.
//!
//! ```text
//!   layer --> Task --launch--> rank 0 .. n-1:  check | rounds: transfers alone, in turn, overlapped, ... | trace
//!                                 |
//!                               rank 0: table, JSON, trace, picture
//! ```

mod rank;
mod report;

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use sidelane::config::EmulatedLink;
use sidelane::layer::{Experts, GroupedSwiGlu, Segments};

use crate::command_frame::Command;
use crate::commands::launch::MachineArgs;
use crate::error::{CliError, usage};
use crate::options::{JsonFile, NodeArgs, at_most};
use crate::ranks::{self, Assignment, Files, RankMemory, Sizes};

const EXAMPLES: &str = "\
Examples:
  sidelane layer                            # two ranks, link as fast as experts
  sidelane layer --link 1G/10 --backward      # 1 GiB/s, 10 us
  sidelane layer --link none --nodes 1 --ranks-per-node 2";

/// Time a MoE layer with its transfers before and during its experts, and how much of them the
/// experts hide
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct LayerArgs {
    #[command(flatten)]
    pub nodes: NodeArgs<2, 1>,

    #[command(flatten)]
    pub shape: Shape,

    /// The link between nodes of one machine: `even` (as fast as the experts), `none` (copies), or
    /// bytes per second, a slash and microseconds
    #[arg(long, value_name = "even|none|RATE/US", default_value = "even")]
    pub link: LinkArg,

    /// Time gradients as well
    #[arg(long)]
    pub backward: bool,

    /// Rounds to time
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,

    #[command(flatten)]
    pub report: JsonFile<true>,

    /// Write one overlapped step as a Chrome trace, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub trace_out: Option<PathBuf>,

    /// Draw one overlapped step as a picture, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    #[command(flatten)]
    pub machines: MachineArgs,
}

impl Command for LayerArgs {
    const NAME: &'static str = "layer";

    fn run(self) -> Result<ExitCode, CliError> {
        let (json, svg, trace) = (self.report.json.clone(), self.svg.clone(), self.trace_out.clone());
        // First: a link as fast as the experts is found by timing them.
        let files = Files { json, svg, trace, ..Files::default() }.claimed(&self.machines)?;
        let task = Task::resolve(&self)?;
        let (nodes, variables, memory) =
            (task.shape.ranks_per_node.clone(), task.variables(), task.shape.memory());
        let assignment = Assignment { task, files };
        ranks::start(Self::NAME, &nodes, &self.machines, &assignment, variables, &memory)
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        rank::main(&ranks::task(task)?)
    }
}

/// Shape of a layer.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    #[arg(skip)]
    pub ranks_per_node: Vec<u32>,

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
    pub token_chunks: u32,

    /// Transfers in flight at once [default: 2, or 1 if there is only one chunk]
    #[arg(long, value_name = "N")]
    pub transfers: Option<u32>,

    /// Draws tokens and weights
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub shape: Shape,
    pub emulated_link: Option<EmulatedLink>,
    pub backward: bool,
    pub rounds: u32,
    /// Whether a step is kept, to be written or drawn by rank 0.
    pub records: bool,
}

/// Values of one tensor: 8 GB in f32.
const MOST_VALUES: u32 = 1 << 31;

impl Shape {
    pub fn ranks(&self) -> u32 {
        self.ranks_per_node.iter().sum()
    }

    pub fn transfers(&self) -> u32 {
        self.transfers.unwrap_or(1)
    }

    pub fn words(&self) -> String {
        let Shape { tokens, hidden, ffn, experts, top_k, token_chunks, .. } = self;
        let transfers = self.transfers();
        format!(
            "{tokens} tokens a rank in {token_chunks} chunks, {transfers} in flight at once, rows of {hidden} x bf16, {experts} experts of {ffn}, top-{top_k}"
        )
    }

    fn row_bytes(&self) -> u64 {
        2 * u64::from(self.hidden)
    }

    /// Bytes that a rank of the first node sends to other nodes in a balanced step: rows of its
    /// tokens, and returned rows of others.
    fn bytes_across(&self) -> u64 {
        let (ranks, near) = (u64::from(self.ranks()), u64::from(self.ranks_per_node[0]));
        let rows = u64::from(self.tokens) * u64::from(self.top_k);
        2 * rows * self.row_bytes() * (ranks - near) / ranks
    }

    /// Room for two layers, each with rows and their gradients alive, when a rank has three times
    /// its share.
    pub fn sizes(&self) -> Sizes {
        let rows = u64::from(self.tokens) * u64::from(self.top_k) * u64::from(self.ranks().min(3));
        let symmetric = 64 << 20;
        let heap = (8 * rows * self.row_bytes() + (64 << 20) + symmetric).next_multiple_of(2 << 20);
        Sizes { heap, symmetric }
    }

    fn memory(&self) -> RankMemory {
        // Weights in f32.
        let own = u64::from(self.experts.div_ceil(self.ranks()));
        let other = 4 * own * 3 * u64::from(self.hidden) * u64::from(self.ffn);
        let options = "--tokens, --top-k, --hidden, --ffn, --experts or the number of ranks";
        RankMemory { heap: self.sizes().heap, other, options }
    }

    fn check(&self) -> Result<(), CliError> {
        let sizes = [
            ("--tokens", self.tokens, 1 << 20),
            ("--hidden", self.hidden, 1 << 20),
            ("--ffn", self.ffn, 1 << 20),
            ("--top-k", self.top_k, 1 << 10),
            ("--experts", self.experts, 1 << 14),
            ("--token-chunks", self.token_chunks, self.tokens.clamp(1, 1 << 10)),
            ("--transfers", self.transfers(), self.token_chunks),
        ];
        at_most(&sizes)?;
        let (hidden, ffn) = (u64::from(self.hidden), u64::from(self.ffn));
        let own = u64::from(self.experts.div_ceil(self.ranks().max(1)));
        let rows = u64::from(self.tokens) * u64::from(self.top_k);
        let products = [
            ("weights of a rank's --experts", own * 3 * hidden * ffn, MOST_VALUES),
            ("--tokens x --top-k x --hidden", rows * hidden, MOST_VALUES),
            ("--tokens x --top-k x --ffn", rows * ffn, MOST_VALUES),
        ];
        at_most(&products)?;
        if !self.row_bytes().is_multiple_of(16) {
            return Err(usage!("rows of {} x bf16 are no multiple of 16 bytes", self.hidden));
        }
        let (experts, ranks, top_k) = (self.experts, self.ranks(), self.top_k);
        if top_k > experts {
            return Err(usage!("--top-k is {top_k}, but there are only {experts} experts"));
        }
        match experts < ranks {
            true => Err(usage!("{experts} experts are too few: each of {ranks} ranks has one at least")),
            false => Ok(()),
        }
    }
}

impl Task {
    /// From the command line. Experts are timed here where the link is to be as fast as they are.
    pub fn resolve(args: &LayerArgs) -> Result<Self, CliError> {
        let ranks_per_node = args.nodes.sizes()?;
        let transfers = args.shape.transfers.or(Some(args.shape.token_chunks.min(2)));
        let shape = Shape { ranks_per_node, transfers, ..args.shape.clone() };
        shape.check()?;
        shape.memory().fits(&shape.ranks_per_node, &args.machines)?;
        // Transfers between machines, over sockets or NICs, and within a node are not emulated.
        let wires = shape.ranks_per_node.len() > 1 && args.machines.is_loopback();
        let emulated_link = match args.link {
            LinkArg::Link(_) if !wires => {
                return Err(usage!(
                    "--link is for wires between nodes of one machine, over --net loopback: two nodes or more, without --node-rank"
                ));
            }
            link if wires => link.resolve(&shape),
            _ => None,
        };
        let records = args.trace_out.is_some() || args.svg.is_some();
        Ok(Task { shape, emulated_link, backward: args.backward, rounds: args.rounds, records })
    }

    /// Environment of the ranks, regardless of the caller's.
    pub fn variables(&self) -> Vec<(String, OsString)> {
        let words = |link: EmulatedLink| format!("{}/{}", link.bytes_per_second, link.latency.as_micros());
        vec![("SIDELANE_EMULATED_LINK".to_owned(), self.emulated_link.map_or(String::new(), words).into())]
    }
}

/// A small one.
#[cfg(test)]
pub fn sample() -> Shape {
    let ranks_per_node = vec![1, 1];
    Shape {
        ranks_per_node,
        tokens: 64,
        hidden: 32,
        ffn: 16,
        experts: 8,
        top_k: 2,
        token_chunks: 4,
        transfers: Some(2),
        seed: 0,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkArg {
    /// Transfers take as long as the experts.
    Even,
    /// Wires are as fast as they copy.
    None,
    /// This link.
    Link(EmulatedLink),
}

impl FromStr for LinkArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "even" => Ok(LinkArg::Even),
            "none" => Ok(LinkArg::None),
            link => EmulatedLink::parse(link)
                .map(LinkArg::Link)
                .ok_or("`even`, `none`, or bytes per second (K, M, G), a slash and microseconds"),
        }
    }
}

/// Of a link that is as fast as the experts: microseconds, as of a network within a room.
const LATENCY: Duration = Duration::from_micros(10);
/// Of these the best: other work only ever adds.
const TRIES: u32 = 5;

impl LinkArg {
    /// The link for a layer of this shape. All cores that ranks will use are at work while experts
    /// are timed.
    pub fn resolve(self, shape: &Shape) -> Option<EmulatedLink> {
        match self {
            LinkArg::None => None,
            LinkArg::Link(link) => Some(link),
            LinkArg::Even => {
                let took = experts_alone(shape).as_secs_f64();
                let rate = shape.bytes_across() as f64 / took.max(1e-6);
                let bytes_per_second = NonZeroU64::new(rate as u64)?;
                Some(EmulatedLink::new(bytes_per_second, LATENCY))
            }
        }
    }
}

/// How long the experts of a rank take for a balanced step, chunk by chunk, of all ranks of this
/// machine at once.
fn experts_alone(shape: &Shape) -> Duration {
    let ranks: u32 = shape.ranks_per_node.iter().sum();
    let (hidden, ffn) = (shape.hidden as usize, shape.ffn as usize);
    let local = shape.experts.div_ceil(ranks) as usize;
    let chunks = shape.token_chunks as usize;
    let rows = ((u64::from(shape.tokens) * u64::from(shape.top_k)) as usize).div_ceil(chunks);
    // The first experts get the remainder.
    let counts: Vec<i64> = (0..local).map(|nth| ((rows + local - 1 - nth) / local) as i64).collect();
    let weights = vec![0.01; GroupedSwiGlu::values(local, hidden, ffn)];
    let Ok(experts) = GroupedSwiGlu::new(local, hidden, ffn, weights) else { return Duration::ZERO };
    let x = vec![0.5; rows * hidden];
    let one = || {
        let begin = Instant::now();
        for _ in 0..chunks {
            let done = experts.forward(Segments::new(&x, hidden, &counts, &counts));
            std::hint::black_box(done.map_or(0, |(y, _)| y.len()));
        }
        begin.elapsed()
    };
    let all = || {
        std::thread::scope(|scope| {
            let at_work: Vec<_> = (0..ranks).map(|_| scope.spawn(one)).collect();
            at_work.into_iter().filter_map(|rank| rank.join().ok()).max().unwrap_or_default()
        })
    };
    (0..TRIES).map(|_| all()).min().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_frame::tests::parsed;

    fn resolve(line: &str) -> Task {
        Task::resolve(&parsed(line).unwrap()).unwrap()
    }

    #[test]
    fn half_of_what_two_ranks_send_crosses() {
        let task = resolve("--tokens 8 --token-chunks 8 --hidden 16 --top-k 4 --link 1G/10");
        assert_eq!(task.shape.bytes_across(), 2 * (8 * 4 / 2) * 32);
        assert_eq!(task.variables(), [("SIDELANE_EMULATED_LINK".to_owned(), "1073741824/10".into())]);
        // Nothing crosses on one node.
        let none = [("SIDELANE_EMULATED_LINK".to_owned(), "".into())];
        assert_eq!(resolve("--nodes 1 --ranks-per-node 2").variables(), none);
    }

    #[test]
    fn a_link_is_even_none_or_a_rate() {
        assert_eq!("even".parse::<LinkArg>().unwrap(), LinkArg::Even);
        assert_eq!("none".parse::<LinkArg>().unwrap(), LinkArg::None);
        let LinkArg::Link(link) = "1G/10".parse().unwrap() else { panic!() };
        assert_eq!((link.bytes_per_second.get(), link.latency), (1 << 30, Duration::from_micros(10)));
        assert!("fast".parse::<LinkArg>().is_err());
    }
}
