//! The library's results for a case, at all ranks.

use sidelane::gate::Routing;
use sidelane::plan::{
    Bins, Counts, DispatchLayout, InterNodeRows, PlanContext, PulledSums, ReceiveSizes, RelayPlan,
    RelaySorter, RowLayout, RowMetadata, RowSizes, SortedRouting, SumOrder,
};
use sidelane::topology::{NodeMap, Paths, Route};

use super::case::{Play, weight};

/// Knowledge of one rank when rows begin to move.
#[derive(Default)]
pub struct Rank {
    pub sorted: SortedRouting,
    pub crossing: InterNodeRows,
    pub counts: Counts,
    pub sizes: ReceiveSizes,
    pub layout: DispatchLayout,
    pub forward: RelayPlan,
}

pub struct Placed {
    pub nodes: NodeMap,
    pub bins: Bins,
    pub metadata: RowMetadata,
    pub sizing: RowSizes,
    pub ranks: Vec<Rank>,
}

pub fn routing(play: &Play, rank: usize, ids: &[i32]) -> Routing<'static> {
    let weights: Vec<f32> = (0..ids.len()).map(|choice| weight(rank, choice)).collect();
    Routing::new(play.case.top_k, ids.to_vec(), weights).unwrap()
}

/// Those of a list that a range names.
pub fn part<T>(all: &[T], range: std::ops::Range<u32>) -> &[T] {
    &all[range.start as usize..range.end as usize]
}

impl Placed {
    pub fn new(play: &Play) -> Placed {
        let case = &play.case;
        let nodes = NodeMap::from_labels(&case.nodes);
        let bins = Bins::of_layout(case.layout, &case.map, case.order, &nodes);
        let metadata = RowMetadata::of(case.layout, case.mode, case.spans);
        let sums = case.order != SumOrder::Expert && case.route == Route::Pxn && nodes.nodes() > 1;
        let sizing = RowSizes {
            row_bytes: 48,
            return_bytes: 48,
            words_out: metadata.words(case.top_k),
            return_words: if case.layout == RowLayout::RankMajor { case.top_k } else { 1 },
            partial_bytes: sums.then_some(96),
            rank_sums: false,
            pulled_bytes: PulledSums::CHUNK_BYTES,
        };
        let ranks = play.ids.iter().map(|_| Rank::default()).collect();
        let mut placed = Placed { nodes, bins, metadata, sizing, ranks };
        placed.sort(play);
        placed.place(play);
        placed.learn(play);
        placed
    }

    /// The paths of a rank.
    pub fn paths(&self, play: &Play, rank: usize) -> Paths<'_> {
        Paths::new(&self.nodes, play.case.route, rank as u32)
    }

    fn sort(&mut self, play: &Play) {
        let Placed { nodes, bins, metadata, ranks, .. } = self;
        for (me, rank) in ranks.iter_mut().enumerate() {
            let paths = Paths::new(nodes, play.case.route, me as u32);
            let routing = routing(play, me, &play.ids[me]);
            rank.sorted.fill(&play.case.map, bins, *metadata, me as u32, &routing).unwrap();
            if let Some(slots) = play.case.mode.slots() {
                rank.sorted.keep(play.case.top_k, |_| slots);
            }
            rank.crossing.fill(bins, &paths, &rank.sorted);
        }
    }

    /// Publication of each rank.
    fn published(&self, play: &Play) -> Vec<Vec<u32>> {
        let words = |(me, rank): (usize, &Rank)| {
            let mut words = rank.sorted.counts.clone();
            rank.crossing.staged(&self.paths(play, me), &mut words);
            words
        };
        self.ranks.iter().enumerate().map(words).collect()
    }

    fn place(&mut self, play: &Play) {
        let case = &play.case;
        let published = self.published(play);
        let Placed { nodes, bins, sizing, ranks, .. } = self;
        for (me, rank) in ranks.iter_mut().enumerate() {
            let paths = Paths::new(nodes, case.route, me as u32);
            let Rank { sorted, crossing, counts, sizes, layout, .. } = rank;
            counts.clear(bins.count() + paths.staged_ranks());
            (0..).zip(&published).for_each(|(source, words)| counts.add(me as u32, source, words));
            if let Some(slots) = case.mode.slots() {
                counts.fix(bins, &paths, slots, case.max_tokens());
            }
            sizes.fill(bins, case.align, &counts.total, case.mode.budget());
            if case.mode.budget().is_some() && sorted.keep(case.top_k, |bin| sizes.room(bins, counts, bin)) {
                crossing.fill(bins, &paths, sorted);
            }
            let (align, chunks, sizing, mode) = (case.align, play.chunks, *sizing, case.mode);
            let frame = PlanContext { bins, paths, align, chunks, sizing, mode };
            if case.spans {
                RelaySorter::default().arrange(&frame, (&mut *sorted, &mut *crossing), counts, sizes);
            }
            layout.fill(&frame, (sorted, crossing), case.top_k, counts, sizes);
        }
    }

    /// Headers as relays read them.
    fn learn(&mut self, play: &Play) {
        for me in 0..self.ranks.len() {
            let paths = self.paths(play, me);
            let mut forward = RelayPlan::default();
            forward.spans = play.case.spans;
            for source in paths.sources() {
                let nth = paths.of(source).relays().position(|relay| relay == me as u32).unwrap();
                let mut block = self.ranks[source as usize].layout.blocks[nth].clone();
                if play.case.route == Route::Direct {
                    block.index.extend(0..block.entries());
                }
                assert!(block.is_sound(block.entries(), true));
                forward.blocks.push(block);
            }
            let sums = self.sizing.partial_bytes.is_some();
            forward.fill(&self.bins, paths.served_by(me as u32), play.chunks, sums);
            self.ranks[me].forward = forward;
        }
    }
}
