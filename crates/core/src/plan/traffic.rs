//! Traffic of a dispatch and of its return, counted from the plan of one rank.
//!
//! ```text
//!   logical  a row for each (token, expert)    to itself | to its node | to other nodes
//!   sent     rows that the route makes of it   to itself | to its node | over nets ---> relayed, by the relay there
//! ```
//!
//! An executor's own count equals these numbers, to the byte.

use super::{
    Bins, DispatchLayout, PlanContext, RelayPlan, SortedRouting, SumOrder, refill, vec_memory_usage,
};
use crate::topology::{Paths, Route};

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
    pub combine_row_bytes: u64,
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
            combine_row_bytes: frame.sizing.return_bytes,
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
    pub fn return_bytes(&self, order: SumOrder, partial_bytes: u64) -> u64 {
        match order.per_partial(self.remote_ranks, self.remote_nodes) {
            Some(partials) if self.route == Route::Pxn => partials * partial_bytes,
            _ => self.logical.remote * self.combine_row_bytes,
        }
    }
}

/// The tokens of each block, each once, and the row of each entry, in the order of
/// [`Paths::relays`]. On the direct route every entry is a row of its own and nothing is listed.
///
/// Reused from call to call: after the first call of a size nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct InterNodeRows {
    /// Token of each row, block after block.
    pub tokens: Vec<u32>,
    /// First of `tokens` of each block; one more than there are blocks.
    pub starts: Vec<u32>,
    /// Row of each entry in its block, by bin and then token, block after block.
    pub index: Vec<u32>,
    /// First of `index` of each block; one more than there are blocks.
    pub index_starts: Vec<u32>,
    /// Per token of the block that is being made: its row.
    row_of: Vec<u32>,
    /// A bit per token: whether it is of that block.
    marks: Vec<u64>,
}

impl InterNodeRows {
    /// Bytes that its tables hold, used or kept for the next call.
    pub fn memory_usage(&self) -> usize {
        let words = [&self.tokens, &self.starts, &self.index, &self.index_starts, &self.row_of];
        words.map(vec_memory_usage).iter().sum::<usize>() + vec_memory_usage(&self.marks)
    }

    /// Lists what crosses.
    pub fn fill(&mut self, bins: &Bins, paths: &Paths, sorted: &SortedRouting) {
        self.tokens.clear();
        self.index.clear();
        refill(&mut self.starts, 1, 0);
        refill(&mut self.index_starts, 1, 0);
        for relay in paths.relays() {
            if paths.route() == Route::Pxn {
                self.add(bins, paths.served_by(relay), sorted);
            }
            self.starts.push(self.tokens.len() as u32);
            self.index_starts.push(self.index.len() as u32);
        }
    }

    /// Many nodes mean many small blocks, so each block looks at a bit per token, not at the
    /// tokens.
    fn add(&mut self, bins: &Bins, served: &[u32], sorted: &SortedRouting) {
        let entries = || served.iter().map(|&rank| sorted.tokens_of(bins.of(rank)));
        let tokens_here = sorted.tokens_here() as usize;
        refill(&mut self.marks, tokens_here.div_ceil(64), 0);
        for &token in entries().flatten() {
            self.marks[token as usize / 64] |= 1 << (token % 64);
        }
        // Numbers that the last block left there are not read.
        self.row_of.resize(self.row_of.len().max(tokens_here), 0);
        let mut row = 0;
        for (nth, &marked) in (0..).zip(&self.marks) {
            let mut left = marked;
            while left != 0 {
                let token = nth * 64 + left.trailing_zeros();
                self.row_of[token as usize] = row;
                self.tokens.push(token);
                (row, left) = (row + 1, left & (left - 1));
            }
        }
        for tokens in entries() {
            self.index.extend(tokens.iter().map(|&token| self.row_of[token as usize]));
        }
    }

    /// Rows of the `nth` block.
    pub fn rows(&self, nth: usize) -> u32 {
        self.starts[nth + 1] - self.starts[nth]
    }

    /// Token of each row of the `nth` block.
    pub fn tokens_of(&self, nth: usize) -> &[u32] {
        &self.tokens[self.starts[nth] as usize..self.starts[nth + 1] as usize]
    }

    /// Row of each entry of the `nth` block.
    pub fn index_of(&self, nth: usize) -> &[u32] {
        &self.index[self.index_starts[nth] as usize..self.index_starts[nth + 1] as usize]
    }

    /// Both, to put them in another order.
    pub(super) fn block_mut(&mut self, nth: usize) -> (&mut [u32], &mut [u32]) {
        let tokens = self.starts[nth] as usize..self.starts[nth + 1] as usize;
        let index = self.index_starts[nth] as usize..self.index_starts[nth + 1] as usize;
        (&mut self.tokens[tokens], &mut self.index[index])
    }

    /// Writes, per rank, how many rows this rank puts into its staging. Empty where nothing is
    /// staged.
    pub fn staged(&self, paths: &Paths, into: &mut Vec<u32>) {
        into.resize(into.len() + paths.staged_ranks() as usize, 0);
        let first = into.len() - paths.staged_ranks() as usize;
        for (nth, relay) in paths.relays().enumerate().filter(|_| paths.staged_ranks() > 0) {
            into[first + relay as usize] = self.rows(nth);
        }
    }
}
