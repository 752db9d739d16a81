//! What `route` looks at: the decisions of every rank.

use sidelane::gate::Routing;
use sidelane::plan::ExpertMap;
use sidelane::topology::NodeMap;

use super::args::RouteArgs;
use super::drops::Dropped;
use super::report::Conditions;
use crate::error::{CliError, usage};
use crate::launch::{node_labels, node_sizes_or};
use crate::routing::{Routed, Share};

/// Where the curves of the picture begin, end, and by how much they step.
const CURVES: (u32, u32, f64) = (4, 64, 1.0 / 16.0);

/// Decisions, and who has them.
pub struct Task {
    pub conditions: Conditions,
    pub map: ExpertMap,
    pub nodes: NodeMap,
    pub routings: Vec<Routing<'static>>,
    factors: Vec<f64>,
}

impl Task {
    /// From the command line and what the recording or the routing file says.
    pub fn resolve(args: &RouteArgs) -> Result<Self, CliError> {
        let ranks_per_node = node_sizes_or((2, 4), args.nodes, &args.ranks_per_node)?;
        let (zipf, tokens, seed) = ("zipf:1.0", args.tokens, args.seed);
        let asked = if args.random { zipf.parse().ok() } else { args.routing.clone() };
        let Routed { source, router, experts, top_k } = Routed::resolve(asked, args.experts, args.top_k)?;
        if !args.random {
            source.say_if_drawn(args.routing.as_ref());
        }
        for (option, value) in [("--tokens", tokens), ("--experts", experts), ("--top-k", top_k)] {
            if value == 0 {
                return Err(usage!("{option} must be at least 1"));
            }
        }
        let nodes = NodeMap::from_labels(&node_labels(&ranks_per_node));
        let share = Share { experts, top_k, tokens, seed };
        let routings =
            (0..nodes.ranks()).map(|rank| router.routing(share, rank)).collect::<Result<_, _>>()?;
        Ok(Task {
            map: ExpertMap::contiguous(experts, nodes.ranks())?,
            conditions: Conditions { routing: source, experts, top_k, ranks_per_node, tokens, seed },
            nodes,
            routings,
            factors: args.factors.clone(),
        })
    }

    /// What the factors of the table would cost.
    pub fn table(&self) -> Result<Vec<Dropped>, CliError> {
        self.factors.iter().map(|&factor| self.dropped(factor)).collect()
    }

    /// What the factors of the picture would cost.
    pub fn curves(&self) -> Result<Vec<Dropped>, CliError> {
        let (first, last, step) = CURVES;
        (first..=last).map(|n| self.dropped(f64::from(n) * step)).collect()
    }

    fn dropped(&self, factor: f64) -> Result<Dropped, CliError> {
        Ok(Dropped::at(factor, self.conditions.experts, &self.routings)?)
    }
}
