//! In which order the rows of a block lie, so that a copy engine can hand them on.
//!
//! A token for several ranks of a remote node crosses once, to one of them, the *relay*, in the
//! *block* of its source; the relay copies the rows to the ranks of its node. A copy engine cannot
//! gather: it copies *spans*, consecutive rows of the block to consecutive rows at one rank, and
//! each copy has its price. So the sender sorts the block by the *set* of ranks that a row goes to,
//! and the sets along a reflected Gray code, in which adjacent sets differ in one rank:
//!
//! ```text
//!    token order               sets as numbers           relay order
//!    row  set    to 0 1 2      row  set    to 0 1 2      row  set    to 0 1 2
//!     0   {1,2}       | |       5   {0}       |           5   {0}       |
//!     1   {0,1}     | |         1   {0,1}     | |         1   {0,1}     | |
//!     2   {0,2}     |   |       4   {0,1}     | |         4   {0,1}     | |
//!     3   {2}           |       3   {2}           |       0   {1,2}       | |
//!     4   {0,1}     | |         2   {0,2}     |   |       6   {0,1,2}   | | |
//!     5   {0}       |           0   {1,2}       | |       2   {0,2}     |   |
//!     6   {0,1,2}   | | |       6   {0,1,2}   | | |       3   {2}           |
//!                 2+3+3 = 8                 3+2+1 = 6                 2+1+1 = 4 copies
//! ```
//!
//! Leaving rows out never adds a span, so the number of possible sets bounds the number of spans,
//! for any number of tokens: 2^(n-1) for n ranks, half of what sets sorted as numbers need, and the
//! least that any order of all sets needs.

use std::ops::Range;

use super::sorted::refill;
use super::{Block, RowRun};

/// For each row of a block, the set of ranks of the node that it goes to. Ranks count from 0 in the
/// node.
///
/// ```
/// let mut sets = sidelane_core::plan::RankSets::new(3);
/// sets.push([1, 2]);
/// sets.push([0, 0]);
/// assert_eq!(sets.rows(), 2);
/// ```
#[derive(Clone, Debug, Default)]
pub struct RankSets {
    ranks: u32,
    /// `[rows, words]`; the ranks from `64 * w` on are the bits of word `w`.
    bits: Vec<u64>,
}

impl RankSets {
    /// No rows yet, for a node of `ranks` ranks.
    pub fn new(ranks: u32) -> Self {
        RankSets { ranks, bits: Vec::new() }
    }

    /// As many rows as these, in a node of `ranks` ranks, which go nowhere yet. Keeps the memory.
    pub fn reset(&mut self, ranks: u32, rows: u32) {
        self.ranks = ranks;
        let words = rows as usize * self.words();
        refill(&mut self.bits, words, 0);
    }

    /// Adds a row that goes to `ranks`. A rank may be listed several times: a token may want
    /// several of its experts.
    ///
    /// # Panics
    /// If the node has no such rank.
    pub fn push(&mut self, ranks: impl IntoIterator<Item = u32>) {
        let row = self.rows() as u32;
        self.bits.resize(self.bits.len() + self.words(), 0);
        ranks.into_iter().for_each(|rank| self.add(row, rank));
    }

    /// Row `row` goes to `rank`, too.
    ///
    /// # Panics
    /// If there is no such row, or the node has no such rank.
    pub fn add(&mut self, row: u32, rank: u32) {
        assert!(rank < self.ranks, "rank {rank} in a node of {}", self.ranks);
        let set = row as usize * self.words();
        self.bits[set + (rank / 64) as usize] |= 1 << (rank % 64);
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.bits.len() / self.words()
    }

    fn words(&self) -> usize {
        self.ranks.div_ceil(64).max(1) as usize
    }

    fn of(&self, row: u32) -> &[u64] {
        let words = self.words();
        &self.bits[row as usize * words..][..words]
    }
}

/// The relay order of one block, and the spans that come of it.
///
/// Reused from call to call: after the first call of a size nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct RelayOrder {
    /// For each row of the block, the index of the given row. Rows with equal sets keep their
    /// order.
    pub rows: Vec<u32>,
    /// Spans to all ranks of the node, by rank and then row: the longest runs of block rows that go
    /// to it.
    ///
    /// `first` is a row of the block. `to_row` counts from the first row that this block has at the
    /// rank, where its rows lie one after another in the order of the block. There are no pads.
    pub spans: Vec<RowRun>,
    /// First span of each rank; one more than there are ranks.
    pub span_starts: Vec<u32>,
    /// Place of each given row's set in the Gray code, `[rows, words]`, most significant word
    /// first.
    places: Vec<u64>,
    /// `rows` in the making.
    spare: Vec<u32>,
    /// Per rank: where its next span goes, and to which row.
    cursors: Vec<Cursor>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    span: u32,
    to_row: u32,
}

impl RelayOrder {
    /// Sorts the rows with these sets into relay order and cuts it into spans. Sorted rows stay as
    /// they are: a relay that receives the sets of a block finds the spans of its sender.
    pub fn fill(&mut self, sets: &RankSets) {
        self.rows.clear();
        self.rows.extend(0..sets.rows() as u32);
        self.find_places(sets);
        if sets.words() == 1 {
            self.sort_by_digits(sets.ranks)
        } else {
            self.sort_by_words(sets.words())
        }
        self.cut(sets);
    }

    /// The spans to one rank.
    pub fn spans_to(&self, rank: u32) -> Range<u32> {
        self.span_starts[rank as usize]..self.span_starts[rank as usize + 1]
    }

    /// Copies that relay the block if it comes in `chunks` chunks: a span goes on with each chunk
    /// that brings rows of it.
    pub fn copies(&self, chunks: u8) -> u64 {
        let rows = self.rows.len() as u32;
        let parts =
            (1..=chunks).map(|chunk| Block::chunk(rows, chunk, chunks)).filter(|part| !part.is_empty());
        let cut = |span: &RowRun| {
            let meets = |part: &Range<u32>| part.start < span.first + span.count && span.first < part.end;
            parts.clone().filter(meets).count() as u64
        };
        self.spans.iter().map(cut).sum()
    }

    /// Bit i of a set's place in the Gray code is the parity of the set's ranks from i up.
    fn find_places(&mut self, sets: &RankSets) {
        self.places.clear();
        for set in sets.bits.chunks_exact(sets.words()) {
            let mut odd_above = 0;
            self.places.extend(set.iter().rev().map(|&word| {
                let place = parities(word) ^ odd_above;
                odd_above = (place & 1).wrapping_neg();
                place
            }));
        }
    }

    /// Counting sorts, each by a byte of the places: in nodes of 8, a single one.
    fn sort_by_digits(&mut self, ranks: u32) {
        refill(&mut self.spare, self.rows.len(), 0);
        for shift in (0..ranks).step_by(8) {
            let digit = |row: u32| (self.places[row as usize] >> shift) as usize & 0xff;
            let mut cursors = [0u32; 256];
            self.rows.iter().for_each(|&row| cursors[digit(row)] += 1);
            let mut sum = 0;
            for cursor in &mut cursors {
                sum += std::mem::replace(cursor, sum);
            }
            for &row in &self.rows {
                let cursor = &mut cursors[digit(row)];
                self.spare[*cursor as usize] = row;
                *cursor += 1;
            }
            std::mem::swap(&mut self.rows, &mut self.spare);
        }
    }

    /// Long places differ early, so comparing them beats counting all their digits.
    fn sort_by_words(&mut self, words: usize) {
        let key = |row: u32| (&self.places[row as usize * words..][..words], row);
        self.rows.sort_unstable_by(|&a, &b| key(a).cmp(&key(b)));
    }

    fn cut(&mut self, sets: &RankSets) {
        refill(&mut self.span_starts, sets.ranks as usize + 1, 0);
        changes(&self.rows, sets, |_, before, now| {
            added(before, now).for_each(|rank| self.span_starts[rank + 1] += 1);
        });
        let mut sum = 0;
        self.span_starts.iter_mut().for_each(|start| {
            sum += *start;
            *start = sum;
        });
        refill(&mut self.spans, sum as usize, RowRun::default());
        self.cursors.clear();
        self.cursors.extend(self.span_starts.iter().map(|&span| Cursor { span, to_row: 0 }));
        changes(&self.rows, sets, |row, before, now| {
            for rank in added(before, now) {
                let Cursor { span, to_row } = self.cursors[rank];
                self.spans[span as usize] = RowRun { to_row, first: row, count: 0, pad: 0 };
            }
            for rank in added(now, before) {
                let cursor = &mut self.cursors[rank];
                let span = &mut self.spans[cursor.span as usize];
                span.count = row - span.first;
                *cursor = Cursor { span: cursor.span + 1, to_row: cursor.to_row + span.count };
            }
        });
    }
}

/// Bit i of the result is the parity of the bits from i up.
fn parities(mut word: u64) -> u64 {
    for shift in [1, 2, 4, 8, 16, 32] {
        word ^= word >> shift;
    }
    word
}

/// Calls `at(row, before, now)` for each row of the block whose set differs from the one before it.
/// Before the first row and behind the last one lies the empty set.
fn changes(rows: &[u32], sets: &RankSets, mut at: impl FnMut(u32, &[u64], &[u64])) {
    let mut before: &[u64] = &[];
    for (row, &given) in (0..).zip(rows) {
        let now = sets.of(given);
        if now != before {
            at(row, before, now);
            before = now;
        }
    }
    at(rows.len() as u32, before, &[]);
}

/// The ranks of `now` that are not in `before`. Words that a set does not have are empty.
fn added(before: &[u64], now: &[u64]) -> impl Iterator<Item = usize> {
    let before = before.iter().copied().chain(std::iter::repeat(0));
    now.iter().zip(before).enumerate().flat_map(|(word, (&now, before))| {
        let mut left = now & !before;
        std::iter::from_fn(move || {
            let bit = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            (bit < 64).then_some(64 * word + bit)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the tables lie, and how much they hold.
    fn tables(order: &RelayOrder) -> [(usize, usize); 6] {
        fn table<T>(vec: &Vec<T>) -> (usize, usize) {
            (vec.as_ptr() as usize, vec.capacity())
        }
        let RelayOrder { rows, spans, span_starts, places, spare, cursors } = order;
        let mut of_rows = [table(rows), table(spare)];
        // Sorting swaps them.
        of_rows.sort();
        [of_rows[0], of_rows[1], table(spans), table(span_starts), table(places), table(cursors)]
    }

    #[test]
    fn a_second_call_of_a_size_keeps_the_tables() {
        for ranks in [8, 24, 64, 200] {
            let mut sets = RankSets::new(ranks);
            (0..500).for_each(|row| sets.push([row % ranks, row * row % ranks]));
            let mut order = RelayOrder::default();
            order.fill(&sets);
            let before = tables(&order);
            order.fill(&sets);
            assert_eq!(tables(&order), before, "in a node of {ranks}");
        }
    }
}
