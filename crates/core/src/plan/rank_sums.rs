//! Sums by rank: with [`SumOrder::Rank`](super::SumOrder), the rank of the experts may add up a
//! token's rows before they return. Then one row returns for each token and rank.
//!
//! A rank does not see which of its rows belong to one token. So each source numbers the sums that
//! it needs from a rank, in token order, and the number lands with every row. The sums of a source
//! begin behind as many as lower ranks have *rows* there: both ends know that from the counts.
//!
//! ```text
//!   source 1   tokens for rank d   a b d e           sums  0 1 2 3  of its own
//!
//!   at d       rows of expert 0    | source 0 .. | a d |        number of a row: where its sum lies at d,
//!              rows of expert 1    | source 0 .. | a b e |      ascending within each expert
//!
//!   sums at d  | of source 0, unused | a b d e, unused | of source 2 ..    one run home for each source
//! ```

use super::relay_order::kept;
use super::sorted_routing::NONE;
use super::{Counts, DispatchLayout, PlanContext, ReceiveSizes, RowRun, Segment, SortedRouting, refill};

/// The sums that ranks make of one rank's rows. Used again from call to call.
#[derive(Clone, Debug, Default)]
pub struct RankSums {
    /// Per rank: where the sums lie there, the row to which the first returns, and how many.
    pub runs: Vec<RowRun>,
    /// Per choice: its bin, or [`NONE`].
    bins: Vec<u32>,
    /// Per choice: which sum of its rank it is part of.
    numbers: Vec<u32>,
    /// Per rank: the last token with a sum there, plus one, and how many sums there are.
    latest: Vec<(u32, u32)>,
}

impl RankSums {
    /// Numbers the sums, and notes at each entry where its sum lies. They return rank after rank:
    /// those of this node, then those of each relay.
    pub fn number(
        &mut self,
        frame: &PlanContext,
        sorted: &mut SortedRouting,
        top_k: u32,
        (counts, sizes): (&Counts, &ReceiveSizes),
    ) {
        let (bins, paths) = (frame.bins, frame.paths);
        let choices = (sorted.tokens_here() * top_k) as usize;
        refill(&mut self.bins, choices, NONE);
        refill(&mut self.numbers, choices, 0);
        refill(&mut self.latest, paths.ranks() as usize, (0, 0));
        for bin in 0..bins.count() {
            let entries = sorted.starts[bin as usize] as usize..sorted.starts[bin as usize + 1] as usize;
            sorted.choices[entries].iter().for_each(|&choice| self.bins[choice as usize] = bin);
        }
        for (choice, (&bin, number)) in (0..).zip(self.bins.iter().zip(&mut self.numbers)) {
            if bin != NONE {
                let (last, sums) = &mut self.latest[bins.rank_of(bin) as usize];
                let token = choice / top_k + 1;
                *sums += u32::from(std::mem::replace(last, token) != token);
                *number = *sums - 1;
            }
        }
        refill(&mut self.runs, paths.ranks() as usize, RowRun::default());
        let mut first = 0;
        let near = (0..paths.ranks()).filter(|&rank| paths.same_node(rank));
        let far = paths.relays().flat_map(|relay| paths.served_by(relay)).copied();
        for rank in near.chain(far) {
            let below = |bin: u32| counts.below[bin as usize].min(kept(bins, counts, sizes, bin));
            let (_, count) = self.latest[rank as usize];
            self.runs[rank as usize] =
                RowRun { to_row: bins.of(rank).map(below).sum(), first, count, pad: 0 };
            first += count;
        }
        for bin in 0..bins.count() {
            let to_row = self.runs[bins.rank_of(bin) as usize].to_row;
            sorted.note_sums(bin, |choice| to_row + self.numbers[choice as usize]);
        }
    }

    /// Keeps the runs in a layout, and describes those over relays in its blocks.
    pub fn describe(&self, frame: &PlanContext, layout: &mut DispatchLayout) {
        layout.rank_sums.clone_from(&self.runs);
        for (relay, block) in frame.paths.relays().zip(&mut layout.blocks) {
            let of_rank = |&rank: &u32| {
                let RowRun { to_row, count, .. } = self.runs[rank as usize];
                Segment { to_row, count, pad: 0 }
            };
            block.rank_sums.clear();
            block.rank_sums.extend(frame.paths.served_by(relay).iter().map(of_rank));
        }
    }

    /// For each choice the row of its sum, `[tokens, top_k]`, if it is the first of its token at
    /// its rank; else -1. Sums of this rank's own count on from row `own` where they lie.
    pub fn places(&self, frame: &PlanContext, top_k: u32, own: u32, places: &mut Vec<i32>) {
        let me = frame.paths.me();
        places.clear();
        let of_token = self.bins.chunks_exact(top_k as usize).zip(self.numbers.chunks_exact(top_k as usize));
        for (bins, numbers) in of_token {
            let rank_of = |bin: u32| (bin != NONE).then(|| frame.bins.rank_of(bin));
            places.extend((0..bins.len()).map(|k| {
                let rank =
                    rank_of(bins[k]).filter(|_| !bins[..k].iter().any(|&b| rank_of(b) == rank_of(bins[k])));
                rank.map_or(-1, |rank| {
                    let RowRun { to_row, first, .. } = self.runs[rank as usize];
                    let begin = if rank == me { own.saturating_add(to_row) } else { first };
                    begin.saturating_add(numbers[k]) as i32
                })
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::Routing;
    use crate::plan::{
        Bins, ExpertMap, InterNodeRows, Overflow, PulledSums, ReceiveMode, RowMetadata, RowSizes, SumOrder,
    };
    use crate::topology::{NodeMap, Paths, Route};

    /// State of rank `me` of two, with two experts each, after it has placed these choices. `below`
    /// rows of lower ranks come before them in each bin.
    fn placed(
        ids: &[i32],
        me: u32,
        below: [u32; 4],
        mode: ReceiveMode,
    ) -> (RankSums, SortedRouting, Vec<i32>) {
        let (map, nodes) = (ExpertMap::contiguous(4, 2).unwrap(), NodeMap::from_labels(&[0, 0]));
        let bins = Bins::experts(&map, SumOrder::Rank, &nodes);
        let sizing = RowSizes {
            row_bytes: 16,
            return_bytes: 16,
            words_out: 2,
            words_home: 1,
            partial_bytes: None,
            rank_sums: true,
            pulled_bytes: PulledSums::CHUNK_BYTES,
        };
        let paths = Paths::new(&nodes, Route::Direct, me);
        let frame = PlanContext { bins: &bins, paths, align: 1, chunks: 1, sizing, mode };
        let routing = Routing::new(3, ids.to_vec(), vec![0.5; ids.len()]).unwrap();
        let (mut sorted, mut counts, mut sizes) =
            (SortedRouting::default(), Counts::default(), ReceiveSizes::default());
        sorted.fill(&map, &bins, RowMetadata::Summed, me, &routing).unwrap();
        let mut crossing = InterNodeRows::default();
        crossing.fill(&bins, &paths, &sorted);
        counts.clear(4);
        counts.add(me, 0, if me == 0 { &sorted.counts } else { &below });
        counts.add(me, 1, if me == 0 { &[0; 4] } else { &sorted.counts });
        sizes.fill(&bins, 1, &counts.total, mode.budget());
        sorted.keep(3, |bin| sizes.room(&bins, &counts, bin));
        let (mut sums, mut places) = (RankSums::default(), Vec::new());
        sums.number(&frame, &mut sorted, 3, (&counts, &sizes));
        sums.places(&frame, 3, 100, &mut places);
        (sums, sorted, places)
    }

    fn numbers(sorted: &SortedRouting) -> Vec<u32> {
        sorted.notes.chunks_exact(2).map(|note| note[0]).collect()
    }

    #[test]
    fn each_token_has_one_sum_at_each_rank_that_it_chose() {
        let (sums, sorted, places) = placed(&[2, 0, 3, 1, 0, -1, 3, 1, -1], 0, [0; 4], ReceiveMode::Exact);
        let run = |to_row, first, count| RowRun { to_row, first, count, pad: 0 };
        assert_eq!(sums.runs, [run(0, 0, 3), run(0, 3, 2)]);
        // Bin by bin: tokens 0 and 1, 1 and 2, 0, 0 and 2.
        assert_eq!(numbers(&sorted), [1, 2, 2, 3, 1, 1, 2]);
        assert!(sorted.notes.chunks_exact(2).all(|note| note[1] == 0.5f32.to_bits()));
        // Own sums lie behind row 100.
        assert_eq!(places, [3, 100, -1, 101, -1, -1, 4, 102, -1]);
    }

    #[test]
    fn sums_of_a_source_lie_behind_as_many_as_lower_ranks_have_rows() {
        let (sums, sorted, places) = placed(&[2, 3, -1, 3, -1, -1], 1, [1, 2, 3, 1], ReceiveMode::Exact);
        assert_eq!((sums.runs[0].to_row, sums.runs[1].to_row), (3, 4));
        assert_eq!(numbers(&sorted), [5, 5, 6]);
        assert_eq!(places, [104, -1, -1, 105, -1, -1]);
    }

    #[test]
    fn beyond_a_budget_sums_stay_within_the_rows_that_are_kept() {
        // Rank 1 has room for two rows of each of its bins at most: expert 3 has none left.
        let mode = ReceiveMode::Budget { rows: 4, overflow: Overflow::Drop };
        let (sums, sorted, _) = placed(&[2, 3, -1, 2, 3, -1], 1, [0, 0, 3, 5], mode);
        assert_eq!(sorted.entries(), 1);
        assert_eq!((sums.runs[1].to_row, sums.runs[1].count), (3, 1));
    }
}
