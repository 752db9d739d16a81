//! Partial sums: a token's rows are added up before they return, at the rank of their experts or at
//! a relay.
//!
//! **By rank.** With [`SumOrder::Rank`](super::SumOrder), one row returns for each token and rank.
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
//!   sums at d  | of source 0, unused | a b d e, unused | of source 2 ..    one run returns to each source
//! ```
//!
//! **By node.** With [`SumOrder::Node`](super::SumOrder), a relay may add up the rows of its node,
//! and one row returns for each token and node.
//!
//! ```text
//!   token a   experts 0 1 | 4 6 7      nodes of them  0 0 | 1 1 1
//!
//!   rows      0 1 | - - -              added: those of this node
//!             relay: 4 + 6 + 7         the row of the block that was token a
//!   places    0 1 | s - -              s: where that sum returns
//! ```
//!
//! Where copy engines pull the rows, they come and return chunk by chunk. The entries of a bin lie
//! at their rank in the order of tokens, and the block in relay order. So a chunk is the next share
//! of every bin, each in one piece, and a sum is made with the chunk that brings the last of its
//! rows. Source and relay find the same order, from the header ([`PulledSums`]):
//!
//! ```text
//!                     chunk 1     chunk 2
//!   bin 0    rows     3 0         1 2          entries 0 to 3
//!   bin 1             4 3         0            entries 4 to 6
//!   sums of           3 4         0 1 2        0 waits for its second entry
//! ```

use super::relay_order::kept;
use super::sorted_routing::NONE;
use super::{
    Block, Counts, DispatchLayout, InterNodeRows, PlanContext, ReceiveSizes, RowRun, RowSizes, Segment,
    SortedRouting, refill,
};
use crate::topology::Paths;

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
    /// Numbers the sums, and records at each entry where its sum lies. They return rank after rank:
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

/// The order in which the sums of a block are made of pulled rows. Used again from call to call.
#[derive(Clone, Debug, Default)]
pub struct PulledSums {
    /// Per row of the block: the place of its sum.
    pub places: Vec<u32>,
    /// First sum of each chunk; one more than there are.
    pub starts: Vec<u32>,
}

impl PulledSums {
    /// Fewest bytes of a bin in a chunk, on average: a copy engine moves them in twice the time
    /// that a copy of nothing takes.
    pub const CHUNK_BYTES: u64 = 512 << 10;

    /// In how many chunks at most the relay of these paths pulls and sums the rows for each of its
    /// sources, if blocks come in `chunks` chunks. While sums of one chunk leave, engines pull the
    /// next. A relay of many sources has enough of them in turn. Beyond [`Block::CHUNKS`] more
    /// copies cost more than sums that leave sooner save.
    pub fn most_chunks(chunks: u8, relay: Paths<'_>) -> u8 {
        usize::from(chunks.min(Block::CHUNKS)).div_ceil(relay.sources().count().max(1)) as u8
    }

    /// The same for a block with so many entries in so many bins.
    pub fn chunks(most: u8, (entries, bins): (usize, usize), sizing: &RowSizes) -> u8 {
        let all = (entries as u64).saturating_mul(sizing.return_bytes);
        let enough = all / sizing.pulled_bytes.max(1) / (bins.max(1) as u64);
        enough.clamp(1, u64::from(most.max(1))) as u8
    }

    /// Finds the order for a block of `rows` rows in so many chunks. `index` has the row of each
    /// entry, bin after bin, of which there are `counts`. Sums of a chunk keep the order of rows.
    pub fn fill(&mut self, rows: u32, counts: impl Iterator<Item = u32>, index: &[u32], chunks: u8) {
        let PulledSums { places, starts } = self;
        // First the chunk of each sum, from 0 on.
        refill(places, rows as usize, 0);
        let mut rest = index;
        for count in counts {
            let mut listed = rest.split_off(..count as usize).unwrap_or_default();
            for chunk in 1..=chunks {
                let entries = Block::chunk(count, chunk, chunks).len();
                for &row in listed.split_off(..entries).unwrap_or_default() {
                    let last = &mut places[row as usize];
                    *last = (*last).max(u32::from(chunk) - 1);
                }
            }
        }
        refill(starts, usize::from(chunks) + 1, 0);
        places.iter().for_each(|&chunk| starts[chunk as usize + 1] += 1);
        for chunk in 0..usize::from(chunks) {
            starts[chunk + 1] += starts[chunk];
        }
        // Each start becomes that of the next chunk, as its sums get their places.
        for place in places {
            let next = &mut starts[*place as usize];
            *place = *next;
            *next += 1;
        }
        starts.rotate_right(1);
        starts[0] = 0;
    }
}

/// The sums that relays make of one rank's rows. Used again from call to call.
#[derive(Clone, Debug, Default)]
pub struct NodeSums {
    /// Order of the sums of a block.
    order: PulledSums,
    /// Per row of a block: one of its choices has its place.
    placed: Vec<bool>,
}

impl NodeSums {
    /// Of each choice whose row a relay sums, the place is that of the sum, for one choice of each
    /// token and node, or -1. The others keep theirs. A sum is weighted already: its `weights`, of
    /// which there may be none, are 1.
    pub fn replace_places(
        &mut self,
        frame: &PlanContext,
        (sorted, crossing): (&SortedRouting, &InterNodeRows),
        layout: &DispatchLayout,
        (places, weights): (&mut [i32], &mut [f32]),
    ) {
        for (nth, relay) in frame.paths.relays().enumerate() {
            let first = layout.returned_at(&frame.paths, relay, false);
            let bins = || frame.paths.served_by(relay).iter().flat_map(|&rank| frame.bins.of(rank));
            let entries = bins().flat_map(|bin| sorted.starts[bin as usize]..sorted.starts[bin as usize + 1]);
            let (index, most) =
                (crossing.index_of(nth), PulledSums::most_chunks(frame.chunks, frame.paths.of(relay)));
            let chunks = PulledSums::chunks(most, (index.len(), bins().count()), &frame.sizing);
            let counts = bins().map(|bin| sorted.counts[bin as usize]);
            self.order.fill(crossing.rows(nth), counts, index, chunks);
            refill(&mut self.placed, crossing.rows(nth) as usize, false);
            for (entry, &row) in entries.zip(index) {
                let choice = sorted.choices[entry as usize] as usize;
                let again = std::mem::replace(&mut self.placed[row as usize], true);
                places[choice] = if again { -1 } else { (first + self.order.places[row as usize]) as i32 };
                if let Some(weight) = weights.get_mut(choice) {
                    *weight = 1.0;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::gate::Routing;
    use crate::plan::{
        Bins, Counts, ExpertMap, InterNodeRows, Overflow, PulledSums, ReceiveMode, ReceiveSizes, RowMetadata,
        RowSizes, SumOrder,
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
            return_words: 1,
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
        sorted.metadata.chunks_exact(2).map(|words| words[0]).collect()
    }

    #[test]
    fn each_token_has_one_sum_at_each_rank_that_it_chose() {
        let (sums, sorted, places) = placed(&[2, 0, 3, 1, 0, -1, 3, 1, -1], 0, [0; 4], ReceiveMode::Exact);
        let run = |to_row, first, count| RowRun { to_row, first, count, pad: 0 };
        assert_eq!(sums.runs, [run(0, 0, 3), run(0, 3, 2)]);
        // Bin by bin: tokens 0 and 1, 1 and 2, 0, 0 and 2.
        assert_eq!(numbers(&sorted), [1, 2, 2, 3, 1, 1, 2]);
        assert!(sorted.metadata.chunks_exact(2).all(|words| words[1] == 0.5f32.to_bits()));
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

    #[test]
    fn a_sum_is_made_with_the_chunk_that_brings_its_last_row() {
        let mut order = PulledSums::default();
        let index = [3, 0, 1, 2, 4, 3, 0];
        order.fill(5, [4, 3].into_iter(), &index, 2);
        assert_eq!((order.places, order.starts), (vec![2, 3, 4, 0, 1], vec![0, 2, 5]));
    }

    /// The rows of a block, and those of each bin.
    fn blocks() -> impl Strategy<Value = (u32, Vec<Vec<u32>>)> {
        (0_u32..40).prop_flat_map(|rows| {
            let listed = proptest::sample::subsequence((0..rows).collect::<Vec<_>>(), 0..=rows as usize);
            (Just(rows), proptest::collection::vec(listed.prop_shuffle(), 1..5))
        })
    }

    proptest! {
        #[test]
        fn every_sum_is_made_once_and_not_before_its_rows((rows, bins) in blocks(), chunks in 1_u8..6) {
            let mut order = PulledSums::default();
            order.fill(rows, bins.iter().map(|bin| bin.len() as u32), &bins.concat(), chunks);
            let mut places = order.places.clone();
            places.sort_unstable();
            prop_assert!(places.into_iter().eq(0..rows));
            prop_assert_eq!(order.starts.len(), usize::from(chunks) + 1);
            prop_assert_eq!([order.starts[0], order.starts[usize::from(chunks)]], [0, rows]);
            for (bin, chunk) in bins.iter().flat_map(|bin| (1..=chunks).map(move |chunk| (bin, chunk))) {
                let here = Block::chunk(bin.len() as u32, chunk, chunks);
                for &row in &bin[here.start as usize..here.end as usize] {
                    let first = order.starts[usize::from(chunk) - 1];
                    prop_assert!(order.places[row as usize] >= first, "row {} of chunk {}", row, chunk);
                }
            }
        }
    }

    #[test]
    fn one_choice_per_token_and_remote_node_holds_place_of_sum() {
        let map = ExpertMap::contiguous(4, 4).unwrap();
        let nodes = NodeMap::from_labels(&[0, 0, 1, 1]);
        let bins = Bins::experts(&map, SumOrder::Node, &nodes);
        let (row_bytes, partial_bytes, rank_sums) = (16, Some(16), false);
        let (return_bytes, words_out, return_words) = (16, 1, 1);
        let sizing = RowSizes {
            row_bytes,
            return_bytes,
            words_out,
            return_words,
            partial_bytes,
            rank_sums,
            pulled_bytes: PulledSums::CHUNK_BYTES,
        };
        let (paths, mode) = (Paths::new(&nodes, Route::Pxn, 0), ReceiveMode::Exact);
        let frame = PlanContext { bins: &bins, paths, align: 1, chunks: 1, sizing, mode };
        // Tokens 0 and 2 have two experts of the other node, token 1 one and token 3 none.
        let ids = vec![3, 0, 2, 1, 2, -1, 2, 3, 1, 0, -1, 1];
        let routing = Routing::new(3, ids, vec![0.5; 12]).unwrap();
        let (mut sorted, mut crossing) = (SortedRouting::default(), InterNodeRows::default());
        sorted.fill(&map, &bins, RowMetadata::Weight, 0, &routing).unwrap();
        crossing.fill(&bins, &paths, &sorted);
        let (mut counts, mut sizes) = (Counts::default(), ReceiveSizes::default());
        let mut words = sorted.counts.clone();
        crossing.staged(&paths, &mut words);
        counts.clear(words.len() as u32);
        counts.add(0, 0, &words);
        sizes.fill(&bins, 1, &counts.total, None);
        let mut layout = DispatchLayout::default();
        layout.fill_transfers(&frame, (&sorted, &crossing), 3, &counts, &sizes);
        let (mut places, mut weights) = (vec![100; 12], vec![0.5; 12]);
        let both = (&mut places[..], &mut weights[..]);
        NodeSums::default().replace_places(&frame, (&sorted, &crossing), &layout, both);
        // Five rows of the own node return before the sums. Expert 2 comes before expert 3.
        assert_eq!(places, [-1, 100, 5, 100, 6, 100, 7, -1, 100, 100, 100, 100]);
        let one = [1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5];
        assert_eq!(weights, one);
        let none = (&mut places[..], &mut [][..]);
        NodeSums::default().replace_places(&frame, (&sorted, &crossing), &layout, none);
    }
}
