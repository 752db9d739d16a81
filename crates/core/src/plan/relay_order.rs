//! Relay order: the order of a block's rows in which a copy engine can relay them, and the
//! permutations that lead from there to the visible order.
//!
//! A token for several ranks of a remote node crosses once, to one of them, the *relay*, in the
//! *block* of its source; the relay copies the rows to the ranks of its node. A copy engine cannot
//! gather: it copies *spans*, consecutive rows of the block to consecutive rows at one rank, and
//! each copy has its price. So the sender sorts the block by the *set* of ranks that a row goes to,
//! and the sets along a reflected Gray code, in which adjacent sets differ in one rank:
//!
//! ```text
//!    token order               sets as numbers           relay order
//!    row  set    to 0 1 2      row  set    to 0 1 2      row  set    to 0 1 2
//!     0   {1,2}       | |       5   {0}       |           5   {0}       |
//!     1   {0,1}     | |         1   {0,1}     | |         1   {0,1}     | |
//!     2   {0,2}     |   |       4   {0,1}     | |         4   {0,1}     | |
//!     3   {2}           |       3   {2}           |       0   {1,2}       | |
//!     4   {0,1}     | |         2   {0,2}     |   |       6   {0,1,2}   | | |
//!     5   {0}       |           0   {1,2}       | |       2   {0,2}     |   |
//!     6   {0,1,2}   | | |       6   {0,1,2}   | | |       3   {2}           |
//!                 2+3+3 = 8                 3+2+1 = 6                 2+1+1 = 4 copies
//! ```
//!
//! Leaving rows out never adds a span, so the number of possible sets bounds the number of spans,
//! for any number of tokens: 2^(n-1) for n ranks, half of what sets sorted as numbers need, and the
//! least that any order of all sets needs.
//!
//! **Rank-major** ([`RelaySorter`]), the entries for each rank served are sorted into the order of
//! the block. Placement, metadata, sums and returned rows all follow the entries. So at the
//! receiver the rows of a source lie in relay order, too, not in token order; the metadata of each
//! row gives its row in visible order.
//!
//! ```text
//!   token order    block  a b d e f        relay order    block  d b e a f        RelayOrder sorts the block
//!                  to 0     b d e                         to 0   d b e            one copy
//!                  to 1   a b   e f   two copies          to 1     b e a f        one copy
//! ```
//!
//! **Expert-major** ([`RelayPermutation`]), each rank has *arrivals* behind its rows: the rows of a
//! source lie there together, and a kernel gathers the visible rows from them by an index.
//!
//! ```text
//!   block of s, for the node of l     0 1 2 3 4 5 ...          in relay order: the rows for l are few runs
//!                                       \ | /
//!   arrivals at l                  | of rank 0 | of rank 1 | ... of s: one row a token, in the order of the block
//!                                                            of a local peer: one row an entry, by expert
//!   visible rows at l              | expert 0: rank 0 1 .. s ..| expert 1 ...        row = arrivals[index]; -1: a pad
//! ```
//!
//! The arrivals of source s begin after as many as lower ranks have *entries* at l. Each rank that
//! needs this number knows it: s from its counts, the relay from the header of s, l from all
//! counts. So nothing more is sent than for direct rows, and there are no more arrivals than
//! visible rows.

use std::ops::Range;

use super::{
    Bins, Block, Counts, DispatchLayout, InterNodeRows, PlanContext, ReceiveSizes, RowRun, Segment,
    SortedRouting, refill,
};

/// For each row of a block, the set of ranks of the node that it goes to. Ranks count from 0 in the
/// node.
///
/// ```
/// let mut sets = sidelane_core::plan::RankSets::new(3);
/// sets.push([1, 2]);
/// sets.push([0, 0]);
/// assert_eq!(sets.rows(), 2);
/// ```
#[derive(Clone, Debug, Default)]
pub struct RankSets {
    ranks: u32,
    /// `[rows, words]`; the ranks from `64 * w` on are the bits of word `w`.
    bits: Vec<u64>,
}

impl RankSets {
    /// No rows yet, for a node of `ranks` ranks.
    pub fn new(ranks: u32) -> Self {
        RankSets { ranks, bits: Vec::new() }
    }

    /// As many rows as these, in a node of `ranks` ranks, which go nowhere yet. Keeps the memory.
    pub fn reset(&mut self, ranks: u32, rows: u32) {
        self.ranks = ranks;
        let words = rows as usize * self.words();
        refill(&mut self.bits, words, 0);
    }

    /// Adds a row that goes to `ranks`. A rank may be listed several times: a token may want
    /// several of its experts.
    ///
    /// # Panics
    /// If the node has no such rank.
    pub fn push(&mut self, ranks: impl IntoIterator<Item = u32>) {
        let row = self.rows() as u32;
        self.bits.resize(self.bits.len() + self.words(), 0);
        ranks.into_iter().for_each(|rank| self.add(&[row], rank));
    }

    /// These rows go to `rank`, too.
    ///
    /// # Panics
    /// If there is no such row, or the node has no such rank.
    pub fn add(&mut self, rows: &[u32], rank: u32) {
        assert!(rank < self.ranks, "rank {rank} in a node of {}", self.ranks);
        let (words, word, bit) = (self.words(), (rank / 64) as usize, 1 << (rank % 64));
        rows.iter().for_each(|&row| self.bits[row as usize * words + word] |= bit);
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.bits.len() / self.words()
    }

    fn words(&self) -> usize {
        self.ranks.div_ceil(64).max(1) as usize
    }
}

/// The relay order of one block, and the spans that come of it.
///
/// Reused from call to call: after the first call of a size nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct RelayOrder {
    /// For each row of the block, the index of the given row. Rows with equal sets keep their
    /// order.
    pub rows: Vec<u32>,
    /// Spans to all ranks of the node, by rank and then row: the longest runs of block rows that go
    /// to it.
    ///
    /// `first` is a row of the block. `to_row` counts from the first row that this block has at the
    /// rank, where its rows lie one after another in the order of the block. There are no pads.
    pub spans: Vec<RowRun>,
    /// First span of each rank; one more than there are ranks.
    pub span_starts: Vec<u32>,
    /// Place of each given row's set in the Gray code, `[rows, words]`, most significant word
    /// first.
    places: Vec<u64>,
    /// `rows` in the making.
    spare: Vec<u32>,
    /// Per rank: where its next span goes, and to which row.
    cursors: Vec<Cursor>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    span: u32,
    to_row: u32,
}

impl RelayOrder {
    /// Sorts the rows with these sets into relay order and cuts it into spans. Sorted rows stay as
    /// they are: a relay that receives the sets of a block finds the spans of its sender.
    pub fn fill(&mut self, sets: &RankSets) {
        self.rows.clear();
        self.rows.extend(0..sets.rows() as u32);
        self.find_places(sets);
        if sets.words() == 1 {
            self.sort_by_digits(sets.ranks)
        } else {
            self.sort_by_words(sets.words())
        }
        self.cut(sets);
    }

    /// Sorts the rows of a block by the sets of the ranks served, and its tokens with them. `index`
    /// has the row of each entry. `spare` is scratch.
    fn sort_block(
        &mut self,
        sets: &mut RankSets,
        (bins, served): (&Bins, &[u32]),
        sorted: &SortedRouting,
        (tokens, index): (&mut [u32], &[u32]),
        spare: &mut Vec<u32>,
    ) {
        sets.reset(served.len() as u32, tokens.len() as u32);
        let mut rest = index;
        for (member, &rank) in (0..).zip(served) {
            let listed = rest.split_off(..sorted.tokens_of(bins.of(rank)).len()).unwrap_or_default();
            sets.add(listed, member);
        }
        self.fill(sets);
        spare.clear();
        spare.extend_from_slice(tokens);
        tokens.iter_mut().zip(&self.rows).for_each(|(token, &row)| *token = spare[row as usize]);
    }

    /// The spans to one rank.
    pub fn spans_to(&self, rank: u32) -> Range<u32> {
        self.span_starts[rank as usize]..self.span_starts[rank as usize + 1]
    }

    /// Copies that relay the block if it comes in `chunks` chunks: a span goes on with each chunk
    /// that brings rows of it.
    pub fn copies(&self, chunks: u8) -> u64 {
        let rows = self.rows.len() as u32;
        let parts =
            (1..=chunks).map(|chunk| Block::chunk(rows, chunk, chunks)).filter(|part| !part.is_empty());
        let cut = |span: &RowRun| {
            let meets = |part: &Range<u32>| part.start < span.first + span.count && span.first < part.end;
            parts.clone().filter(meets).count() as u64
        };
        self.spans.iter().map(cut).sum()
    }

    /// Bit i of a set's place in the Gray code is the parity of the set's ranks from i up.
    fn find_places(&mut self, sets: &RankSets) {
        refill(&mut self.places, sets.bits.len(), 0);
        let words = sets.words();
        for (set, places) in sets.bits.chunks_exact(words).zip(self.places.chunks_exact_mut(words)) {
            let mut odd_above = 0;
            for (&word, place) in set.iter().rev().zip(places) {
                *place = parities(word) ^ odd_above;
                odd_above = (*place & 1).wrapping_neg();
            }
        }
    }

    /// Counting sorts, each by a byte of the places: in nodes of 8, a single one.
    fn sort_by_digits(&mut self, ranks: u32) {
        refill(&mut self.spare, self.rows.len(), 0);
        for shift in (0..ranks).step_by(8) {
            let digit = |row: u32| (self.places[row as usize] >> shift) as usize & 0xff;
            let mut cursors = [0u32; 256];
            self.rows.iter().for_each(|&row| cursors[digit(row)] += 1);
            let mut sum = 0;
            for cursor in &mut cursors {
                sum += std::mem::replace(cursor, sum);
            }
            for &row in &self.rows {
                let cursor = &mut cursors[digit(row)];
                self.spare[*cursor as usize] = row;
                *cursor += 1;
            }
            std::mem::swap(&mut self.rows, &mut self.spare);
        }
    }

    /// Long places differ early, so comparing them beats counting all their digits.
    fn sort_by_words(&mut self, words: usize) {
        let key = |row: u32| (&self.places[row as usize * words..][..words], row);
        self.rows.sort_unstable_by(|&a, &b| key(a).cmp(&key(b)));
    }

    fn cut(&mut self, sets: &RankSets) {
        refill(&mut self.span_starts, sets.ranks as usize + 1, 0);
        changes(&self.rows, sets, |_, before, now| {
            added(before, now).for_each(|rank| self.span_starts[rank + 1] += 1);
        });
        let mut sum = 0;
        self.span_starts.iter_mut().for_each(|start| {
            sum += *start;
            *start = sum;
        });
        refill(&mut self.spans, sum as usize, RowRun::default());
        self.cursors.clear();
        self.cursors.extend(self.span_starts.iter().map(|&span| Cursor { span, to_row: 0 }));
        changes(&self.rows, sets, |row, before, now| {
            for rank in added(before, now) {
                let Cursor { span, to_row } = self.cursors[rank];
                self.spans[span as usize] = RowRun { to_row, first: row, count: 0, pad: 0 };
            }
            for rank in added(now, before) {
                let cursor = &mut self.cursors[rank];
                let span = &mut self.spans[cursor.span as usize];
                span.count = row - span.first;
                *cursor = Cursor { span: cursor.span + 1, to_row: cursor.to_row + span.count };
            }
        });
    }
}

/// Bit i of the result is the parity of the bits from i up.
fn parities(mut word: u64) -> u64 {
    for shift in [1, 2, 4, 8, 16, 32] {
        word ^= word >> shift;
    }
    word
}

/// Calls `at(row, before, now)` for each row of the block whose set differs from the one before it.
/// Before the first row and behind the last one lies the empty set.
fn changes(rows: &[u32], sets: &RankSets, mut at: impl FnMut(u32, &[u64], &[u64])) {
    let (words, mut before): (_, &[u64]) = (sets.words(), &[]);
    for (row, &given) in (0..).zip(rows) {
        let now = &sets.bits[given as usize * words..][..words];
        // Most sets are one word: a call to compare memory would take longer.
        if !now.iter().eq(before) {
            at(row, before, now);
            before = now;
        }
    }
    at(rows.len() as u32, before, &[]);
}

/// The ranks of `now` that are not in `before`. Words that a set does not have are empty.
fn added(before: &[u64], now: &[u64]) -> impl Iterator<Item = usize> {
    let before = before.iter().copied().chain(std::iter::repeat(0));
    now.iter().zip(before).enumerate().flat_map(|(word, (&now, before))| {
        let mut left = now & !before;
        std::iter::from_fn(move || {
            let bit = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            (bit < 64).then_some(64 * word + bit)
        })
    })
}

/// Puts the blocks of one rank into relay order, rank-major.
///
/// Reused from call to call: after the first call of a size nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct RelaySorter {
    sets: RankSets,
    order: RelayOrder,
    /// Per row of a block: its entry in the bin that is put in order.
    entry_of: Vec<u32>,
    /// Per entry in relay order: which entry of its bin it was.
    from: Vec<u32>,
    /// A table, as it was.
    spare: Vec<u32>,
}

impl RelaySorter {
    /// Records the visible row at each entry, then sorts the rows that cross.
    ///
    /// Rows without room are dropped before: the last tokens, independent of the order in which
    /// rows travel.
    pub fn arrange(
        &mut self,
        frame: &PlanContext,
        (sorted, crossing): (&mut SortedRouting, &mut InterNodeRows),
        counts: &Counts,
        sizes: &ReceiveSizes,
    ) {
        let (bins, paths) = (frame.bins, frame.paths);
        for bin in 0..bins.count() {
            let first = sizes.begin[bin as usize].saturating_add(counts.below[bin as usize]);
            sorted.number(bin, first);
        }
        for (nth, relay) in paths.relays().enumerate() {
            self.arrange_block(bins, (nth, paths.served_by(relay)), sorted, crossing);
        }
    }

    fn arrange_block(
        &mut self,
        bins: &Bins,
        (nth, served): (usize, &[u32]),
        sorted: &mut SortedRouting,
        crossing: &mut InterNodeRows,
    ) {
        let RelaySorter { sets, order, entry_of, from, spare } = self;
        let rows = crossing.rows(nth);
        let (tokens, mut index) = crossing.block_mut(nth);
        order.sort_block(sets, (bins, served), sorted, (tokens, &*index), spare);
        entry_of.resize(entry_of.len().max(rows as usize), 0);
        for (member, &rank) in (0..).zip(served) {
            let bin = bins.of(rank).start;
            let listed = index.split_off_mut(..sorted.counts[bin as usize] as usize).unwrap_or_default();
            (0..).zip(&*listed).for_each(|(entry, &row)| entry_of[row as usize] = entry);
            let spans = order.spans_to(member);
            let spans = &order.spans[spans.start as usize..spans.end as usize];
            let rows = spans.iter().flat_map(|span| span.first..span.first + span.count);
            from.clear();
            for (to, row) in listed.iter_mut().zip(rows) {
                from.push(entry_of[order.rows[row as usize] as usize]);
                *to = row;
            }
            sorted.permute(bin, from, spare);
        }
    }
}

/// Arrivals that one rank plans as a source, as a relay and as a receiver. Reused from call to
/// call.
#[derive(Clone, Debug, Default)]
pub struct RelayPermutation {
    /// As a source: the token of each row as rows lie packed, those for local peers by bin, then
    /// the blocks.
    pub packed: Vec<i32>,
    /// As a source, per bin: the first row of the returned rows. Rows of local peers return in the
    /// order in which they left.
    pub starts: Vec<u32>,
    /// As a source: the first packed row of each block.
    pub blocks: Vec<u32>,
    /// As a source: of the layout's runs, the first to arrivals.
    pub first_run: u32,
    /// As a receiver, per visible row: its arrival; -1 of pads.
    pub index: Vec<i32>,
    sets: RankSets,
    order: RelayOrder,
    /// Per row of a block: its place in relay order, or among those for one rank.
    place: Vec<u32>,
    /// Per local bin: visible rows of the sources so far.
    cursors: Vec<u32>,
    spare: Vec<u32>,
}

/// Rows of a bin that are kept, from all ranks.
pub(super) fn kept(bins: &Bins, counts: &Counts, sizes: &ReceiveSizes, bin: u32) -> u32 {
    let end = sizes.rows[bins.rank_of(bin) as usize];
    counts.total[bin as usize].min(end.saturating_sub(sizes.begin[bin as usize]))
}

/// The first arrival at a rank of the source with these segments there.
pub fn first_of(
    bins: &Bins,
    rank: u32,
    segments: &[Segment],
    (counts, sizes): (&Counts, &ReceiveSizes),
) -> u32 {
    let below = |(bin, segment): (u32, &Segment)| {
        let below = segment.to_row.saturating_sub(sizes.begin[bin as usize]);
        below.min(kept(bins, counts, sizes, bin))
    };
    bins.of(rank).zip(segments).map(below).sum()
}

impl RelayPermutation {
    /// As a source: puts the blocks into relay order.
    pub fn arrange(&mut self, frame: &PlanContext, sorted: &SortedRouting, crossing: &mut InterNodeRows) {
        let RelayPermutation { sets, order, place, spare, .. } = self;
        for (nth, relay) in frame.paths.relays().enumerate() {
            let (rows, served) = (crossing.rows(nth), frame.paths.served_by(relay));
            let (tokens, index) = crossing.block_mut(nth);
            order.sort_block(sets, (frame.bins, served), sorted, (&mut *tokens, &*index), spare);
            refill(place, rows as usize, 0);
            (0..).zip(&order.rows).for_each(|(row, &old)| place[old as usize] = row);
            index.iter_mut().for_each(|row| *row = place[*row as usize]);
        }
    }

    /// As a source: how rows lie packed, and where they return.
    pub fn pack(&mut self, frame: &PlanContext, sorted: &SortedRouting, crossing: &InterNodeRows) {
        let (bins, paths) = (frame.bins, frame.paths);
        self.packed.clear();
        self.blocks.clear();
        refill(&mut self.starts, bins.count() as usize + 1, 0);
        for rank in (0..paths.ranks()).filter(|&rank| paths.same_node(rank)) {
            for bin in bins.of(rank) {
                self.starts[bin as usize] = self.packed.len() as u32;
                self.packed.extend(sorted.tokens_of(bin..bin + 1).iter().map(|&token| token as i32));
            }
        }
        let mut next = self.packed.len() as u32;
        for (nth, relay) in paths.relays().enumerate() {
            self.blocks.push(self.packed.len() as u32);
            self.packed.extend(crossing.tokens_of(nth).iter().map(|&token| token as i32));
            for bin in paths.served_by(relay).iter().flat_map(|&rank| bins.of(rank)) {
                self.starts[bin as usize] = next;
                next += sorted.counts[bin as usize];
            }
        }
    }

    /// As a source: turns the runs of a layout into runs of packed rows. Behind them come the runs
    /// to the arrivals of local peers, one for each, in order of ranks.
    pub fn add_runs(
        &mut self,
        frame: &PlanContext,
        sorted: &SortedRouting,
        layout: &mut DispatchLayout,
        (counts, sizes): (&Counts, &ReceiveSizes),
    ) {
        layout.pack(sorted, &self.starts);
        for (&first, &packed) in layout.block_runs.iter().zip(&self.blocks) {
            for run in &mut layout.runs[first as usize..][..usize::from(frame.chunks)] {
                run.first = packed + run.to_row;
            }
        }
        self.first_run = layout.runs.len() as u32;
        for rank in (0..frame.paths.ranks()).filter(|&rank| frame.paths.same_node(rank)) {
            layout.runs.push(self.run_to(frame, sorted, rank, counts, sizes));
        }
    }

    /// As a source: the run of packed rows to the arrivals of a local peer.
    fn run_to(
        &self,
        frame: &PlanContext,
        sorted: &SortedRouting,
        rank: u32,
        counts: &Counts,
        sizes: &ReceiveSizes,
    ) -> RowRun {
        let bins = frame.bins.of(rank);
        let first = self.starts.get(bins.start as usize).copied().unwrap_or(0);
        let below = |bin: u32| counts.below[bin as usize].min(kept(frame.bins, counts, sizes, bin));
        let to_row = bins.clone().map(below).sum();
        let count = sorted.tokens_of(bins).len() as u32;
        RowRun { to_row, first, count, pad: 0 }
    }

    /// As a relay: the runs of one chunk of a block to the arrivals of the `member`th rank served.
    pub fn relay_runs(
        &mut self,
        frame: &PlanContext,
        block: &Block,
        (served, member): (&[u32], usize),
        chunk: u8,
        (counts, sizes): (&Counts, &ReceiveSizes),
        runs: &mut Vec<RowRun>,
    ) {
        if (chunk, member) == (1, 0) {
            self.sets.reset(served.len() as u32, block.rows);
            let mut entry = 0;
            let mut segments = block.segments.iter();
            for (to, &rank) in (0..).zip(served) {
                for segment in segments.by_ref().take(frame.bins.of(rank).len()) {
                    let listed = &block.index[entry..][..segment.count as usize];
                    self.sets.add(listed, to);
                    entry += segment.count as usize;
                }
            }
            self.order.fill(&self.sets);
        }
        let skipped: usize = served[..member].iter().map(|&rank| frame.bins.of(rank).len()).sum();
        let first = first_of(frame.bins, served[member], &block.segments[skipped..], (counts, sizes));
        let rows = Block::chunk(block.rows, chunk, frame.chunks);
        let spans = self.order.spans_to(member as u32);
        for span in &self.order.spans[spans.start as usize..spans.end as usize] {
            let (start, end) = (span.first.max(rows.start), (span.first + span.count).min(rows.end));
            if start < end {
                let to_row = first + span.to_row + (start - span.first);
                runs.push(RowRun { to_row, first: start, count: end - start, pad: 0 });
            }
        }
    }

    /// As a receiver: begins an index of `landed` visible rows.
    pub fn begin(&mut self, bins: &Bins, me: u32, landed: u32) {
        self.index.clear();
        self.index.resize(landed as usize, -1);
        refill(&mut self.cursors, bins.of(me).len(), 0);
    }

    /// As a receiver: the next source is a local peer, with these counts of entries for each bin of
    /// this rank.
    pub fn from_local_peer(
        &mut self,
        bins: &Bins,
        me: u32,
        counted: &[u32],
        (counts, sizes): (&Counts, &ReceiveSizes),
    ) {
        let mut arrival: u32 = self.cursors.iter().sum();
        for ((bin, cursor), &count) in bins.of(me).zip(&mut self.cursors).zip(counted) {
            let count = count.min(kept(bins, counts, sizes, bin).saturating_sub(*cursor));
            let to = sizes.begin[bin as usize] + *cursor;
            for (row, arrival) in visible(&mut self.index, to, count).iter_mut().zip(arrival..) {
                *row = arrival as i32;
            }
            *cursor += count;
            arrival += count;
        }
    }

    /// As a receiver: the next source is on another node. `listed` are the rows, of `rows` in its
    /// block, of its entries here, segment after segment.
    pub fn from_other_node(&mut self, rows: u32, listed: &[u32], segments: &[Segment]) {
        let first: u32 = self.cursors.iter().sum();
        refill(&mut self.place, rows as usize + 1, 0);
        listed.iter().for_each(|&row| self.place[row as usize + 1] = 1);
        for row in 0..rows as usize {
            self.place[row + 1] += self.place[row];
        }
        let mut rest = listed;
        for (cursor, &Segment { to_row, count, .. }) in self.cursors.iter_mut().zip(segments) {
            let entries = rest.split_off(..count as usize).unwrap_or_default();
            for (row, &at) in visible(&mut self.index, to_row, count).iter_mut().zip(entries) {
                *row = (first + self.place[at as usize]) as i32;
            }
            *cursor += count;
        }
    }
}

/// Visible rows of one source and bin; none lie beyond a budget.
fn visible(index: &mut [i32], first: u32, count: u32) -> &mut [i32] {
    let (first, count) = (first as usize, count as usize);
    index.get_mut(first..first + count).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    mod relay_order {
        use super::*;

        /// Where the tables lie, and how much they hold.
        fn tables(order: &RelayOrder) -> [(usize, usize); 6] {
            fn table<T>(vec: &Vec<T>) -> (usize, usize) {
                (vec.as_ptr() as usize, vec.capacity())
            }
            let RelayOrder { rows, spans, span_starts, places, spare, cursors } = order;
            let mut of_rows = [table(rows), table(spare)];
            // Sorting swaps them.
            of_rows.sort();
            [of_rows[0], of_rows[1], table(spans), table(span_starts), table(places), table(cursors)]
        }

        #[test]
        fn a_second_call_of_a_size_keeps_the_tables() {
            for ranks in [8, 24, 64, 200] {
                let mut sets = RankSets::new(ranks);
                (0..500).for_each(|row| sets.push([row % ranks, row * row % ranks]));
                let mut order = RelayOrder::default();
                order.fill(&sets);
                let before = tables(&order);
                order.fill(&sets);
                assert_eq!(tables(&order), before, "in a node of {ranks}");
            }
        }
    }

    mod spans {
        use super::*;
        use crate::gate::Routing;
        use crate::plan::{ExpertMap, PulledSums, ReceiveMode, RowLayout, RowMetadata, RowSizes, SumOrder};
        use crate::topology::{NodeMap, Paths, Route};

        #[test]
        fn the_picture_in_the_documentation_is_right() {
            let nodes = NodeMap::from_labels(&[0, 1, 1]);
            let (map, paths) = (ExpertMap::contiguous(3, 3).unwrap(), Paths::new(&nodes, Route::Pxn, 0));
            let bins = Bins::of_layout(RowLayout::RankMajor, &map, SumOrder::Expert, &nodes);
            let metadata = RowMetadata::of(RowLayout::RankMajor, ReceiveMode::Exact, true);
            // Tokens a to f; expert 1 is on the first rank served, expert 2 on the second.
            let ids = [-1, 2, 1, 2, -1, -1, 1, -1, 1, 2, -1, 2];
            let routing = Routing::new(2, ids.to_vec(), vec![0.5; 12]).unwrap();
            let (mut sorted, mut crossing) = (SortedRouting::default(), InterNodeRows::default());
            sorted.fill(&map, &bins, metadata, 0, &routing).unwrap();
            crossing.fill(&bins, &paths, &sorted);
            let counts = Counts { below: vec![0, 10, 20, 0, 0, 0], total: vec![0; 6] };
            let sizes = ReceiveSizes { begin: vec![0; 3], ..ReceiveSizes::default() };
            let sizing = RowSizes {
                row_bytes: 16,
                return_bytes: 16,
                words_out: 5,
                return_words: 2,
                partial_bytes: None,
                rank_sums: false,
                pulled_bytes: PulledSums::CHUNK_BYTES,
            };
            let frame =
                PlanContext { bins: &bins, paths, align: 1, chunks: 1, sizing, mode: ReceiveMode::Exact };
            let mut spans = RelaySorter::default();
            spans.arrange(&frame, (&mut sorted, &mut crossing), &counts, &sizes);
            assert_eq!(crossing.tokens, [3, 1, 4, 0, 5], "{{0}}, {{0, 1}}, {{0, 1}}, {{1}}, {{1}}");
            assert_eq!(crossing.index, [0, 1, 2, 1, 2, 3, 4]);
            assert_eq!((sorted.tokens_of(1..2), sorted.tokens_of(2..3)), (&[3, 1, 4][..], &[1, 4, 0, 5][..]));
            let visible = |bin| -> Vec<u32> {
                sorted.metadata_of(bin..bin + 1).chunks_exact(5).map(|words| words[4] - 1).collect()
            };
            assert_eq!((visible(1), visible(2)), (vec![11, 10, 12], vec![21, 22, 20, 23]));
        }
    }

    mod arrivals {
        use super::*;
        use crate::gate::Routing;
        use crate::plan::{
            ExpertMap, GroupRouting, Overflow, PulledSums, RankRouting, ReceiveMode, RowMetadata, RowSizes,
            SumOrder,
        };
        use crate::topology::{NodeMap, Paths, Route};

        const EXPERTS: u32 = 11;
        const TOP_K: u32 = 3;

        /// Some tokens of a rank, with distinct experts; some choices are dropped.
        fn routing(rank: u32) -> Routing<'static> {
            let tokens = (rank * 7 + 3) % 10;
            let choice = |token: u32, k: u32| {
                let mixed = (rank * 31 + token * 17).wrapping_mul(2_654_435_761) >> 7;
                let expert = (mixed + k * (1 + mixed % (EXPERTS - 1))) % EXPERTS;
                if (mixed + k).is_multiple_of(7) { -1 } else { expert as i32 }
            };
            let ids: Vec<i32> = (0..tokens).flat_map(|t| (0..TOP_K).map(move |k| choice(t, k))).collect();
            let weights = vec![0.5; ids.len()];
            Routing::new(TOP_K, ids, weights).unwrap()
        }

        /// Plan of one rank as a source.
        struct Source {
            own: RelayPermutation,
            layout: DispatchLayout,
            /// Entries that it counts, and tokens of those that are kept, per bin.
            counted: Vec<u32>,
            tokens: Vec<Vec<u32>>,
        }

        #[test]
        fn every_visible_row_comes_from_arrived_row_of_its_token() {
            for labels in [&[0, 0, 1, 1][..], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 1, 2, 0, 1]] {
                for mode in [ReceiveMode::Exact, ReceiveMode::Budget { rows: 9, overflow: Overflow::Drop }] {
                    [1, 4].iter().for_each(|&align| arrived(labels, mode, align));
                }
            }
        }

        fn arrived(labels: &[u32], mode: ReceiveMode, align: u32) {
            let nodes = NodeMap::from_labels(labels);
            let map = ExpertMap::contiguous(EXPERTS, nodes.ranks()).unwrap();
            let bins = &Bins::experts(&map, SumOrder::Expert, &nodes);
            let sizing = RowSizes {
                row_bytes: 16,
                return_bytes: 16,
                words_out: 1,
                return_words: 1,
                partial_bytes: None,
                rank_sums: false,
                pulled_bytes: PulledSums::CHUNK_BYTES,
            };
            let paths = |rank| Paths::new(&nodes, Route::Pxn, rank);
            let frame = PlanContext { bins, paths: paths(0), align, chunks: 3, sizing, mode };
            let (mut everyone, mut counted) = (GroupRouting::default(), Vec::new());
            let sorted = everyone.sort(&frame, TOP_K, |me, sorted| {
                let filled = sorted.fill(&map, bins, RowMetadata::Weight, me, &routing(me));
                counted.push(sorted.counts.clone());
                filled
            });
            sorted.unwrap();
            let (mut sources, mut numbers) = (Vec::new(), <(Counts, ReceiveSizes)>::default());
            everyone.each(
                &frame,
                (TOP_K, 10),
                |frame, RankRouting { sorted, crossing, counts, sizes }, _| {
                    let (mut own, mut layout) = (RelayPermutation::default(), DispatchLayout::default());
                    own.arrange(frame, sorted, crossing);
                    own.pack(frame, sorted, crossing);
                    layout.fill(frame, (&*sorted, &*crossing), TOP_K, counts, sizes);
                    own.add_runs(frame, sorted, &mut layout, (counts, sizes));
                    let tokens =
                        (0..bins.count()).map(|bin| sorted.tokens_of(bin..bin + 1).to_vec()).collect();
                    sources.push(Source { own, layout, counted: counted[sources.len()].clone(), tokens });
                    numbers = (counts.clone(), sizes.clone());
                },
            );
            let (counts, sizes) = &numbers;
            for me in 0..nodes.ranks() {
                let mut there = vec![None; sizes.rows[me as usize] as usize];
                let mut expected = vec![None; there.len()];
                let mut own = RelayPermutation::default();
                own.begin(bins, me, sizes.rows[me as usize]);
                let mut ends: Vec<u32> = bins.of(me).map(|bin| sizes.begin[bin as usize]).collect();
                for (source, Source { own: from, layout, counted, tokens }) in (0..).zip(&sources) {
                    let mut arrive = |run: &RowRun, packed: u32| {
                        for row in 0..run.count {
                            let token = from.packed[(packed + row) as usize];
                            let before = there[(run.to_row + row) as usize].replace((source, token as u32));
                            assert_eq!(before, None, "arrivals overlap");
                        }
                    };
                    if paths(me).same_node(source) {
                        let nth = (0..me).filter(|&rank| paths(me).same_node(rank)).count();
                        let run = layout.runs[from.first_run as usize + nth];
                        arrive(&run, run.first);
                        let mine = bins.of(me).start as usize..bins.of(me).end as usize;
                        own.from_local_peer(bins, me, &counted[mine], (counts, sizes));
                    } else {
                        let relay = paths(source).relay_to(me);
                        let nth = paths(source).relays().position(|other| other == relay).unwrap();
                        let (block, served) = (&layout.blocks[nth], paths(me).served_by(relay));
                        assert!(block.is_sound(block.entries(), false));
                        let (mut relaying, frame) =
                            (RelayPermutation::default(), PlanContext { paths: paths(relay), ..frame });
                        let (mut copies, mut runs) = (0, Vec::new());
                        for (chunk, member) in (1..=3).flat_map(|c| (0..served.len()).map(move |m| (c, m))) {
                            runs.clear();
                            relaying.relay_runs(
                                &frame,
                                block,
                                (served, member),
                                chunk,
                                (counts, sizes),
                                &mut runs,
                            );
                            copies += runs.len();
                            for run in runs.iter().filter(|_| served[member] == me) {
                                arrive(run, from.blocks[nth] + run.first);
                            }
                        }
                        assert!(copies <= 3 * (1 << served.len()), "{copies} copies");
                        let count = |segments: &[Segment]| segments.iter().map(|s| s.count as usize).sum();
                        let before = served.iter().take_while(|&&rank| rank != me);
                        let before = before.map(|&rank| bins.of(rank).len()).sum();
                        let (skipped, rest) = block.segments.split_at(before);
                        let mine = &rest[..bins.of(me).len()];
                        let (skip, len): (usize, usize) = (count(skipped), count(mine));
                        own.from_other_node(block.rows, &block.index[skip..skip + len], mine);
                    }
                    for (end, bin) in ends.iter_mut().zip(bins.of(me)) {
                        for &token in &tokens[bin as usize] {
                            expected[*end as usize] = Some((source, token));
                            *end += 1;
                        }
                    }
                }
                let made = own.index.iter().map(|&row| usize::try_from(row).ok().and_then(|row| there[row]));
                assert_eq!(made.collect::<Vec<_>>(), expected, "rank {me} of {labels:?}, {mode:?}, {align}");
                assert!(own.index.iter().all(|&row| row == -1 || there[row as usize].is_some()));
            }
        }
    }
}
