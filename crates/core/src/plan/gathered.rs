//! All-gather: every row to every rank.
//!
//! ```text
//!   rank 0   a b        every rank   a b | c | d e f          order: rank, then row
//!   rank 1   c
//!   rank 2   d e f      in 2 segments, of ranks that have 2, 4 and 2 rows:
//!                       rank 0   a b   rank 1   c d e f   rank 2   g h
//!                       every rank   a | c d | g   ||   b | e f | h
//! ```
//!
//! It is a dispatch whose rows have no choice: the bins are the segments of each rank, and a token
//! is an entry of one bin at every rank. So the programs of dispatch run it, over relays that take
//! each row once for their node. The return along its layout sums the rows of all ranks by
//! ascending rank: it is reduce-scatter.
//!
//! No rank chooses rows, so they travel whole: a run is a piece of the tensor itself, without any
//! index.

use super::sorted::refill;
use super::{Bins, RowMetadata, SortedRouting};
use crate::gate::Routing;

impl SortedRouting {
    /// Every row of rank `me` to every rank, in as many equal segments as each rank has bins. Each
    /// carries its source and, if `carried`, its choices and their weights, as
    /// [`RowMetadata::Gathered`] says.
    pub fn fill_gathered(&mut self, bins: &Bins, me: u32, rows: u32, carried: Option<&Routing>) {
        self.clear(bins);
        let (ranks, segments) = (bins.ranks(), bins.count() / bins.ranks());
        debug_assert!(rows.is_multiple_of(segments), "segments are of equal length");
        self.whole = true;
        self.counts.fill(rows / segments);
        for (start, bin) in self.starts.iter_mut().zip(0..) {
            *start = bin * (rows / segments);
        }
        for _ in 0..ranks {
            self.tokens.extend(0..rows);
        }
        self.choices.clone_from(&self.tokens);
        self.token_starts.extend((1..=rows).map(|row| row * ranks));
        self.words = RowMetadata::Gathered.words(carried.map_or(0, Routing::top_k)) as usize;
        match carried {
            None => refill(&mut self.notes, rows as usize, me + 1),
            Some(routing) => {
                let top_k = routing.top_k() as usize;
                let choices =
                    routing.experts().chunks_exact(top_k).zip(routing.weights().chunks_exact(top_k));
                for (ids, weights) in choices {
                    self.notes.push(me + 1);
                    self.notes.extend(ids.iter().map(|&id| (id + 1) as u32));
                    self.notes.extend(weights.iter().map(|weight| weight.to_bits()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{ExpertMap, SumOrder};
    use crate::topology::NodeMap;

    fn bins(segments: u32, ranks: u32) -> Bins {
        let map = ExpertMap::contiguous(segments * ranks, ranks).unwrap();
        Bins::experts(&map, SumOrder::Expert, &NodeMap::from_labels(&vec![0; ranks as usize]))
    }

    #[test]
    fn every_rank_gets_every_row_segment_by_segment() {
        let (mut sorted, bins) = (SortedRouting::default(), bins(2, 3));
        sorted.fill_gathered(&bins, 1, 4, None);
        assert_eq!(sorted.counts, [2; 6]);
        assert_eq!(sorted.starts, [0, 2, 4, 6, 8, 10, 12]);
        assert_eq!(sorted.tokens_of(bins.of(2)), [0, 1, 2, 3]);
        assert_eq!((sorted.tokens_here(), sorted.entries()), (4, 12));
        assert_eq!(sorted.notes_of(bins.of(2)), [2; 4], "all are from rank 1");
    }

    #[test]
    fn choices_are_carried_as_they_are() {
        let (mut sorted, bins) = (SortedRouting::default(), bins(1, 2));
        let routing = Routing::new(2, vec![3, -1, 0, 2], vec![0.5, 0.25, 1.0, 0.0]).unwrap();
        sorted.fill_gathered(&bins, 0, 2, Some(&routing));
        let [half, quarter, one] = [0.5f32, 0.25, 1.0].map(f32::to_bits);
        assert_eq!(sorted.notes_of(bins.of(1)), [1, 4, 0, half, quarter, 1, 1, 3, one, 0]);
    }

    #[test]
    fn a_rank_without_rows_sends_none() {
        let (mut sorted, bins) = (SortedRouting::default(), bins(2, 2));
        sorted.fill_gathered(&bins, 0, 0, None);
        assert_eq!((sorted.counts.as_slice(), sorted.entries(), sorted.tokens_here()), (&[0; 4][..], 0, 0));
    }
}
