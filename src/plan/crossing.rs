//! Which tokens cross to other nodes: all that a rank can know of its blocks before the counts of others arrive.

use super::sorted::refill;
use super::{Bins, Sorted};
use crate::topology::{Paths, Route};

/// The tokens of each block, each once, and the row of each entry, in the order of [`Paths::relays`]. Where rows go
/// straight, every entry is a row of its own and nothing is listed.
///
/// Reused from call to call: after the first call of a size nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct Crossing {
    /// Token of each row, block after block.
    pub tokens: Vec<u32>,
    /// First of `tokens` of each block; one more than there are blocks.
    pub starts: Vec<u32>,
    /// Row of each entry in its block, by bin and then token, block after block.
    pub index: Vec<u32>,
    /// First of `index` of each block; one more than there are blocks.
    pub index_starts: Vec<u32>,
    /// Per token: its row in the block that is being made.
    row_of: Vec<u32>,
}

impl Crossing {
    /// Lists what crosses.
    pub fn fill(&mut self, bins: &Bins, paths: &Paths, sorted: &Sorted) {
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

    fn add(&mut self, bins: &Bins, served: &[u32], sorted: &Sorted) {
        const ABSENT: u32 = u32::MAX;
        let entries = |&rank: &u32| sorted.tokens_of(bins.of(rank)).iter().copied();
        refill(&mut self.row_of, sorted.tokens_here() as usize, ABSENT);
        for token in served.iter().flat_map(entries) {
            self.row_of[token as usize] = 0;
        }
        let first = self.tokens.len();
        for (row, token) in self.row_of.iter_mut().zip(0..).filter(|(row, _)| **row != ABSENT) {
            *row = (self.tokens.len() - first) as u32;
            self.tokens.push(token);
        }
        self.index.extend(served.iter().flat_map(entries).map(|token| self.row_of[token as usize]));
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

    /// Writes, per rank, how many rows this rank puts into its staging. Empty where nothing is staged.
    pub fn staged(&self, paths: &Paths, into: &mut Vec<u32>) {
        into.resize(into.len() + paths.staged_ranks() as usize, 0);
        let first = into.len() - paths.staged_ranks() as usize;
        for (nth, relay) in paths.relays().enumerate().filter(|_| paths.staged_ranks() > 0) {
            into[first + relay as usize] = self.rows(nth);
        }
    }
}
