//! Placement by a rank that knows the routing of all ranks: it computes the counts that others
//! would send it, and their layouts, too.
//!
//! An all-gather needs this, since it brings the choices along. So do sizes that are agreed on
//! beforehand, and the proof's unrolled programs. Behind an all-gather each rank copies the rows of
//! its experts from the gathered ones:
//!
//! ```text
//!   gathered   | rows of rank 0 | rows of rank 1 | ...
//!                   \\___  ____/
//!   visible    | bin 0 | bin 1 | ...           as if each source had put its rows there itself
//! ```

use super::dispatch_layout::segment;
use super::{
    Block, Counts, DispatchLayout, InterNodeRows, PlanContext, ReceiveSizes, RelayPlan, RowRun,
    SortedRouting, refill,
};
use crate::topology::Route;

/// Entries that every rank of a group sends. Used again from call to call.
#[derive(Clone, Debug, Default)]
pub struct GroupRouting {
    ranks: Vec<Entries>,
    counts: Counts,
    sizes: ReceiveSizes,
    /// Sums of the counts of lower ranks, while ranks are looked at in turn.
    below: Vec<u32>,
    scratch: DispatchLayout,
}

#[derive(Clone, Debug, Default)]
struct Entries {
    sorted: SortedRouting,
    crossing: InterNodeRows,
    counts: Vec<u32>,
}

/// Knowledge of one rank when it places.
#[derive(Debug)]
pub struct RankRouting<'a> {
    /// Its entries.
    pub sorted: &'a mut SortedRouting,
    /// Those of them that cross to other nodes.
    pub crossing: &'a mut InterNodeRows,
    /// The counts, as it sees them.
    pub counts: &'a mut Counts,
    /// Sizes that follow from them; the same for all ranks.
    pub sizes: &'a ReceiveSizes,
}

impl GroupRouting {
    /// Takes the entries of all ranks, as `sort` finds them, and adds up their counts. `frame` is
    /// that of any rank.
    ///
    /// # Errors
    /// The first of `sort`.
    pub fn sort<E>(
        &mut self,
        frame: &PlanContext,
        top_k: u32,
        mut sort: impl FnMut(u32, &mut SortedRouting) -> Result<(), E>,
    ) -> Result<(), E> {
        let (bins, ranks) = (frame.bins, frame.paths.ranks());
        self.counts.clear(bins.count() + frame.paths.staged_ranks());
        self.ranks.resize_with(ranks as usize, Entries::default);
        for (rank, Entries { sorted, crossing, counts }) in (0..).zip(&mut self.ranks) {
            let paths = frame.paths.of(rank);
            sort(rank, sorted)?;
            if let Some(slots) = frame.mode.slots() {
                sorted.keep(top_k, |_| slots);
            }
            crossing.fill(bins, &paths, sorted);
            counts.clone_from(&sorted.counts);
            crossing.staged(&paths, counts);
            // As the first rank sees it: no rank is below.
            self.counts.add(0, rank, counts);
        }
        self.sizes.fill(bins, frame.align, &self.counts.total, frame.mode.budget());
        Ok(())
    }

    /// Rows that land at each rank, and those that it needs. Not of fixed slots.
    pub fn sizes(&self) -> &ReceiveSizes {
        &self.sizes
    }

    /// The entries of a rank.
    pub fn sorted(&self, rank: u32) -> &SortedRouting {
        &self.ranks[rank as usize].sorted
    }

    /// Visits all ranks in turn, each as it would place itself. Ranks have at most `max_tokens`
    /// tokens.
    pub fn each(
        &mut self,
        frame: &PlanContext,
        (top_k, max_tokens): (u32, u32),
        mut see: impl FnMut(&PlanContext, RankRouting, &mut DispatchLayout),
    ) {
        let GroupRouting { ranks, counts, sizes, below, scratch } = self;
        refill(below, counts.total.len(), 0);
        for (rank, Entries { sorted, crossing, counts: own }) in (0..).zip(ranks) {
            let frame = PlanContext { paths: frame.paths.of(rank), ..*frame };
            counts.below.clone_from(below);
            if let Some(slots) = frame.mode.slots() {
                counts.fix(frame.bins, &frame.paths, slots, max_tokens);
                sizes.fill(frame.bins, frame.align, &counts.total, None);
            }
            if frame.mode.budget().is_some() && sorted.keep(top_k, |bin| sizes.room(frame.bins, counts, bin))
            {
                crossing.fill(frame.bins, &frame.paths, sorted);
            }
            see(&frame, RankRouting { sorted, crossing, counts, sizes }, scratch);
            below.iter_mut().zip(&*own).for_each(|(below, count)| *below = below.saturating_add(*count));
        }
    }
}

impl DispatchLayout {
    /// The part of this rank's block `nth` that a relay is sent.
    pub fn block(
        &mut self,
        frame: &PlanContext,
        own: (&SortedRouting, &InterNodeRows),
        (counts, sizes): (&Counts, &ReceiveSizes),
        nth: usize,
    ) -> Block {
        self.start(own.0);
        self.runs.clear();
        self.place_blocks(frame, own, counts, sizes);
        self.blocks[nth].clone()
    }
}

impl RelayPlan {
    /// Takes the blocks of all sources of the rank that `frame` is of; `block` finds that of a
    /// source.
    pub fn know(&mut self, frame: &PlanContext, sums: bool, mut block: impl FnMut(u32, usize) -> Block) {
        let (paths, me) = (frame.paths, frame.paths.me());
        self.blocks.clear();
        self.weights.clear();
        for source in paths.sources() {
            let nth = paths.of(source).relays().position(|relay| relay == me);
            self.blocks.extend(nth.map(|nth| block(source, nth)));
        }
        if paths.route() == Route::Direct {
            // Headers list no rows where every entry is one.
            self.blocks.iter_mut().for_each(|block| {
                block.index.clear();
                block.index.extend(0..block.entries());
            });
        }
        self.fill(frame.bins, paths.served_by(me), frame.chunks, sums);
    }
}

/// The copies of one rank, and the metadata of its rows. Reused from call to call.
#[derive(Clone, Debug, Default)]
pub struct LocalPermutation {
    /// Runs of `rows` to the places where they belong.
    pub runs: Vec<RowRun>,
    /// Gathered rows that runs index into.
    pub rows: Vec<u32>,
    /// Metadata of each of `rows`.
    pub metadata: Vec<u32>,
}

impl LocalPermutation {
    /// Forgets the last call.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.rows.clear();
        self.metadata.clear();
    }

    /// Copies of rank `me` from the rows of one source, whose first row is row `first` of the
    /// gathered ones. `frame` and `known` are the source's.
    pub fn add(&mut self, frame: &PlanContext, known: &RankRouting, me: u32, first: u32) {
        let RankRouting { sorted, counts, sizes, .. } = known;
        for bin in frame.bins.of(me) {
            let to = segment(frame, bin as usize, sorted, counts, sizes);
            if to.count + to.pad > 0 {
                let (to_row, count, pad) = (to.to_row, to.count, to.pad);
                self.runs.push(RowRun { to_row, first: self.rows.len() as u32, count, pad });
                self.rows.extend(sorted.tokens_of(bin..bin + 1).iter().map(|token| first + token));
                self.metadata.extend_from_slice(sorted.metadata_of(bin..bin + 1));
            }
        }
    }

    /// Writes the row metadata, `words` words each, to its place; zero in pads.
    pub fn write_metadata(&self, words: usize, to: &mut [u32]) {
        to.fill(0);
        for run in &self.runs {
            let (from, count) = (run.first as usize * words, run.count as usize * words);
            to[run.to_row as usize * words..][..count].copy_from_slice(&self.metadata[from..][..count]);
        }
    }
}
