//! Rows that copy engines relay: where they arrive, and how they come into visible order.
//!
//! A relay that copies single rows can put each at its final place. A copy engine copies runs. So,
//! where engines relay, a block lies in relay order ([`RelayOrder`]), and each rank has *arrivals*
//! behind its rows: the rows of a source lie there together, and a kernel gathers the visible rows
//! from them by an index.
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

use super::sorted::refill;
use super::{
    Bins, Block, Counts, DispatchLayout, InterNodeRows, PlanContext, RankSets, ReceiveSizes, RelayOrder,
    RowRun, Segment, SortedRouting,
};

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
fn kept(bins: &Bins, counts: &Counts, sizes: &ReceiveSizes, bin: u32) -> u32 {
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
            sets.reset(served.len() as u32, rows);
            let mut rest = &*index;
            for (member, &rank) in (0..).zip(served) {
                let entries = sorted.tokens_of(frame.bins.of(rank)).len();
                let listed = rest.split_off(..entries).unwrap_or_default();
                listed.iter().for_each(|&row| sets.add(row, member));
            }
            order.fill(sets);
            refill(place, rows as usize, 0);
            spare.clear();
            spare.extend_from_slice(tokens);
            for ((row, token), &old) in (0..).zip(tokens).zip(&order.rows) {
                place[old as usize] = row;
                *token = spare[old as usize];
            }
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
        let mut home = self.packed.len() as u32;
        for (nth, relay) in paths.relays().enumerate() {
            self.blocks.push(self.packed.len() as u32);
            self.packed.extend(crossing.tokens_of(nth).iter().map(|&token| token as i32));
            for bin in paths.served_by(relay).iter().flat_map(|&rank| bins.of(rank)) {
                self.starts[bin as usize] = home;
                home += sorted.counts[bin as usize];
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
    pub fn hand_on(
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
                    listed.iter().for_each(|&row| self.sets.add(row, to));
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
    pub fn from_neighbour(
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
    pub fn from_far(&mut self, rows: u32, listed: &[u32], segments: &[Segment]) {
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
    use crate::gate::Routing;
    use crate::plan::{
        ExpertMap, GroupRouting, Overflow, RankRouting, ReceiveMode, RowMetadata, RowSizes, SumOrder,
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
    fn every_visible_row_is_made_of_the_row_of_its_token_that_arrived() {
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
        let sizing =
            RowSizes { row_bytes: 16, home_bytes: 16, words_out: 1, words_home: 1, partial_bytes: None };
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
        everyone.each(&frame, (TOP_K, 10), |frame, RankRouting { sorted, crossing, counts, sizes }, _| {
            let (mut own, mut layout) = (RelayPermutation::default(), DispatchLayout::default());
            own.arrange(frame, sorted, crossing);
            own.pack(frame, sorted, crossing);
            layout.fill(frame, (&*sorted, &*crossing), TOP_K, counts, sizes);
            own.add_runs(frame, sorted, &mut layout, (counts, sizes));
            let tokens = (0..bins.count()).map(|bin| sorted.tokens_of(bin..bin + 1).to_vec()).collect();
            sources.push(Source { own, layout, counted: counted[sources.len()].clone(), tokens });
            numbers = (counts.clone(), sizes.clone());
        });
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
                    own.from_neighbour(bins, me, &counted[mine], (counts, sizes));
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
                        relaying.hand_on(&frame, block, (served, member), chunk, (counts, sizes), &mut runs);
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
                    own.from_far(block.rows, &block.index[skip..skip + len], mine);
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
