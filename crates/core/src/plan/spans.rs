//! Blocks in relay order, for relays that copy spans.
//!
//! ```text
//!   token order    block  a b d e f        relay order    block  d b e a f        RelayOrder sorts the block
//!                  to 0     b d e                         to 0   d b e            one copy
//!                  to 1   a b   e f   two copies          to 1     b e a f        one copy
//! ```
//!
//! The entries for each rank served are sorted into the order of the block. Placement, metadata,
//! sums and returned rows all follow the entries. So at the receiver the rows of a source lie in
//! relay order, too, not in token order; the note of each row gives its row in visible order.

use super::{Bins, Counts, InterNodeRows, PlanContext, RankSets, ReceiveSizes, RelayOrder, SortedRouting};

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
    /// Notes the visible row at each entry, then sorts the rows that cross.
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
        sets.reset(served.len() as u32, rows);
        let mut rest = &*index;
        for (member, &rank) in (0..).zip(served) {
            let listed = rest.split_off(..sorted.tokens_of(bins.of(rank)).len()).unwrap_or_default();
            listed.iter().for_each(|&row| sets.add(row, member));
        }
        order.fill(sets);

        spare.clear();
        spare.extend_from_slice(tokens);
        tokens.iter_mut().zip(&order.rows).for_each(|(to, &row)| *to = spare[row as usize]);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::Routing;
    use crate::plan::{ExpertMap, ReceiveMode, RowLayout, RowMetadata, RowSizes, SumOrder};
    use crate::topology::{NodeMap, Paths, Route};

    #[test]
    fn the_picture_in_the_documentation_is_right() {
        let nodes = NodeMap::from_labels(&[0, 1, 1]);
        let (map, paths) = (ExpertMap::contiguous(3, 3).unwrap(), Paths::new(&nodes, Route::Pxn, 0));
        let bins = Bins::of_layout(RowLayout::RankMajor, &map, SumOrder::Expert, &nodes);
        let notes = RowMetadata::of(RowLayout::RankMajor, ReceiveMode::Exact, true);
        // Tokens a to f; expert 1 is on the first rank served, expert 2 on the second.
        let ids = [-1, 2, 1, 2, -1, -1, 1, -1, 1, 2, -1, 2];
        let routing = Routing::new(2, ids.to_vec(), vec![0.5; 12]).unwrap();
        let (mut sorted, mut crossing) = (SortedRouting::default(), InterNodeRows::default());
        sorted.fill(&map, &bins, notes, 0, &routing).unwrap();
        crossing.fill(&bins, &paths, &sorted);
        let counts = Counts { below: vec![0, 10, 20, 0, 0, 0], total: vec![0; 6] };
        let sizes = ReceiveSizes { begin: vec![0; 3], ..ReceiveSizes::default() };
        let sizing =
            RowSizes { row_bytes: 16, home_bytes: 16, words_out: 5, words_home: 2, partial_bytes: None };
        let frame = PlanContext { bins: &bins, paths, align: 1, chunks: 1, sizing, mode: ReceiveMode::Exact };
        let mut spans = RelaySorter::default();
        spans.arrange(&frame, (&mut sorted, &mut crossing), &counts, &sizes);
        assert_eq!(crossing.tokens, [3, 1, 4, 0, 5], "{{0}}, {{0, 1}}, {{0, 1}}, {{1}}, {{1}}");
        assert_eq!(crossing.index, [0, 1, 2, 1, 2, 3, 4]);
        assert_eq!((sorted.tokens_of(1..2), sorted.tokens_of(2..3)), (&[3, 1, 4][..], &[1, 4, 0, 5][..]));
        let visible = |bin| -> Vec<u32> {
            sorted.notes_of(bin..bin + 1).chunks_exact(5).map(|note| note[4] - 1).collect()
        };
        assert_eq!((visible(1), visible(2)), (vec![11, 10, 12], vec![21, 22, 20, 23]));
    }
}
