//! Where rows go: runs to each destination, and blocks for the relays.

use super::super::block::{Block, Segment};
use super::super::counts::padded;
use super::super::sorted::refill;
use super::super::{Counts, InterNodeRows, ReceiveSizes, SortedRouting};
use super::{DispatchLayout, PlanContext, RowRun};
use crate::topology::{Paths, Route};

impl DispatchLayout {
    /// Rows and notes lie packed, those of bin `b` from row `starts[b]` on: runs are pieces of
    /// these. Of a bin without enough room the first rows are sent.
    pub fn pack(&mut self, sorted: &SortedRouting, starts: &[u32]) {
        for run in self.runs.iter_mut().filter(|run| run.count > 0) {
            let bin = sorted.starts.partition_point(|&start| start <= run.first) - 1;
            run.first = starts[bin];
        }
        self.rows.clear();
        self.whole = true;
    }

    pub(in crate::plan) fn start(&mut self, sorted: &SortedRouting) {
        self.whole = sorted.whole;
        self.rows.clear();
        if !self.whole {
            self.rows.extend_from_slice(&sorted.tokens);
        }
    }

    pub(super) fn place_runs(
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
    pub(in crate::plan) fn place_blocks(
        &mut self,
        frame: &PlanContext,
        (sorted, crossing): (&SortedRouting, &InterNodeRows),
        counts: &Counts,
        sizes: &ReceiveSizes,
    ) {
        let (paths, bins) = (frame.paths, frame.bins);
        refill(&mut self.home_rows, bins.count() as usize, 0);
        self.blocks.resize_with(paths.relays().count(), Block::default);
        self.block_runs.clear();
        for ((nth, relay), block) in paths.relays().enumerate().zip(&mut self.blocks) {
            let served = paths.served_by(relay);
            block.landed.clear();
            block.landed.extend(served.iter().map(|&rank| sizes.rows[rank as usize]));
            block.segments.clear();
            let mut entries = 0;
            for bin in served.iter().flat_map(|&rank| bins.of(rank)).map(|bin| bin as usize) {
                self.home_rows[bin] = entries;
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

    /// The runs to one destination: none where a relay hands them on.
    pub fn runs_to(&self, rank: u32) -> std::ops::Range<u32> {
        self.run_starts[rank as usize]..self.run_starts[rank as usize + 1]
    }

    /// The first of the rows that a relay returns, where rows return to the places where they lay
    /// packed. These are rows for that rank or, with blocks, which pack a token once, rows behind
    /// those of local peers and of the blocks of relays before it.
    pub fn home_of(&self, paths: &Paths, relay: u32) -> u32 {
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
pub(in crate::plan) fn segment(
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
