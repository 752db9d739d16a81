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
//! the landing. A layout has two halves:
//!
//! ```text
//!   out    runs to each destination, blocks for the relays          rows -> places
//!   back   terms per token in the order of the sum, words per choice     places -> sums, fetches
//! ```

use super::counts::padded;
use super::relay_plan::{Block, Segment};
use super::sorted_routing::NONE;
use super::{
    Bins, Counts, InterNodeRows, ReceiveMode, ReceiveSizes, RowBuffer, RowSizes, SortedRouting, refill,
    vec_memory_usage,
};
use crate::dtype::PARTIAL;
use crate::topology::{Paths, Route};

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
    /// Runs are pieces of the source itself: every row goes to every rank, each with its metadata;
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
    /// Where ranks sum a token's rows before they return, per rank: see
    /// [`RankSums`](super::RankSums).
    pub rank_sums: Vec<RowRun>,
    /// Rows that this rank stages, to relay them.
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
    returned_rows: Vec<u32>,
    /// Per term: the partial sum it belongs to.
    partials: Vec<u32>,
    /// Per term that a relay sums: which of those that it brings.
    returned_partials: Vec<u32>,
    /// Per bin: the row of the token whose fetches are placed.
    row_of_bin: Vec<Summand>,
}

/// Constants of all calls of one `ExpertParallel`.
#[derive(Clone, Copy, Debug)]
pub struct PlanContext<'a> {
    /// Bins that rows are counted by, and the order of sums.
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
    /// Places the sorted entries, and what each token's sum adds up.
    pub fn fill(
        &mut self,
        frame: &PlanContext,
        (sorted, crossing): (&SortedRouting, &InterNodeRows),
        top_k: u32,
        counts: &Counts,
        sizes: &ReceiveSizes,
    ) {
        self.fill_transfers(frame, (sorted, crossing), top_k, counts, sizes);
        self.place_terms(frame, sorted, counts, sizes);
        self.place_groups(frame, crossing);
        self.place_fetched(frame, sorted);
    }

    /// Places the sorted entries alone. That is enough on a device, where kernels sum by the
    /// [places](SortedRouting::places) of choices: no summand is listed.
    pub fn fill_transfers(
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
    pub fn memory_usage(&self) -> usize {
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
            &self.returned_rows,
            &self.partials,
            &self.returned_partials,
        ];
        let terms = [&self.terms, &self.sums, &self.fetched, &self.row_of_bin];
        let others = vec_memory_usage(&self.runs)
            + vec_memory_usage(&self.rank_sums)
            + vec_memory_usage(&self.chunks)
            + vec_memory_usage(&self.rows_per_bin)
            + vec_memory_usage(&self.padded_per_bin);
        let blocks: usize = self.blocks.iter().map(Block::memory_usage).sum();
        let words: usize = words.into_iter().map(vec_memory_usage).sum();
        words
            + terms.into_iter().map(vec_memory_usage).sum::<usize>()
            + others
            + vec_memory_usage(&self.blocks)
            + blocks
    }

    /// Rows of this rank's bins without pads: it makes no more sums for others.
    pub fn received(&self) -> u32 {
        self.rows_per_bin.iter().sum::<i64>() as u32
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.run_starts.len() as u32 - 1
    }
}

impl DispatchLayout {
    /// Rows and metadata lie packed, those of bin `b` from row `starts[b]` on: runs are pieces of
    /// these. Of a bin without enough room the first rows are sent.
    pub fn pack(&mut self, sorted: &SortedRouting, starts: &[u32]) {
        for run in self.runs.iter_mut().filter(|run| run.count > 0) {
            let bin = sorted.starts.partition_point(|&start| start <= run.first) - 1;
            run.first = starts[bin];
        }
        self.rows.clear();
        self.whole = true;
    }

    pub(super) fn start(&mut self, sorted: &SortedRouting) {
        self.whole = sorted.whole;
        self.rows.clear();
        if !self.whole {
            self.rows.extend_from_slice(&sorted.tokens);
        }
    }

    fn place_runs(
        &mut self,
        frame: &PlanContext,
        sorted: &SortedRouting,
        counts: &Counts,
        sizes: &ReceiveSizes,
    ) {
        self.runs.clear();
        refill(&mut self.run_starts, 1, 0);
        for rank in 0..frame.bins.ranks() {
            if frame.paths.same_node(rank) || frame.paths.route() == Route::Direct {
                let bins = frame.bins.of(rank);
                let first = if self.whole { sorted.starts[bins.start as usize] } else { 0 };
                for bin in bins {
                    let Segment { to_row, count, pad } = segment(frame, bin as usize, sorted, counts, sizes);
                    if count + pad > 0 {
                        let first = sorted.starts[bin as usize] - first;
                        self.runs.push(RowRun { to_row, first, count, pad });
                    }
                }
            }
            self.run_starts.push(self.runs.len() as u32);
        }
    }

    /// Counts that each relay is sent and, where it relays rows, the tokens that it gets.
    pub(super) fn place_blocks(
        &mut self,
        frame: &PlanContext,
        (sorted, crossing): (&SortedRouting, &InterNodeRows),
        counts: &Counts,
        sizes: &ReceiveSizes,
    ) {
        let (paths, bins) = (frame.paths, frame.bins);
        refill(&mut self.returned_rows, bins.count() as usize, 0);
        self.blocks.resize_with(paths.relays().count(), Block::default);
        self.block_runs.clear();
        for ((nth, relay), block) in paths.relays().enumerate().zip(&mut self.blocks) {
            let served = paths.served_by(relay);
            block.landed.clear();
            block.landed.extend(served.iter().map(|&rank| sizes.rows[rank as usize]));
            block.segments.clear();
            let mut entries = 0;
            for bin in served.iter().flat_map(|&rank| bins.of(rank)).map(|bin| bin as usize) {
                self.returned_rows[bin] = entries;
                entries += sorted.counts[bin];
                block.segments.push(segment(frame, bin, sorted, counts, sizes));
            }
            self.block_runs.push(self.runs.len() as u32);
            block.index.clear();
            (block.rows, block.first) = (entries, 0);
            if paths.route() == Route::Pxn {
                (block.rows, block.first) =
                    (crossing.rows(nth), counts.below[(bins.count() + relay) as usize]);
                block.index.extend_from_slice(crossing.index_of(nth));
                let first = self.rows.len() as u32;
                if !self.whole {
                    self.rows.extend_from_slice(crossing.tokens_of(nth));
                }
                self.runs.extend((1..=frame.chunks).map(|chunk| {
                    let rows = Block::chunk(block.rows, chunk, frame.chunks);
                    let count = rows.len() as u32;
                    RowRun { to_row: rows.start, first: first + rows.start, count, pad: 0 }
                }));
            }
        }
    }

    /// The runs to one destination: none where a relay does it.
    pub fn runs_to(&self, rank: u32) -> std::ops::Range<u32> {
        self.run_starts[rank as usize]..self.run_starts[rank as usize + 1]
    }

    /// The runs of a rank's rows in a return: as they left or, with `sums`, the sums that the rank
    /// made of them.
    pub fn returned(&self, rank: u32, sums: bool) -> &[RowRun] {
        let runs = self.runs_to(rank);
        match sums {
            true => std::slice::from_ref(&self.rank_sums[rank as usize]),
            false => &self.runs[runs.start as usize..runs.end as usize],
        }
    }

    /// The first of the rows that a relay returns, where rows return to the places where they lay
    /// packed. These are rows for that rank or, with blocks, which pack a token once, rows behind
    /// those of local peers and of the blocks of relays before it. With `sums` those return.
    pub fn returned_at(&self, paths: &Paths, relay: u32, sums: bool) -> u32 {
        if sums {
            return paths.served_by(relay).first().map_or(0, |&rank| self.rank_sums[rank as usize].first);
        }
        let runs = |rank| {
            let runs = self.runs_to(rank);
            &self.runs[runs.start as usize..runs.end as usize]
        };
        if paths.route() == Route::Direct {
            return runs(relay).iter().find(|run| run.count > 0).map_or(0, |run| run.first);
        }
        let near = (0..paths.ranks()).filter(|&rank| paths.same_node(rank)).flat_map(runs);
        let before = paths.relays().zip(&self.blocks).take_while(|(other, _)| *other != relay);
        near.map(|run| run.count).sum::<u32>() + before.map(|(_, block)| block.entries()).sum::<u32>()
    }
}

/// Where this rank's entries of one bin land.
pub(super) fn segment(
    frame: &PlanContext,
    bin: usize,
    sorted: &SortedRouting,
    counts: &Counts,
    sizes: &ReceiveSizes,
) -> Segment {
    let (count, below, total) = (sorted.counts[bin], counts.below[bin], counts.total[bin]);
    let (begin, rest) = (sizes.begin[bin], padded(total, frame.align) - total);
    let pad = match frame.mode.slots() {
        // Unused slots are this rank's; what alignment adds is the last rank's.
        Some(slots) => slots - count + if below + slots == total { rest } else { 0 },
        None if count > 0 && below + count == total => rest,
        None => 0,
    };
    let end = sizes.rows[frame.bins.rank_of(bin as u32) as usize];
    Segment { to_row: begin + below, count, pad: pad.min(end.saturating_sub(begin + below + count)) }
}

impl DispatchLayout {
    fn place_terms(
        &mut self,
        frame: &PlanContext,
        sorted: &SortedRouting,
        counts: &Counts,
        sizes: &ReceiveSizes,
    ) {
        let (bins, paths) = (frame.bins, frame.paths);
        self.held_by.clear();
        self.chunks.clear();
        for rank in 0..bins.ranks() {
            let near = paths.same_node(rank);
            self.held_by.push(if near { rank } else { paths.me() });
            let rows = if near { sizes.rows[rank as usize] } else { 0 };
            self.chunks.push(frame.sizing.offer(rows));
        }
        for (relay, block) in paths.relays().zip(&self.blocks) {
            let entries = block.entries();
            self.chunks[relay as usize] = RowBuffer { rows: entries, ..frame.sizing.offer(entries) };
        }
        self.term_starts.clone_from(&sorted.token_starts);
        let entries = sorted.entries();
        refill(&mut self.terms, entries, Summand::default());
        refill(&mut self.choices, entries, 0);
        let has_partials = bins.order().has_partials();
        refill(&mut self.partials, if has_partials { entries } else { 0 }, 0);
        self.cursors.clone_from(&sorted.token_starts);
        let DispatchLayout { terms, choices, partials, cursors, returned_rows, .. } = self;
        let (terms, choices, partials) = (&mut terms[..], &mut choices[..], &mut partials[..]);
        let cursors = &mut cursors[..];
        // Bin by bin in the order of the sum: each token's terms come out in that order without a
        // comparison.
        for bin in bins.in_order().iter().map(|&bin| bin as usize) {
            let owner = paths.relay_to(bins.rank_of(bin as u32));
            let (entries, partial) =
                (sorted.starts[bin] as usize..sorted.starts[bin + 1] as usize, bins.partial_of(bin as u32));
            let first = if paths.same_node(owner) {
                sizes.begin[bin] + counts.below[bin]
            } else {
                returned_rows[bin]
            };
            let tokens = sorted.tokens[entries.clone()].iter().zip(&sorted.choices[entries]);
            for (row, (&token, &choice)) in (first..).zip(tokens) {
                let cursor = &mut cursors[token as usize];
                let term = *cursor as usize;
                *cursor += 1;
                terms[term] = Summand { owner, row };
                choices[term] = choice;
                if has_partials {
                    partials[term] = partial;
                }
            }
        }
    }

    fn place_groups(&mut self, frame: &PlanContext, crossing: &InterNodeRows) {
        self.sums.clear();
        self.sum_starts.clear();
        self.sum_choices.clear();
        self.groups.clear();
        self.group_starts.clear();
        if !frame.bins.order().has_partials() {
            return;
        }
        if frame.sizing.partial_bytes.is_some() {
            self.sum_starts.push(0);
            self.number_partials(frame, crossing);
        }
        self.group_starts.push(0);
        for token in 0..self.tokens as usize {
            let (mut first, last) = (self.term_starts[token] as usize, self.term_starts[token + 1] as usize);
            while first < last {
                let partial = self.partials[first];
                let same = self.partials[first..last].iter().take_while(|&&other| other == partial);
                let next = first + same.count();
                self.place_group(frame, first..next);
                first = next;
            }
            self.group_starts.push(self.groups.len() as u32);
            if frame.sizing.partial_bytes.is_some() {
                self.sum_starts.push(self.sums.len() as u32);
            }
        }
    }

    /// Relays sum the block row by row, and a row's groups in the order of the sum, so relay and
    /// source count alike.
    fn number_partials(&mut self, frame: &PlanContext, crossing: &InterNodeRows) {
        refill(&mut self.returned_partials, self.terms.len(), 0);
        for ((nth, relay), block) in frame.paths.relays().enumerate().zip(&self.blocks) {
            let mut next = 0;
            for &token in crossing.tokens_of(nth) {
                let terms = self.term_starts[token as usize]..self.term_starts[token as usize + 1];
                let mut last = NONE;
                for term in terms.map(|term| term as usize).filter(|&term| self.terms[term].owner == relay) {
                    let partial = self.partials[term];
                    next += u32::from(std::mem::replace(&mut last, partial) != partial);
                    self.returned_partials[term] = next - 1;
                }
            }
            self.chunks[relay as usize] =
                RowBuffer { rows: next, ..frame.sizing.returned(0, block.entries()) };
        }
    }

    /// One group: its terms or, if a relay sums them, the partial that it brings.
    fn place_group(&mut self, frame: &PlanContext, terms: std::ops::Range<usize>) {
        let owner = self.terms[terms.start].owner;
        if frame.sizing.partial_bytes.is_none() {
            self.groups.push(terms.len() as u32);
        } else if frame.paths.same_node(owner) {
            self.groups.push(terms.len() as u32);
            self.sums.extend_from_slice(&self.terms[terms.clone()]);
            self.sum_choices.extend_from_slice(&self.choices[terms]);
        } else {
            self.groups.push(PARTIAL);
            self.sums.push(Summand { owner, row: self.returned_partials[terms.start] });
            self.sum_choices.push(self.choices[terms.start]);
        }
    }

    /// One word per choice, out of those behind the row that stands for it.
    fn place_fetched(&mut self, frame: &PlanContext, sorted: &SortedRouting) {
        self.fetched.clear();
        self.places.clear();
        if sorted.choice_bins.is_empty() {
            return;
        }
        let words = frame.sizing.return_words;
        refill(&mut self.row_of_bin, frame.bins.count() as usize, Summand::default());
        for token in 0..self.tokens {
            let terms =
                self.term_starts[token as usize] as usize..self.term_starts[token as usize + 1] as usize;
            for term in terms {
                let bin = sorted.choice_bins[self.choices[term] as usize];
                self.row_of_bin[bin as usize] = self.terms[term];
            }
            for place in token * self.top_k..(token + 1) * self.top_k {
                let bin = sorted.choice_bins[place as usize];
                if bin != NONE {
                    let Summand { owner, row } = self.row_of_bin[bin as usize];
                    self.fetched.push(Summand { owner, row: row * words + (place - token * self.top_k) });
                    self.places.push(place);
                }
            }
        }
    }

    /// Summands of each token, their starts, and their choices, in the order of the sum; where
    /// relays sum, including partials.
    pub fn summands(&self) -> (&[Summand], &[u32], &[u32]) {
        match self.sum_starts.is_empty() {
            true => (&self.terms, &self.term_starts, &self.choices),
            false => (&self.sums, &self.sum_starts, &self.sum_choices),
        }
    }

    /// The rows that a fetch of one word per choice reads, and the places of the words.
    pub fn fetches(&self) -> (&[Summand], &[u32]) {
        match self.fetched.is_empty() {
            true => (&self.terms, &self.choices),
            false => (&self.fetched, &self.places),
        }
    }
}
