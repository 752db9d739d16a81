//! A relay's knowledge of one dispatch: the blocks of its sources, the runs that relay their rows,
//! and the sums that it returns.

use super::sorted::refill;
use super::{Bins, Block, RowRun, Summand};

/// The blocks that one rank relays, in the order of
/// [`Paths::sources`](crate::topology::Paths::sources).
#[derive(Clone, Debug, Default)]
pub struct RelayPlan {
    /// What each source sent.
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
                self.partials.add(block, bins, served, first, chunks);
            }
            first += block.index.len() as u32;
        }
        self.starts.push(self.runs.len() as u32);
        self.partials.chunk_starts.push(self.partials.count());
    }

    /// In how many chunks blocks come.
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

    fn add(&mut self, block: &Block, bins: &Bins, served: &[u32], first_entry: u32, chunks: u8) {
        self.place(block, bins, served, first_entry);
        let mut term = self.starts[self.count() as usize] as usize;
        let mut row = 0;
        for chunk in 1..=chunks {
            self.chunk_starts.push(self.count());
            for row_of_chunk in Block::chunk(block.rows, chunk, chunks) {
                debug_assert_eq!(row, row_of_chunk);
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
                row += 1;
            }
        }
    }

    /// Places the entries of a block by row and then in the order of the sum; afterwards `cursors`
    /// say where the terms of each row end.
    fn place(&mut self, block: &Block, bins: &Bins, served: &[u32], first_entry: u32) {
        let first = self.terms.len();
        refill(&mut self.cursors, block.rows as usize + 1, 0);
        block.index.iter().for_each(|&row| self.cursors[row as usize + 1] += 1);
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
                let cursor = &mut self.cursors[row as usize];
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
    use crate::plan::{ExpertMap, Segment, SumOrder};
    use crate::topology::NodeMap;

    #[test]
    fn runs_count_rows_from_the_first_of_all_blocks_and_notes_from_the_first_of_their_own() {
        let map = ExpertMap::contiguous(2, 2).unwrap();
        let bins = Bins::experts(&map, SumOrder::Expert, &NodeMap::from_labels(&[0, 0]));
        let block = |to_row| Block {
            rows: 2,
            first: 0,
            landed: vec![8, 8],
            segments: vec![Segment { to_row, count: 1, pad: 0 }, Segment { to_row, count: 2, pad: 0 }],
            index: vec![1, 0, 1],
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
        assert_eq!(runs(1, 0, 1), [run(4, 1, 2)], "notes: second and third of the block");
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
            first: 0,
            landed: vec![8, 8],
            segments: vec![Segment { to_row: 3, count: 1, pad: 0 }, Segment { to_row: 5, count: 2, pad: 0 }],
            index: vec![0, 0, 1],
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
