//! What `simulate` looks at: conditions, hardware, and the decisions of ranks.

use serde::Serialize;
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, SlotShape};
use sidelane_model::time::{Case, Executor, Hardware, Placed, Timing, slots};

use super::args::{Beside, Room, SimulateArgs};
use super::model::Model;
use super::ways::{DEFAULT_CHUNKS, Way};
use crate::bench::RowType;
use crate::error::{CliError, usage};
use crate::options::at_most;
use crate::routing::{Routed, Router, Share, Source};

/// What was looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conditions {
    pub model: Model,
    /// The model's own router where there is none.
    pub routing: Option<Source>,
    pub experts: u32,
    pub top_k: u32,
    pub nodes: u32,
    pub ranks_per_node: u32,
    pub tokens: u32,
    pub hidden: u32,
    pub dtype: RowType,
    pub mode: Room,
    pub weights: Beside,
    pub seed: u64,
}

/// Conditions, and how to answer for any number of nodes.
pub struct Task<'a> {
    pub args: &'a SimulateArgs,
    pub conditions: Conditions,
    pub hardware: Hardware,
    router: Option<Router>,
    row_bytes: u64,
    home_bytes: u64,
}

/// Groups of more ranks are one node that stands for all.
const PLAYED: u32 = 64;
/// The largest group.
const MOST_RANKS: u32 = 4096;
/// Logits of so many are drawn for each token.
const MOST_EXPERTS: u32 = 1 << 14;
/// A gigabyte of logits of one rank, and of choices of all.
const MOST_VALUES: u32 = 1 << 28;

impl<'a> Task<'a> {
    /// From the command line.
    pub fn resolve(args: &'a SimulateArgs) -> Result<Self, CliError> {
        let layer = args.preset.layer();
        let hardware = hardware(&args.hardware)?;
        let ranks = args.nodes.saturating_mul(args.ranks_per_node);
        let options = [
            ("--nodes", args.nodes, MOST_RANKS),
            ("--ranks-per-node", args.ranks_per_node, MOST_RANKS),
            ("--nodes x --ranks-per-node", ranks, MOST_RANKS),
            ("--tokens", args.tokens, 1 << 20),
            ("--hidden", args.hidden.unwrap_or(layer.hidden), 1 << 24),
        ];
        at_most(&options)?;
        let (router, experts, top_k) = match &args.routing {
            None => (None, args.experts.unwrap_or(layer.experts), args.top_k.unwrap_or(layer.top_k)),
            Some(source) => {
                let drawn = matches!(source, Source::Pattern(_));
                let or = |asked: Option<u32>, own| asked.or(drawn.then_some(own));
                let (experts, top_k) = (or(args.experts, layer.experts), or(args.top_k, layer.top_k));
                let Routed { router, experts, top_k, .. } =
                    Routed::resolve(Some(source.clone()), experts, top_k)?;
                (Some(router), experts, top_k)
            }
        };
        at_most(&[("--experts", experts, MOST_EXPERTS)])?;
        let drawn = if args.all_ranks { ranks } else { ranks.min(PLAYED.max(args.ranks_per_node)) };
        let tokens = u64::from(args.tokens);
        at_most(&[
            ("--tokens x --experts", tokens * u64::from(experts), MOST_VALUES),
            ("--tokens x --top-k of all ranks", tokens * u64::from(top_k) * u64::from(drawn), MOST_VALUES),
        ])?;
        let hidden = args.hidden.unwrap_or(layer.hidden);
        let (row_bytes, home_bytes) = args.dtype.bytes(hidden);
        let one_device_node = args.nodes == 1 && hardware.executor == Executor::Device;
        if args.mode == Room::Slots && !one_device_node {
            return Err(usage!(
                "--mode slots is timed on one node (--nodes 1) of a machine with copy engines"
            ));
        }
        if !args.slices.is_empty() && (hosted(&hardware) || args.mode == Room::Slots) {
            return Err(usage!(
                "--slices is for a machine whose copies take no core, with exact sizes (--mode eager)"
            ));
        }
        if args.slices.iter().any(|&slices| slices > args.tokens) {
            return Err(usage!("--slices must be between 1 and {most}", most = args.tokens));
        }
        if let Some(option) = no_option_of_slots(args) {
            return Err(usage!(
                "--mode slots has one way for one group, and slots are full whatever the routing: {option} says nothing there"
            ));
        }
        if args.mode == Room::Eager {
            let ways = Way::all(args, args.nodes);
            if args.wire.is_some() && ways.iter().all(|way| way.wire.is_none()) {
                let why = "relays sum over --route pxn, between several nodes, in --order rank or node";
                return Err(usage!("--wire says nothing here: {why}"));
            }
            if !args.chunks.is_empty() && ways.iter().all(|way| way.chunks.is_none()) {
                let why = "blocks go to relays over --route pxn, between several nodes";
                return Err(usage!("--chunks says nothing here: {why}"));
            }
        }
        let &SimulateArgs { nodes, ranks_per_node, tokens, dtype, mode, preset: model, .. } = args;
        let (weights, seed) = (args.weights.unwrap_or(Beside::Rows), args.seed.unwrap_or(0));
        let routing = args.routing.clone();
        let conditions = Conditions {
            model,
            routing,
            experts,
            top_k,
            nodes,
            ranks_per_node,
            tokens,
            hidden,
            dtype,
            mode,
            weights,
            seed,
        };
        Ok(Task { args, conditions, hardware, router, row_bytes, home_bytes })
    }

    /// Dispatch and combine of fixed slots.
    pub fn slots(&self) -> Result<[Timing; 2], CliError> {
        let Conditions { ranks_per_node, tokens, top_k, .. } = self.conditions;
        let shape = SlotShape::new(tokens, top_k, self.row_bytes)?;
        Ok(slots(ranks_per_node, shape, self.home_bytes, &self.hardware)?)
    }

    /// Numbers of nodes that the picture has: powers of two.
    pub fn nodes_of_picture(&self) -> impl Iterator<Item = u32> + use<> {
        let most = if self.args.svg.is_some() { self.args.up_to.min(MOST_RANKS) } else { 0 };
        let each = self.conditions.ranks_per_node;
        (0..32).map(|power| 1 << power).take_while(move |nodes| nodes * each <= most)
    }

    /// What so many nodes decide and who holds their experts, to be timed one way after the other.
    pub fn group(&self, nodes: u32) -> Result<Group<'_>, CliError> {
        let Conditions { experts, top_k, ranks_per_node, tokens, seed, .. } = self.conditions;
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
            None => self.conditions.model.routing(share, rank),
        };
        let drawn = if whole { ranks } else { ranks_per_node };
        let routings = (0..drawn).map(decide).collect::<Result<_, CliError>>()?;
        Ok(Group { task: self, nodes, map, routings })
    }
}

/// A group of so many nodes.
pub struct Group<'a> {
    task: &'a Task<'a>,
    nodes: u32,
    map: ExpertMap,
    routings: Vec<Routing<'static>>,
}

impl Group<'_> {
    /// Rows of the rank that experts give most to. Where one node stands for all, rank i of every node has what ranks i have of
    /// the first node's tokens.
    pub fn busiest_rows(&self) -> u64 {
        let mut rows = vec![0; self.routings.len()];
        let experts = (0..).zip(&self.routings).flat_map(|(source, routing)| {
            routing
                .experts()
                .iter()
                .filter(|&&expert| expert >= 0)
                .map(move |&expert| (source, expert as u32))
        });
        for (source, expert) in experts {
            let rank = self.map.rank_of(self.map.slot_for(source, expert)) as usize;
            rows[rank % self.routings.len()] += 1;
        }
        rows.into_iter().max().unwrap_or(0)
    }

    /// Placed for one way.
    pub fn placed(&self, way: &Way) -> Result<Placed, CliError> {
        let Task { conditions, hardware, row_bytes, home_bytes, .. } = self.task;
        let partial = way.wire.map_or(4, |wire| wire.size() as u64);
        Ok(Placed::new(
            &Case {
                nodes: self.nodes,
                map: &self.map,
                routings: &self.routings,
                layout: way.layout,
                route: way.route,
                order: way.order,
                chunks: way.chunks.unwrap_or(DEFAULT_CHUNKS),
                row_bytes: *row_bytes,
                home_bytes: *home_bytes,
                partial_bytes: u64::from(conditions.hidden) * partial,
                notes: conditions.weights == Beside::Rows,
            },
            hardware,
        )?)
    }
}

fn hosted(hardware: &Hardware) -> bool {
    hardware.executor == Executor::Host
}

/// An option that was given and that slots do not know.
fn no_option_of_slots(args: &SimulateArgs) -> Option<&'static str> {
    let given = [
        ("--svg", args.svg.is_some()),
        ("--routing", args.routing.is_some()),
        ("--experts", args.experts.is_some()),
        ("--layout", args.layout.is_some()),
        ("--route", args.route.is_some()),
        ("--order", args.order.is_some()),
        ("--wire", args.wire.is_some()),
        ("--chunks", !args.chunks.is_empty()),
        ("--weights", args.weights.is_some()),
        ("--seed", args.seed.is_some()),
        ("--all-ranks", args.all_ranks),
    ];
    let slots = args.mode == Room::Slots;
    given.into_iter().find(|&(_, given)| slots && given).map(|(option, _)| option)
}

fn hardware(name: &str) -> Result<Hardware, CliError> {
    if let Ok(known) = name.parse() {
        return Ok(known);
    }
    let text = std::fs::read_to_string(name).map_err(|source| {
        usage!(
            "--hardware {name} is neither a machine known here ({}) nor a file that can be read: {source}",
            Hardware::NAMES.join(", ")
        )
    })?;
    serde_json::from_str(&text).map_err(|source| usage!("{name:?} describes no machine: {source}"))
}
