//! Blocks: what a rank sends to one relay, described so that the relay needs no other information.
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

use super::sorted::vec_memory_usage;
use super::{Bins, RowRun};

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
    /// Per entry, segment after segment: its row.
    pub index: Vec<u32>,
}

impl Block {
    pub(super) fn held(&self) -> usize {
        vec_memory_usage(&self.landed) + vec_memory_usage(&self.segments) + vec_memory_usage(&self.index)
    }

    /// Number of entries.
    pub fn entries(&self) -> u32 {
        self.segments.iter().map(|segment| segment.count).sum()
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
    /// row, and those of a bin follow the order of the block if `ordered`.
    pub fn is_sound(&self, entries: u32, ordered: bool) -> bool {
        let counted: u64 = self.segments.iter().map(|segment| u64::from(segment.count)).sum();
        if counted != u64::from(entries) || self.index.len() != entries as usize {
            return false;
        }
        let mut first = 0;
        self.segments.iter().all(|segment| {
            let listed = &self.index[first..][..segment.count as usize];
            first += listed.len();
            let in_order = !ordered || listed.is_sorted_by(|a, b| a < b);
            in_order && listed.iter().all(|&row| row < self.rows)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{ExpertMap, SumOrder};
    use crate::topology::NodeMap;

    /// Three tokens for two ranks with two bins each: token 0 for bins 0 and 3, token 1 for bin 1,
    /// token 2 for 1 and 3.
    fn block() -> (Bins, Block) {
        let map = ExpertMap::contiguous(4, 2).unwrap();
        let bins = Bins::experts(&map, SumOrder::Expert, &NodeMap::from_labels(&[0, 0]));
        let segment = |to_row, count, pad| Segment { to_row, count, pad };
        let segments = vec![segment(10, 1, 0), segment(20, 2, 1), segment(0, 0, 0), segment(5, 2, 3)];
        (bins, Block { rows: 3, first: 0, landed: vec![24, 16], segments, index: vec![0, 1, 2, 0, 2] })
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
    fn a_chunk_hands_on_the_entries_of_its_rows_and_the_last_one_the_pads() {
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
    fn a_header_that_lists_other_rows_than_there_are_is_not_sound() {
        let (_, block) = block();
        assert!(block.is_sound(5, true));
        assert!(!block.is_sound(6, true), "as many entries as the header says");
        assert!(!Block { rows: 2, ..block.clone() }.is_sound(5, true), "a row that does not exist");
        assert!(
            !Block { index: vec![0, 2, 1, 0, 2], ..block.clone() }.is_sound(5, true),
            "rows out of order"
        );
        assert!(!Block { index: vec![0; 4], ..block }.is_sound(5, true), "an entry without a row");
    }
}
