//! What `route` looks at: the decisions of every rank.

use sidelane::gate::{Pattern, Routing};
use sidelane::plan::ExpertMap;
use sidelane::topology::NodeMap;

use super::args::RouteArgs;
use super::drops::Dropped;
use super::report::Conditions;
use crate::error::CliError;
use crate::launch::node_labels;
use crate::routing::{Routed, Share, Source};

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
        let ranks_per_node = args.nodes.sizes()?;
        let zipf = args.random.then_some(Source::Pattern(Pattern::Zipf(1.0)));
        let (Routed { source, router, .. }, share) = args.router.resolve(&zipf.or(args.routing.clone()))?;
        let nodes = NodeMap::from_labels(&node_labels(&ranks_per_node));
        let Share { experts, top_k, tokens, seed } = share;
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
