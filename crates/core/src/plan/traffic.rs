//! Traffic of a dispatch and of its return, counted from the plan of one rank.
//!
//! ```text
//!   logical  a row for each (token, expert)    to itself | to its node | to other nodes
//!   sent     rows that the route makes of it   to itself | to its node | over nets ---> relayed, by the relay there
//! ```
//!
//! An executor's own count equals these numbers, to the byte.

use super::{DispatchLayout, PlanContext, RelayPlan, SortedRouting, SumOrder, refill};
use crate::topology::Route;

/// Rows, by how far they go. Closed: a row stays at its rank, stays in its node, or leaves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RowsByDistance {
    /// From a rank to itself.
    pub own: u64,
    /// To other ranks of its node.
    pub local: u64,
    /// To other nodes.
    pub remote: u64,
}

/// The rows of one dispatch at one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Traffic {
    /// (token, expert) pairs, by where the expert is: the rows that would move without merging.
    /// Rank-major, (token, rank) pairs.
    pub logical: RowsByDistance,
    /// (token, rank) pairs whose rank is on another node.
    pub remote_ranks: u64,
    /// (token, node) pairs whose node is another.
    pub remote_nodes: u64,
    /// Rows that this rank puts, those of zeros included.
    pub sent: RowsByDistance,
    /// Rows that it relays to the ranks of its node, itself included, with rows of zeros.
    pub relayed: u64,
    /// Copies that relay them: one for each row or, in spans, for each span. Zeros are not copied.
    pub copies: u64,
    /// Rows that it then copies to its own experts, after an all-gather, with rows of zeros.
    pub regrouped: u64,
    /// Bytes of a row that goes out.
    pub row_bytes: u64,
    /// Bytes of a returned row.
    pub home_row_bytes: u64,
    /// How rows cross, which determines what returns.
    pub route: Route,
}

impl Traffic {
    /// Counts the rows of this sorted and placed dispatch, at a rank that relays `forward`. `seen`
    /// is scratch.
    #[doc(hidden)]
    pub fn count(
        frame: &PlanContext,
        sorted: &SortedRouting,
        layout: &DispatchLayout,
        forward: Option<&RelayPlan>,
        seen: &mut Vec<u32>,
    ) -> Self {
        const NO_RANK: u32 = u32::MAX;
        let (bins, paths) = (frame.bins, frame.paths);
        let (nodes, route) = (paths.nodes(), paths.route());
        let mut traffic = Traffic {
            row_bytes: frame.sizing.row_bytes,
            home_row_bytes: frame.sizing.home_bytes,
            route,
            ..Traffic::default()
        };
        // Per token: the last rank that it was seen to go to.
        refill(seen, sorted.tokens_here() as usize, NO_RANK);
        for (node, &rank) in (0..nodes.nodes()).flat_map(|n| nodes.members(n).iter().map(move |r| (n, r))) {
            let tokens = sorted.tokens_of(bins.of(rank));
            let runs = layout.runs_to(rank).map(|run| &layout.runs[run as usize]);
            let rows: u64 = runs.map(|run| u64::from(run.count) + u64::from(run.pad)).sum();
            let hop = |hops: &mut RowsByDistance, rows| match (rank == paths.me(), paths.same_node(rank)) {
                (true, _) => hops.own += rows,
                (_, true) => hops.local += rows,
                (_, false) => hops.remote += rows,
            };
            hop(&mut traffic.logical, tokens.len() as u64);
            hop(&mut traffic.sent, rows);
            for &token in tokens.iter().filter(|_| !paths.same_node(rank)) {
                let last = std::mem::replace(&mut seen[token as usize], rank);
                traffic.remote_ranks += u64::from(last != rank);
                traffic.remote_nodes += u64::from(last == NO_RANK || nodes.node_of(last) != node);
            }
        }
        if route == Route::Pxn {
            traffic.sent.remote = layout.blocks.iter().map(|block| u64::from(block.rows)).sum();
            let blocks = forward.map_or(&[][..], |forward| &forward.blocks);
            let segments = blocks.iter().flat_map(|block| &block.segments);
            traffic.relayed = segments.map(|to| u64::from(to.count) + u64::from(to.pad)).sum();
            traffic.copies = forward.map_or(0, RelayPlan::copies);
        }
        traffic
    }

    /// Bytes that return to this rank over the net in a return of this order, if a partial sum has
    /// `partial_bytes` bytes: where relays sum, one partial for each (token, rank) or (token,
    /// node); else a row for each (token, expert).
    pub fn home_bytes(&self, order: SumOrder, partial_bytes: u64) -> u64 {
        match order.per_partial(self.remote_ranks, self.remote_nodes) {
            Some(partials) if self.route == Route::Pxn => partials * partial_bytes,
            _ => self.logical.remote * self.home_row_bytes,
        }
    }
}
