//! Placement: the numbers that a dispatch is made of, and that its handle keeps.
//!
//! At a rank, the rows of each of its bins start at, and are padded to, a multiple of `align` rows:
//!
//! ```text
//!   | bin p                                        | bin p + 1 ...
//!   | source 0 | source 1 | ... | source R-1 | pad |
//!              ^ begin[p] + below[p]: where this rank's rows of bin p land
//! ```
//!
//! The pad is written by the last source that has rows for the bin, so no kernel clears anything at
//! the landing.

mod runs;
mod terms;

pub(super) use runs::segment;

use super::block::Block;
use super::counts::padded;
use super::sorted::vec_memory_usage;
use super::{Bins, Counts, InterNodeRows, ReceiveMode, ReceiveSizes, RowBuffer, RowSizes, SortedRouting};
use crate::topology::Paths;

/// Rows that land side by side: `rows[first..first + count]`, then `pad` rows of zeros, from row
/// `to_row` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RowRun {
    /// First row at the destination.
    pub to_row: u32,
    /// First entry in the index array.
    pub first: u32,
    /// Entries.
    pub count: u32,
    /// Rows of zeros that follow.
    pub pad: u32,
}

/// One summand of an output row: row `row` of the chunk that `owner` offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Summand {
    /// Owner of the chunk: the rank that made the row or, on another node, the relay that returns
    /// it.
    pub owner: u32,
    /// Row in the chunk.
    pub row: u32,
}

/// The placement of one dispatch, as one rank sees it.
#[derive(Clone, Debug, Default)]
pub struct DispatchLayout {
    /// Tokens of this rank.
    pub tokens: u32,
    /// Choices per token.
    pub top_k: u32,
    /// Rows that runs index into: the token of each entry by destination bin, then the tokens of
    /// each block. Empty if rows go `whole`.
    pub rows: Vec<u32>,
    /// Runs are pieces of the source itself: every row goes to every rank, with one note per row;
    /// or rows lie packed.
    pub whole: bool,
    /// Runs to all destinations, by destination, then those of the blocks, chunk by chunk.
    pub runs: Vec<RowRun>,
    /// First run of each destination; one more than there are ranks.
    pub run_starts: Vec<u32>,
    /// The blocks for this rank's relays, in the order of [`Paths::relays`].
    pub blocks: Vec<Block>,
    /// Per block: its first run, one for each chunk.
    pub block_runs: Vec<u32>,
    /// Summands of each token, in summation order.
    pub terms: Vec<Summand>,
    /// First term of each token; one more than there are tokens.
    pub term_starts: Vec<u32>,
    /// For each term its place in `[tokens, top_k]`.
    pub choices: Vec<u32>,
    /// Where relays sum: the summands of each token, including those partials. Empty otherwise:
    /// then `terms` are.
    pub sums: Vec<Summand>,
    /// First of `sums` of each token; empty with `sums`.
    pub sum_starts: Vec<u32>,
    /// For each of `sums` its place in `[tokens, top_k]`; of a partial, that of one of its rows.
    pub sum_choices: Vec<u32>,
    /// With [`SumOrder::Rank`](crate::plan::SumOrder) and
    /// [`SumOrder::Node`](crate::plan::SumOrder): lengths of groups of summands that are summed
    /// first, or [`PARTIAL`](crate::dtype::PARTIAL) for one that a relay has summed. Empty
    /// otherwise.
    pub groups: Vec<u32>,
    /// First group of each token; empty with `groups`.
    pub group_starts: Vec<u32>,
    /// Rank whose memory holds the chunk of each owner when it is summed: the owner itself where
    /// this rank can read its memory.
    pub held_by: Vec<u32>,
    /// The chunk of each owner as this rank reads it: all its rows or, where the chunk is returned,
    /// only this rank's rows (or partials).
    pub chunks: Vec<RowBuffer>,
    /// Rows that land at each rank, pads counted.
    pub sizes: Vec<u32>,
    /// Rows that this rank stages, to hand them on.
    pub staged: u32,
    /// Rows of this rank's bins, pads counted.
    pub landed: u32,
    /// Per local bin: first row.
    pub begin: Vec<u32>,
    /// Per local bin: rows; in fixed slots, all of them.
    pub rows_per_bin: Vec<i64>,
    /// Per local bin: rows, pad counted.
    pub padded_per_bin: Vec<i64>,
    /// Where a row stands for several choices: what a fetch of one word per choice reads, and the
    /// places of those. Empty otherwise: then `terms` and `choices` are.
    pub fetched: Vec<Summand>,
    /// For each of `fetched` its place in `[tokens, top_k]`.
    pub places: Vec<u32>,
    /// Per token: where its next term goes, while terms are placed.
    cursors: Vec<u32>,
    /// Per bin: its first row in the chunk of returned rows.
    home_rows: Vec<u32>,
    /// Per term: the partial sum it belongs to.
    partials: Vec<u32>,
    /// Per term that a relay sums: which of those that it brings.
    home_partials: Vec<u32>,
    /// Per bin: the row of the token whose fetches are placed.
    row_of_bin: Vec<Summand>,
}

/// Constants of all calls of one `ExpertParallel`.
#[derive(Clone, Copy, Debug)]
pub struct PlanContext<'a> {
    /// What rows are counted by, and the order of sums.
    pub bins: &'a Bins,
    /// This rank among its nodes.
    pub paths: Paths<'a>,
    /// Bins start at multiples of this many rows.
    pub align: u32,
    /// In how many parts a block goes to its relay.
    pub chunks: u8,
    /// Sizes of what moves.
    pub sizing: RowSizes,
    /// How much a rank receives.
    pub mode: ReceiveMode,
}

impl DispatchLayout {
    /// Places the sorted entries.
    pub fn fill(
        &mut self,
        frame: &PlanContext,
        (sorted, crossing): (&SortedRouting, &InterNodeRows),
        top_k: u32,
        counts: &Counts,
        sizes: &ReceiveSizes,
    ) {
        self.tokens = sorted.token_starts.len() as u32 - 1;
        self.top_k = top_k;
        self.start(sorted);
        self.sizes.clone_from(&sizes.rows);
        self.staged = sizes.staged_at(frame.paths.me());
        self.place_runs(frame, sorted, counts, sizes);
        self.place_blocks(frame, (sorted, crossing), counts, sizes);
        self.place_terms(frame, sorted, counts, sizes);
        self.place_groups(frame, crossing);
        self.place_fetched(frame, sorted);
        self.place_landed(frame, counts, sizes);
    }

    fn place_landed(&mut self, frame: &PlanContext, counts: &Counts, sizes: &ReceiveSizes) {
        let me = frame.paths.me();
        self.landed = sizes.rows[me as usize];
        self.begin.clear();
        self.rows_per_bin.clear();
        self.padded_per_bin.clear();
        for bin in frame.bins.of(me).map(|bin| bin as usize) {
            self.begin.push(sizes.begin[bin]);
            let room = self.landed.saturating_sub(sizes.begin[bin]);
            self.rows_per_bin.push(i64::from(counts.total[bin].min(room)));
            self.padded_per_bin.push(i64::from(padded(counts.total[bin], frame.align).min(room)));
        }
    }

    /// Bytes that its tables hold, used or kept for the next call.
    pub fn held(&self) -> usize {
        let words = [
            &self.rows,
            &self.run_starts,
            &self.block_runs,
            &self.term_starts,
            &self.choices,
            &self.sum_starts,
            &self.sum_choices,
            &self.groups,
            &self.group_starts,
            &self.held_by,
            &self.sizes,
            &self.begin,
            &self.places,
            &self.cursors,
            &self.home_rows,
            &self.partials,
            &self.home_partials,
        ];
        let terms = [&self.terms, &self.sums, &self.fetched, &self.row_of_bin];
        let others = vec_memory_usage(&self.runs)
            + vec_memory_usage(&self.chunks)
            + vec_memory_usage(&self.rows_per_bin)
            + vec_memory_usage(&self.padded_per_bin);
        let blocks: usize = self.blocks.iter().map(Block::held).sum();
        let words: usize = words.into_iter().map(vec_memory_usage).sum();
        words
            + terms.into_iter().map(vec_memory_usage).sum::<usize>()
            + others
            + vec_memory_usage(&self.blocks)
            + blocks
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.run_starts.len() as u32 - 1
    }
}
