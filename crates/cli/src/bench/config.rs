//! Every condition of a measurement, resolved: what was given, what the routing file says, what is the default.
//!
//! The program resolves once and hands the result to every rank that it starts; ranks of other machines are compared.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sidelane::dtype::Wire;
use sidelane::plan::{Order, RowLayout, Strategy};
use sidelane::topology::{NodeMap, Route};

use super::args::ConditionArgs;
use super::room::{Room, RoomMode};
use super::row_type::RowType;
use crate::error::{CliError, usage};
use crate::launch::node_labels;
use crate::options::at_least_one;
use crate::routing::{Share, Source};

/// The conditions of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Number of nodes.
    pub nodes: u32,
    /// Number of ranks of each node.
    pub ranks_per_node: Vec<u32>,
    pub tokens: u32,
    pub hidden: u32,
    pub dtype: RowType,
    pub top_k: u32,
    pub experts: u32,
    pub order: Order,
    pub wire: Wire,
    pub layout: RowLayout,
    pub room: Room,
    pub route: Route,
    pub spans: bool,
    pub strategy: Strategy,
    pub align: u32,
    pub backward: bool,
    pub routing: Source,
    pub rounds: u32,
    pub seed: u64,
}

impl Config {
    /// From the command line and what the recording or the routing file says. Without a number of rounds as many as take
    /// half a minute.
    pub fn resolve(args: &ConditionArgs, backward: bool, rounds: Option<u32>) -> Result<Self, CliError> {
        let ranks_per_node = args.nodes.sizes()?;
        let (routed, share) = args.router.resolve(&args.routing)?;
        let config = Config {
            nodes: ranks_per_node.len() as u32,
            ranks_per_node,
            tokens: share.tokens,
            hidden: args.hidden,
            dtype: args.dtype,
            top_k: share.top_k,
            experts: share.experts,
            order: args.order,
            wire: args.wire,
            layout: args.layout,
            room: Room::default(),
            route: args.route,
            spans: args.spans,
            strategy: args.strategy,
            align: args.align,
            backward,
            routing: routed.source.clone(),
            rounds: rounds.unwrap_or(0),
            seed: share.seed,
        };
        config.check(rounds)?;
        let rounds = rounds.unwrap_or_else(|| config.rounds_in_budget());
        let room = Room::resolve(args, &config, &routed.router)?;
        if config.strategy == Strategy::Gather && room.mode().slots().is_some() {
            return Err(usage!("--mode slots is for --strategy exchange"));
        }
        Ok(Config { rounds, room, ..config })
    }

    fn check(&self, rounds: Option<u32>) -> Result<(), CliError> {
        const UNIT: u64 = 16;
        at_least_one(&[
            ("--hidden", self.hidden),
            ("--align", self.align),
            ("--rounds", rounds.unwrap_or(1)),
        ])?;
        let (hidden, dtype, bytes) = (self.hidden, self.dtype.element(), self.row_bytes());
        if !bytes.is_multiple_of(UNIT) {
            return Err(usage!(
                "a row of {hidden} x {dtype} has {bytes} bytes: it must be a multiple of {unit}",
                unit = UNIT
            ));
        }
        if self.top_k > self.experts {
            return Err(usage!(
                "--top-k is {top_k}, but there are only {experts} experts",
                top_k = self.top_k,
                experts = self.experts
            ));
        }
        if !self.wire.carries(dtype) {
            return Err(usage!(
                "--wire {wire} is for rows of {wire}, and these are {dtype}",
                wire = self.wire
            ));
        }
        if self.spans && (self.layout, self.route) != (RowLayout::RankMajor, Route::Pxn) {
            return Err(usage!("--spans is for --layout rank-major --route pxn"));
        }
        if self.spans && self.strategy == Strategy::Gather {
            return Err(usage!("--spans is for --strategy exchange"));
        }
        Ok(())
    }

    /// Whether others can do the same.
    pub fn check_peers(&self) -> Result<(), CliError> {
        for (option, usual) in [
            ("--dtype", self.dtype == RowType::Bf16),
            ("--layout", self.layout == RowLayout::ExpertMajor),
            ("--order", self.order == Order::Expert),
            ("--mode", self.room.mode == RoomMode::Eager),
            ("--align", self.align == 1),
        ] {
            if !usual {
                return Err(usage!(
                    "{option} is not for --peers: they move bf16 rows by expert, as many as there are, and add them up by expert"
                ));
            }
        }
        let (experts, ranks) = (self.experts, self.ranks());
        if experts.is_multiple_of(ranks) {
            Ok(())
        } else {
            Err(usage!("--peers need a number of experts that {ranks} ranks can share evenly, not {experts}"))
        }
    }

    /// What all ranks must have in common: all this, and what the routing file holds.
    pub fn conditions(&self) -> Result<Value, CliError> {
        let mut conditions = serde_json::to_value(self).expect("strings, numbers and lists are always JSON");
        conditions["routing_file"] = self.routing.digest()?.into();
        Ok(conditions)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks_per_node.iter().sum()
    }

    /// What each rank takes of the routing.
    pub fn share(&self) -> Share {
        Share { experts: self.experts, top_k: self.top_k, tokens: self.tokens, seed: self.seed }
    }

    /// Which ranks share a node.
    pub fn node_map(&self) -> NodeMap {
        NodeMap::from_labels(&node_labels(&self.ranks_per_node))
    }

    /// Type of partial sums, if the order of addition makes some.
    pub fn partials(&self) -> Option<Wire> {
        (self.order != Order::Expert).then_some(self.wire)
    }

    /// Bytes of one row that comes back.
    pub fn row_bytes(&self) -> u64 {
        self.dtype.bytes(self.hidden).1
    }

    /// Bytes of one row that is dispatched.
    pub fn sent_bytes(&self) -> u64 {
        self.dtype.bytes(self.hidden).0
    }

    /// As many rounds as take about half a minute on a slow laptop, at most enough for a p99, rounded down to one
    /// digit. A function of the conditions alone: the same command runs the same rounds everywhere.
    fn rounds_in_budget(&self) -> u32 {
        const BUDGET_BYTES: u64 = 200_000_000_000;
        let passes = if self.backward { 8 } else { 4 };
        let rows = u64::from(self.ranks()) * u64::from(self.tokens) * u64::from(self.top_k);
        let bytes = rows.saturating_mul(self.row_bytes()).saturating_mul(passes);
        let rounds = (BUDGET_BYTES / bytes.max(1)).clamp(10, 1000) as u32;
        let digit = 10u32.pow(rounds.ilog10());
        rounds / digit * digit
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
