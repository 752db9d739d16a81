//! Blocks that go over a relay, and the relay's plan: runs that relay their rows, and sums that it
//! returns.
//!
//! A block is described so that the relay needs no other information:
//!
//! ```text
//!   header   rows | entries | first row in staging | landed rows per rank served | segment per bin served | row of each entry | note of each entry
//!   rows     each token once, in token order or in relay order, however many of the relay's ranks it goes to
//!
//!   entries of bin b   rows 0 2 3 7 ...  ->  rows to_row, to_row + 1, ... of the rank of b, then the pad
//! ```
//!
//! The entries lie by bin, as the source sorted them. So the relay puts each row at its final place
//! and knows what to return later: a return brings back the entries of a block in this very order.

use super::{Bins, PulledSums, RowRun, RowSizes, Summand, refill, vec_memory_usage};

/// Where the entries of one bin land.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Segment {
    /// First row at the rank of the bin.
    pub to_row: u32,
    /// Entries.
    pub count: u32,
    /// Rows of zeros that follow.
    pub pad: u32,
}

/// The rows of one source for the ranks that one relay serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Rows: tokens that go there.
    pub rows: u32,
    /// Its first row in the relay's staging.
    pub first: u32,
    /// Per rank served: rows that land there, from all sources.
    pub landed: Vec<u32>,
    /// Per bin served, rank after rank.
    pub segments: Vec<Segment>,
    /// Where ranks sum a token's rows before they return, per rank served: the sums of the source.
    pub rank_sums: Vec<Segment>,
    /// Per entry, segment after segment: its row.
    pub index: Vec<u32>,
}

impl Block {
    pub(super) fn memory_usage(&self) -> usize {
        vec_memory_usage(&self.landed)
            + vec_memory_usage(&self.segments)
            + vec_memory_usage(&self.rank_sums)
            + vec_memory_usage(&self.index)
    }

    /// Number of entries.
    pub fn entries(&self) -> u32 {
        self.segments.iter().map(|segment| segment.count).sum()
    }

    /// Rows that return where copy engines relay: an entry each, the sums of the ranks served, or
    /// the relay's sum of each row.
    pub fn returned(&self, sizing: &RowSizes) -> u32 {
        let segments = match (sizing.partial_bytes, sizing.rank_sums) {
            (Some(_), _) => return self.rows,
            (None, true) => &self.rank_sums,
            (None, false) => &self.segments,
        };
        segments.iter().map(|segment| segment.count).sum()
    }

    /// In how many chunks, at most `most`, engines pull its rows for [sums](PulledSums).
    pub fn pulled_chunks(&self, most: u8, sizing: &RowSizes) -> u8 {
        PulledSums::chunks(most, (self.index.len(), self.segments.len()), sizing)
    }

    /// In how many chunks blocks go to relays whose threads copy: enough that a relay works while
    /// the rest is in flight.
    pub const CHUNKS: u8 = 4;

    /// In how many chunks blocks of at most so many bytes go to relays whose engines copy.
    ///
    /// The copies of the last chunk come behind all that was in flight, and each chunk has its own
    /// copies and words. So the best number grows with the root of the size: by the time model 4 is
    /// best up to 10 MB, and 8 to 12 for 60 MB.
    pub fn chunks_for_engines(bytes: u64) -> u8 {
        (bytes / 400_000).isqrt().clamp(u64::from(Self::CHUNKS), 12) as u8
    }

    /// Rows of chunk `chunk` (from 1) of `chunks`.
    pub fn chunk(rows: u32, chunk: u8, chunks: u8) -> std::ops::Range<u32> {
        let at = |chunk: u8| (u64::from(rows) * u64::from(chunk)).div_ceil(u64::from(chunks)) as u32;
        at(chunk - 1)..at(chunk)
    }

    /// The runs of one chunk to the `member`th rank served; their entries count from the first of
    /// the block, plus `first`. The pad comes with the last chunk.
    pub fn runs(
        &self,
        bins: &Bins,
        served: &[u32],
        member: usize,
        (chunk, chunks): (u8, u8),
        first: u32,
        runs: &mut Vec<RowRun>,
    ) {
        let rows = Self::chunk(self.rows, chunk, chunks);
        let (mut entry, mut segments) = (0, self.segments.iter());
        for (nth, &rank) in served.iter().enumerate() {
            for &Segment { to_row, count, pad } in segments.by_ref().take(bins.of(rank).len()) {
                if nth == member {
                    let listed = &self.index[entry as usize..][..count as usize];
                    let skip = listed.partition_point(|&row| row < rows.start) as u32;
                    let count = listed.partition_point(|&row| row < rows.end) as u32 - skip;
                    let pad = if chunk == chunks { pad } else { 0 };
                    if count + pad > 0 {
                        runs.push(RowRun { to_row: to_row + skip, first: first + entry + skip, count, pad });
                    }
                }
                entry += count;
            }
        }
    }

    /// A run of entries as the longest spans of rows that lie next to each other in the block;
    /// `first` is then a row. The last span has the pad.
    pub fn spans(&self, run: RowRun, spans: &mut Vec<RowRun>) {
        let RowRun { mut to_row, first, count, pad } = run;
        let listed = &self.index[first as usize..][..count as usize];
        for rows in listed.chunk_by(|a, b| a + 1 == *b) {
            let count = rows.len() as u32;
            spans.push(RowRun { to_row, first: rows[0], count, pad: 0 });
            to_row += count;
        }
        match spans.last_mut().filter(|_| count > 0) {
            Some(last) => last.pad = pad,
            None => spans.push(RowRun { to_row, first: 0, count: 0, pad }),
        }
    }

    /// Whether the header of a source is valid: it has `entries` entries, each names an existing
    /// row, those of a bin follow the order of the block if `ordered`, the rows of a bin have
    /// numbers, and sums lie among as many rows as landed.
    pub fn is_sound(&self, entries: u32, ordered: bool) -> bool {
        let counted: u64 = self.segments.iter().map(|segment| u64::from(segment.count)).sum();
        if counted != u64::from(entries) || self.index.len() != entries as usize {
            return false;
        }
        let inside = |(sums, &landed): (&Segment, &u32)| {
            sums.to_row.checked_add(sums.count).is_some_and(|end| end <= landed)
        };
        if !self.rank_sums.iter().zip(&self.landed).all(inside) {
            return false;
        }
        let mut first = 0;
        self.segments.iter().all(|segment| {
            let listed = &self.index[first..][..segment.count as usize];
            first += listed.len();
            let in_order = !ordered || listed.is_sorted_by(|a, b| a < b);
            let behind = segment.to_row.checked_add(segment.count);
            let is_numbered = behind.is_some_and(|behind| behind.checked_add(segment.pad).is_some());
            in_order && is_numbered && listed.iter().all(|&row| row < self.rows)
        })
    }
}

/// The blocks that one rank relays, in the order of
/// [`Paths::sources`](crate::topology::Paths::sources).
#[derive(Clone, Debug, Default)]
pub struct RelayPlan {
    /// The block of each source.
    pub blocks: Vec<Block>,
    /// Rows are relayed in spans, not one by one: blocks lie in relay order.
    pub spans: bool,
    /// Routing weight of each entry of each block; empty unless relays weight their sums.
    pub weights: Vec<f32>,
    /// Rows that runs index into: for each entry of each block its row in the block. Empty for
    /// spans, which are rows of the block themselves.
    pub rows: Vec<u32>,
    /// All runs: for each block, chunk and rank served. Chunk 0 stands for the row metadata: all
    /// entries, counted from the first of the block.
    pub runs: Vec<RowRun>,
    /// First run of each (block, chunk from 0 on, rank served); one more than there are.
    starts: Vec<u32>,
    /// Sums of a relay; empty where it returns rows unchanged.
    pub partials: Partials,
    served: usize,
    chunks: u8,
    /// Runs that are cut into spans.
    listed: Vec<RowRun>,
    /// Order of the sums of a block whose rows engines pull.
    pulled: PulledSums,
}

/// The partial sums of all blocks: a token's rows on one rank
/// ([`SumOrder::Rank`](crate::plan::SumOrder)) or on this node
/// ([`SumOrder::Node`](crate::plan::SumOrder)).
#[derive(Clone, Debug, Default)]
pub struct Partials {
    /// Summands of all partials, block after block, token after token, each in summation order.
    pub terms: Vec<Summand>,
    /// First term of each partial; one more than there are.
    pub starts: Vec<u32>,
    /// Per term: its entry, counted through all blocks.
    pub entries: Vec<u32>,
    /// First partial of each (block, chunk from 1 on); one more than there are.
    chunk_starts: Vec<u32>,
    /// Per row of the block that is summed: where its next term goes.
    cursors: Vec<u32>,
    /// Per bin: its segment in the block and its first entry.
    segments: Vec<(u32, u32)>,
}

impl RelayPlan {
    /// Lays out the runs of the blocks for the ranks served and, with `sums`, their partial sums.
    pub fn fill(&mut self, bins: &Bins, served: &[u32], chunks: u8, sums: bool) {
        self.rows.clear();
        self.runs.clear();
        self.starts.clear();
        (self.served, self.chunks) = (served.len(), chunks);
        self.partials.clear();
        let mut first = 0;
        for block in &self.blocks {
            if !self.spans {
                self.rows.extend(&block.index);
            }
            for part in 0..=chunks {
                for member in 0..served.len() {
                    self.starts.push(self.runs.len() as u32);
                    match part {
                        0 => block.runs(bins, served, member, (1, 1), 0, &mut self.runs),
                        _ if self.spans => {
                            block.runs(bins, served, member, (part, chunks), 0, &mut self.listed);
                            self.listed.drain(..).for_each(|run| block.spans(run, &mut self.runs));
                        }
                        _ => block.runs(bins, served, member, (part, chunks), first, &mut self.runs),
                    }
                }
            }
            if sums {
                let rows_of = |chunk| Block::chunk(block.rows, chunk, chunks);
                self.partials.add(block, bins, (served, first), |row| row, (chunks, rows_of));
            }
            first += block.index.len() as u32;
        }
        self.starts.push(self.runs.len() as u32);
        self.partials.chunk_starts.push(self.partials.count());
    }

    /// Lays out the partial sums alone, those of a block [in the order](PulledSums) in which
    /// engines pull its rows: in `most` chunks, the last of which may be empty.
    pub fn fill_pulled(&mut self, bins: &Bins, served: &[u32], most: u8, sizing: &RowSizes) {
        (self.served, self.chunks) = (served.len(), most);
        self.partials.clear();
        let mut first = 0;
        for block in &self.blocks {
            let counts = block.segments.iter().map(|segment| segment.count);
            let chunks = block.pulled_chunks(most, sizing);
            self.pulled.fill(block.rows, counts, &block.index, chunks);
            let PulledSums { places, starts } = &self.pulled;
            let start = |chunk: u8| starts[usize::from(chunk.min(chunks))];
            let rows_of = |chunk: u8| start(chunk - 1)..start(chunk);
            self.partials.add(block, bins, (served, first), |row| places[row as usize], (most, rows_of));
            first += block.index.len() as u32;
        }
        self.partials.chunk_starts.push(self.partials.count());
    }

    /// Entries of all blocks.
    pub fn entries(&self) -> u32 {
        self.blocks.iter().map(|block| block.index.len() as u32).sum()
    }

    /// The rows of each partial, `[partials, top_k]` and -1 behind them, as a kernel reads them:
    /// pulled rows by their entries and, counted on behind those of all entries, rows of rank `me`
    /// where it made them. With `weights`, also the weight of each.
    pub fn list_pulled(&self, me: u32, top_k: u32, index: &mut Vec<i32>, weights: Option<&mut Vec<f32>>) {
        let Partials { terms, starts, entries, .. } = &self.partials;
        let (behind, width) = (self.entries(), top_k as usize);
        let cells = self.partials.count() as usize * width;
        refill(index, cells, -1);
        let place = |term: usize| match terms[term] {
            Summand { owner, row } if owner == me => behind.saturating_add(row) as i32,
            _ => entries[term] as i32,
        };
        let of_partials = || starts.windows(2).map(|of| (of[0] as usize..of[1] as usize).take(width));
        for (cells, of) in index.chunks_exact_mut(width).zip(of_partials()) {
            cells.iter_mut().zip(of).for_each(|(cell, term)| *cell = place(term));
        }
        let Some(weights) = weights else { return };
        refill(weights, cells, 0.0);
        for (cells, of) in weights.chunks_exact_mut(width).zip(of_partials()) {
            let weight = |term: usize| self.weights.get(entries[term] as usize).copied().unwrap_or(1.0);
            cells.iter_mut().zip(of).for_each(|(cell, term)| *cell = weight(term));
        }
    }

    /// In how many chunks blocks come or, where engines pull rows for sums, these at most.
    pub fn chunks(&self) -> u8 {
        self.chunks
    }

    /// The runs of chunk `chunk` of the `nth` block for the `member`th rank served.
    pub fn runs_of(&self, nth: usize, chunk: u8, member: usize) -> std::ops::Range<u32> {
        let at = (nth * (usize::from(self.chunks) + 1) + usize::from(chunk)) * self.served + member;
        self.starts[at]..self.starts[at + 1]
    }

    /// The rows of its block that a run of a chunk (from 1) takes.
    pub fn rows_of(&self, run: RowRun) -> impl Iterator<Item = u32> {
        let row = |at: u32| if self.spans { at } else { self.rows[at as usize] };
        (run.first..run.first + run.count).map(row)
    }

    /// Copies that hand all rows on: one for each span, or for each row. Zeros are not copied.
    pub fn copies(&self) -> u64 {
        let parts = (0..self.blocks.len()).flat_map(|nth| (1..=self.chunks).map(move |chunk| (nth, chunk)));
        let of_part = |(nth, chunk)| {
            let runs = (0..self.served).flat_map(move |member| self.runs_of(nth, chunk, member));
            runs.map(|run| self.runs[run as usize].count).filter(|&count| count > 0)
        };
        parts.flat_map(of_part).map(|count| if self.spans { 1 } else { u64::from(count) }).sum()
    }

    /// The partials of chunk `chunk` (from 1) of the `nth` block.
    pub fn partials_of(&self, nth: usize, chunk: u8) -> std::ops::Range<u32> {
        let at = nth * usize::from(self.chunks) + usize::from(chunk) - 1;
        self.partials.chunk_starts[at]..self.partials.chunk_starts[at + 1]
    }

    /// All partials of the `nth` block.
    pub fn partials_from(&self, nth: usize) -> std::ops::Range<u32> {
        self.partials_of(nth, 1).start..self.partials_of(nth, self.chunks).end
    }
}

impl Partials {
    fn clear(&mut self) {
        self.terms.clear();
        self.entries.clear();
        self.chunk_starts.clear();
        refill(&mut self.starts, 1, 0);
    }

    /// Number of partials.
    pub fn count(&self) -> u32 {
        self.starts.len().saturating_sub(1) as u32
    }

    /// Adds the sums of a block, whose first entry has this number among those of all blocks. The
    /// row of the block that `place` makes the nth is the nth that is summed.
    fn add(
        &mut self,
        block: &Block,
        bins: &Bins,
        (served, first_entry): (&[u32], u32),
        place: impl Fn(u32) -> u32,
        (chunks, rows_of): (u8, impl Fn(u8) -> std::ops::Range<u32>),
    ) {
        self.place(block, bins, (served, first_entry), place);
        let mut term = self.starts[self.count() as usize] as usize;
        for chunk in 1..=chunks {
            self.chunk_starts.push(self.count());
            for row in rows_of(chunk) {
                let end = self.cursors[row as usize] as usize;
                while term < end {
                    let owner = self.terms[term].owner;
                    let last = match bins.order().per_partial(true, false) {
                        Some(true) => {
                            let same = self.terms[term..end].iter().take_while(|t| t.owner == owner);
                            term + same.count()
                        }
                        _ => end,
                    };
                    self.starts.push(last as u32);
                    term = last;
                }
            }
        }
    }

    /// Places the entries of a block by row, as `place` orders these, and then in the order of the
    /// sum; afterwards `cursors` say where the terms of each row end.
    fn place(
        &mut self,
        block: &Block,
        bins: &Bins,
        (served, first_entry): (&[u32], u32),
        place: impl Fn(u32) -> u32,
    ) {
        let first = self.terms.len();
        refill(&mut self.cursors, block.rows as usize + 1, 0);
        block.index.iter().for_each(|&row| self.cursors[place(row) as usize + 1] += 1);
        self.cursors[0] = first as u32;
        for row in 0..block.rows as usize {
            self.cursors[row + 1] += self.cursors[row];
        }
        self.terms.resize(first + block.index.len(), Summand::default());
        self.entries.resize(first + block.index.len(), 0);
        refill(&mut self.segments, bins.count() as usize, (u32::MAX, 0));
        let mut entry = 0;
        for (segment, bin) in (0..).zip(served.iter().flat_map(|&rank| bins.of(rank))) {
            self.segments[bin as usize] = (segment, entry);
            entry += block.segments[segment as usize].count;
        }
        for &bin in bins.in_order() {
            let (segment, entry) = self.segments[bin as usize];
            let Some(segment) = block.segments.get(segment as usize) else { continue };
            let listed = &block.index[entry as usize..][..segment.count as usize];
            for (nth, &row) in (0..).zip(listed) {
                let cursor = &mut self.cursors[place(row) as usize];
                self.terms[*cursor as usize] =
                    Summand { owner: bins.rank_of(bin), row: segment.to_row + nth };
                self.entries[*cursor as usize] = first_entry + entry + nth;
                *cursor += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    mod block {
        use super::*;
        use crate::plan::{ExpertMap, SumOrder};
        use crate::topology::NodeMap;

        /// Three tokens for two ranks with two bins each: token 0 for bins 0 and 3, token 1 for bin
        /// 1, token 2 for 1 and 3.
        fn block() -> (Bins, Block) {
            let map = ExpertMap::contiguous(4, 2).unwrap();
            let bins = Bins::experts(&map, SumOrder::Expert, &NodeMap::from_labels(&[0, 0]));
            let segment = |to_row, count, pad| Segment { to_row, count, pad };
            let segments = vec![segment(10, 1, 0), segment(20, 2, 1), segment(0, 0, 0), segment(5, 2, 3)];
            let (landed, index) = (vec![24, 16], vec![0, 1, 2, 0, 2]);
            (bins, Block { rows: 3, landed, segments, index, ..Block::default() })
        }

        /// A chunk has 16 bytes of each bin.
        fn sizing(return_bytes: u64) -> RowSizes {
            let (partial_bytes, rank_sums, pulled_bytes) = (Some(return_bytes), false, 16);
            let (row_bytes, words_out, return_words) = (return_bytes, 1, 1);
            RowSizes {
                row_bytes,
                return_bytes,
                words_out,
                return_words,
                partial_bytes,
                rank_sums,
                pulled_bytes,
            }
        }

        #[test]
        fn larger_blocks_go_in_more_chunks_within_limits() {
            let (row, fp8_row) = (14_336, 7_392);
            let chunks = |tokens: u64, row| Block::chunks_for_engines(tokens * row);
            assert_eq!([0, 128, 512].map(|tokens| chunks(tokens, row)), [4, 4, 4]);
            assert_eq!([1024, 2048, 4096, 65_536].map(|tokens| chunks(tokens, row)), [6, 8, 12, 12]);
            assert_eq!(chunks(4096, fp8_row), 8);
        }

        #[test]
        fn chunks_cover_all_rows_in_order() {
            for (rows, chunks) in [(0, 1), (1, 4), (7, 3), (8, 4), (u32::MAX, 255)] {
                let mut next = 0;
                for chunk in 1..=chunks {
                    let range = Block::chunk(rows, chunk, chunks);
                    assert_eq!(range.start, next);
                    next = range.end;
                }
                assert_eq!(next, rows);
            }
        }

        #[test]
        fn relay_chunk_forwards_its_rows_entries_and_last_one_pads() {
            let (bins, block) = block();
            let runs = |member, chunk| {
                let mut runs = Vec::new();
                block.runs(&bins, &[0, 1], member, chunk, 100, &mut runs);
                runs
            };
            let run = |to_row, first, count, pad| RowRun { to_row, first, count, pad };
            // Rows 0 and 1 are the first of two chunks, row 2 is the second.
            assert_eq!(runs(0, (1, 2)), [run(10, 100, 1, 0), run(20, 101, 1, 0)]);
            assert_eq!(runs(0, (2, 2)), [run(21, 102, 1, 1)]);
            assert_eq!(runs(1, (1, 2)), [run(5, 103, 1, 0)]);
            assert_eq!(runs(1, (2, 2)), [run(6, 104, 1, 3)]);
            assert_eq!(runs(1, (1, 1)), [run(5, 103, 2, 3)], "all at once");
        }

        #[test]
        fn pulled_sum_reads_entries_and_own_rows_in_sum_order() {
            let (_, block) = block();
            // Slots of rank 0 are experts 3 and 1, those of rank 1 experts 0 and 2. Row 2 has a
            // slot of each rank.
            let map = ExpertMap::from_slots(4, &[vec![3, 1], vec![0, 2]]).unwrap();
            let bins = Bins::experts(&map, SumOrder::Node, &NodeMap::from_labels(&[0, 0]));
            let weights = (0..10).map(|entry| entry as f32).collect();
            let blocks = vec![block.clone(), Block { index: vec![1, 0, 2, 2, 0], ..block }];
            let mut plan = RelayPlan { blocks, weights, ..RelayPlan::default() };
            plan.fill_pulled(&bins, &[0, 1], 1, &sizing(16));
            assert_eq!((plan.partials_from(0), plan.partials_from(1)), (0..3, 3..6));
            let (mut index, mut weights) = (Vec::new(), Vec::new());
            plan.list_pulled(1, 3, &mut index, Some(&mut weights));
            // Ten entries come before own rows.
            let first = [[0, 15, -1], [1, -1, -1], [2, 16, -1]];
            let second = [[6, 16, -1], [5, -1, -1], [7, 15, -1]];
            assert_eq!(index, [first, second].concat().concat());
            let first = [[0.0, 3.0, 0.0], [1.0, 0.0, 0.0], [2.0, 4.0, 0.0]];
            let second = [[6.0, 9.0, 0.0], [5.0, 0.0, 0.0], [7.0, 8.0, 0.0]];
            assert_eq!(weights, [first, second].concat().concat());
        }

        #[test]
        fn sums_of_pulled_rows_come_chunk_by_chunk_when_their_rows_have() {
            let (_, block) = block();
            let map = ExpertMap::contiguous(4, 2).unwrap();
            let bins = Bins::experts(&map, SumOrder::Node, &NodeMap::from_labels(&[0, 0]));
            // Row 1 is complete with the first chunk, rows 0 and 2 with the second.
            let block = Block { index: vec![0, 1, 2, 2, 0], ..block };
            let mut plan = RelayPlan { blocks: vec![block], ..RelayPlan::default() };
            // Five entries of four bins are enough for two chunks, of three that there may be.
            plan.fill_pulled(&bins, &[0, 1], 3, &sizing(32));
            assert_eq!([1, 2, 3].map(|chunk| plan.partials_of(0, chunk)), [0..1, 1..3, 3..3]);
            let (mut index, me) = (Vec::new(), 2);
            plan.list_pulled(me, 2, &mut index, None);
            assert_eq!(index, [[1, -1], [0, 4], [2, 3]].concat());
        }

        #[test]
        fn a_header_that_lists_other_rows_than_there_are_is_not_sound() {
            let (_, block) = block();
            assert!(block.is_sound(5, true));
            assert!(!block.is_sound(6, true), "as many entries as the header says");
            assert!(!Block { rows: 2, ..block.clone() }.is_sound(5, true), "a row that does not exist");
            assert!(
                !Block { index: vec![0, 2, 1, 0, 2], ..block.clone() }.is_sound(5, true),
                "rows out of order"
            );
            assert!(
                !Block { index: vec![0; 4], ..block.clone() }.is_sound(5, true),
                "an entry without a row"
            );
            let sums = |to_row| {
                let rank_sums = vec![Segment { to_row, count: 2, pad: 0 }; 2];
                Block { rank_sums, ..block.clone() }.is_sound(5, true)
            };
            assert_eq!(
                [14, 15, u32::MAX].map(sums),
                [true, false, false],
                "sums behind the 16 rows of a rank"
            );
        }
    }

    mod forward {
        use super::*;
        use crate::plan::{ExpertMap, Segment, SumOrder};
        use crate::topology::NodeMap;

        #[test]
        fn runs_count_rows_over_all_blocks_and_notes_per_block() {
            let map = ExpertMap::contiguous(2, 2).unwrap();
            let bins = Bins::experts(&map, SumOrder::Expert, &NodeMap::from_labels(&[0, 0]));
            let block = |to_row| Block {
                rows: 2,
                landed: vec![8, 8],
                segments: vec![Segment { to_row, count: 1, pad: 0 }, Segment { to_row, count: 2, pad: 0 }],
                index: vec![1, 0, 1],
                ..Block::default()
            };
            let mut forward = RelayPlan::default();
            forward.blocks.extend([block(0), block(4)]);
            forward.fill(&bins, &[0, 1], 2, false);
            assert_eq!(forward.rows, [1, 0, 1, 1, 0, 1]);
            let runs = |nth, chunk, member| {
                let runs = forward.runs_of(nth, chunk, member);
                forward.runs[runs.start as usize..runs.end as usize].to_vec()
            };
            let run = |to_row, first, count| RowRun { to_row, first, count, pad: 0 };
            assert_eq!(runs(1, 0, 1), [run(4, 1, 2)], "metadata: second and third of the block");
            assert_eq!(runs(1, 1, 0), [], "the first chunk has no row for the first rank");
            assert_eq!(runs(1, 2, 0), [run(4, 3, 1)]);
            assert_eq!(runs(1, 1, 1), [run(4, 4, 1)]);
            assert_eq!(runs(1, 2, 1), [run(5, 5, 1)]);

            forward.blocks.clear();
            forward.fill(&bins, &[0, 1], 2, false);
            assert!(forward.rows.is_empty() && forward.runs.is_empty(), "what was known before is forgotten");
        }

        #[test]
        fn partials_are_of_a_rank_or_of_a_node_and_come_chunk_by_chunk() {
            let (map, nodes) = (ExpertMap::contiguous(2, 2).unwrap(), NodeMap::from_labels(&[0, 0]));
            // Row 0 goes to both ranks, row 1 to the second.
            let block = Block {
                rows: 2,
                landed: vec![8, 8],
                segments: vec![
                    Segment { to_row: 3, count: 1, pad: 0 },
                    Segment { to_row: 5, count: 2, pad: 0 },
                ],
                index: vec![0, 0, 1],
                ..Block::default()
            };
            let term = |owner, row| Summand { owner, row };
            for (order, starts, second) in
                [(SumOrder::Rank, vec![0, 1, 2, 3], 2), (SumOrder::Node, vec![0, 2, 3], 1)]
            {
                let bins = Bins::experts(&map, order, &nodes);
                let mut forward = RelayPlan::default();
                forward.blocks.push(block.clone());
                forward.fill(&bins, &[0, 1], 2, true);
                let Partials { terms, entries, .. } = &forward.partials;
                assert_eq!(terms, &[term(0, 3), term(1, 5), term(1, 6)]);
                assert_eq!(entries, &[0, 1, 2]);
                assert_eq!(forward.partials.starts, starts, "{order:?}");
                assert_eq!(
                    (forward.partials_of(0, 1), forward.partials_of(0, 2)),
                    (0..second, second..second + 1)
                );
            }
        }
    }
}
