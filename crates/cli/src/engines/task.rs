//! What `engines` looks at: the decisions of every rank, and what a row is.

use serde::Serialize;
use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::ExpertMap;
use sidelane::topology::NodeMap;

use super::args::EnginesArgs;
use crate::bench::RowType;
use crate::error::CliError;
use crate::launch::node_labels;
use crate::options::at_least_one;
use crate::routing::{Routed, Share, Source};

/// What was looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conditions {
    pub routing: Source,
    pub experts: u32,
    pub top_k: u32,
    pub ranks_per_node: Vec<u32>,
    /// Of each rank.
    pub tokens: u32,
    pub hidden: u32,
    pub dtype: RowType,
    pub seed: u64,
    /// Microseconds of a copy, however small, and GB/s of a long one.
    pub per_copy: f64,
    pub speed: f64,
}

/// Decisions, and who has them.
pub struct Task {
    pub conditions: Conditions,
    pub map: ExpertMap,
    pub nodes: NodeMap,
    pub routings: Vec<Routing<'static>>,
    /// Bytes of a row that goes out, and of one that comes home.
    pub row_bytes: u64,
    pub home_bytes: u64,
}

impl Task {
    /// From the command line and what the recording or the routing file says.
    pub fn resolve(args: &EnginesArgs) -> Result<Self, CliError> {
        let &EnginesArgs { hidden, dtype, per_copy, speed, .. } = args;
        let ranks_per_node = args.nodes.sizes()?;
        let (Routed { source: routing, router, .. }, share) = args.router.resolve(&args.routing)?;
        at_least_one(&[("--hidden", hidden)])?;
        let nodes = NodeMap::from_labels(&node_labels(&ranks_per_node));
        let Share { experts, top_k, tokens, seed } = share;
        let (row_bytes, home_bytes) = dtype.bytes(hidden);
        if let Some(&seen) = [row_bytes, home_bytes].iter().find(|bytes| !bytes.is_multiple_of(16)) {
            let (parameter, expected) = ("row bytes", "a multiple of 16");
            return Err(PlanError::BadParameter { parameter, seen, expected }.into());
        }
        Ok(Task {
            map: ExpertMap::contiguous(experts, nodes.ranks())?,
            routings: (0..nodes.ranks()).map(|rank| router.routing(share, rank)).collect::<Result<_, _>>()?,
            nodes,
            row_bytes,
            home_bytes,
            conditions: Conditions {
                routing,
                experts,
                top_k,
                ranks_per_node,
                tokens,
                hidden,
                dtype,
                seed,
                per_copy,
                speed,
            },
        })
    }

    /// Bytes of a slot for all tokens: their rows and, in as many rows as it needs, a header of their choices.
    pub fn slot_bytes(&self) -> u64 {
        let Conditions { tokens, top_k, .. } = self.conditions;
        let header = HEAD + u64::from(tokens) * u64::from(top_k) * CHOICE;
        (header.div_ceil(self.row_bytes) + u64::from(tokens)) * self.row_bytes
    }
}

/// Bytes of an expert id and a weight.
const CHOICE: u64 = 8;
/// Bytes of what a slot says of itself.
const HEAD: u64 = 64;
