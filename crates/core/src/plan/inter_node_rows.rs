//! Rows that cross between nodes: the tokens of each relay block, each once.

use super::{Bins, SortedRouting, refill, vec_memory_usage};
use crate::topology::{Paths, Route};

/// The tokens of each block, each once, and the row of each entry, in the order of
/// [`Paths::relays`]. On the direct route every entry is a row of its own and nothing is listed.
///
/// Reused from call to call: after the first call of a size nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct InterNodeRows {
    /// Token of each row, block after block.
    pub tokens: Vec<u32>,
    /// First of `tokens` of each block; one more than there are blocks.
    pub starts: Vec<u32>,
    /// Row of each entry in its block, by bin and then token, block after block.
    pub index: Vec<u32>,
    /// First of `index` of each block; one more than there are blocks.
    pub index_starts: Vec<u32>,
    /// Per token of the block that is being made: its row.
    row_of: Vec<u32>,
    /// A bit per token: whether it is of that block.
    marks: Vec<u64>,
}

impl InterNodeRows {
    /// Bytes that its tables hold, used or kept for the next call.
    pub fn memory_usage(&self) -> usize {
        let words = [&self.tokens, &self.starts, &self.index, &self.index_starts, &self.row_of];
        words.map(vec_memory_usage).iter().sum::<usize>() + vec_memory_usage(&self.marks)
    }

    /// Lists what crosses.
    pub fn fill(&mut self, bins: &Bins, paths: &Paths, sorted: &SortedRouting) {
        self.tokens.clear();
        self.index.clear();
        refill(&mut self.starts, 1, 0);
        refill(&mut self.index_starts, 1, 0);
        for relay in paths.relays() {
            if paths.route() == Route::Pxn {
                self.add(bins, paths.served_by(relay), sorted);
            }
            self.starts.push(self.tokens.len() as u32);
            self.index_starts.push(self.index.len() as u32);
        }
    }

    /// Many nodes mean many small blocks, so each block looks at a bit per token, not at the
    /// tokens.
    fn add(&mut self, bins: &Bins, served: &[u32], sorted: &SortedRouting) {
        let entries = || served.iter().map(|&rank| sorted.tokens_of(bins.of(rank)));
        let tokens_here = sorted.tokens_here() as usize;
        refill(&mut self.marks, tokens_here.div_ceil(64), 0);
        for &token in entries().flatten() {
            self.marks[token as usize / 64] |= 1 << (token % 64);
        }
        // Numbers that the last block left there are not read.
        self.row_of.resize(self.row_of.len().max(tokens_here), 0);
        let mut row = 0;
        for (nth, &marked) in (0..).zip(&self.marks) {
            let mut left = marked;
            while left != 0 {
                let token = nth * 64 + left.trailing_zeros();
                self.row_of[token as usize] = row;
                self.tokens.push(token);
                (row, left) = (row + 1, left & (left - 1));
            }
        }
        for tokens in entries() {
            self.index.extend(tokens.iter().map(|&token| self.row_of[token as usize]));
        }
    }

    /// Rows of the `nth` block.
    pub fn rows(&self, nth: usize) -> u32 {
        self.starts[nth + 1] - self.starts[nth]
    }

    /// Token of each row of the `nth` block.
    pub fn tokens_of(&self, nth: usize) -> &[u32] {
        &self.tokens[self.starts[nth] as usize..self.starts[nth + 1] as usize]
    }

    /// Row of each entry of the `nth` block.
    pub fn index_of(&self, nth: usize) -> &[u32] {
        &self.index[self.index_starts[nth] as usize..self.index_starts[nth + 1] as usize]
    }

    /// Both, to put them in another order.
    pub(super) fn block_mut(&mut self, nth: usize) -> (&mut [u32], &mut [u32]) {
        let tokens = self.starts[nth] as usize..self.starts[nth + 1] as usize;
        let index = self.index_starts[nth] as usize..self.index_starts[nth + 1] as usize;
        (&mut self.tokens[tokens], &mut self.index[index])
    }

    /// Writes, per rank, how many rows this rank puts into its staging. Empty where nothing is
    /// staged.
    pub fn staged(&self, paths: &Paths, into: &mut Vec<u32>) {
        into.resize(into.len() + paths.staged_ranks() as usize, 0);
        let first = into.len() - paths.staged_ranks() as usize;
        for (nth, relay) in paths.relays().enumerate().filter(|_| paths.staged_ranks() > 0) {
            into[first + relay as usize] = self.rows(nth);
        }
    }
}
