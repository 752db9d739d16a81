//! Counts of the other ranks as a rank needs them, and the sizes that follow from them.
//!
//! ```text
//!   counts of local peers  --added-->            below[bins]: rows from lower ranks   --align, budget-->  ReceiveSizes:
//!   sums of other nodes    --directed sums-->    total[bins]: rows from all ranks                         begin, rows, staged
//! ```

use super::{Bins, refill, vec_memory_usage};
use crate::topology::Paths;

/// Two numbers per bin, for every way of counting.
///
/// ```text
///   below[b]   rows from ranks that precede this one in the group
///   total[b]   rows from all ranks
/// ```
///
/// Both are sums, so they can be added up on the way. Each rank of a node adds up the counts of its
/// local peers. The counts of another node come as two vectors (*directed sums*): the sum over its
/// members that precede this rank *in group order*, and its total. That is right for nodes of any
/// size, however they interleave.
///
/// Where rows are relayed, a word per rank follows those of the bins: the number of rows that it
/// stages. So these rows find their place by the same arithmetic, and no rank has to hold room for
/// the worst case.
#[derive(Debug, Default)]
pub struct Counts {
    /// Per bin: rows from ranks below this one.
    pub below: Vec<u32>,
    /// Per bin: rows from all ranks.
    pub total: Vec<u32>,
}

impl Clone for Counts {
    fn clone(&self) -> Self {
        Counts { below: self.below.clone(), total: self.total.clone() }
    }

    /// Its tables keep their memory.
    fn clone_from(&mut self, other: &Self) {
        self.below.clone_from(&other.below);
        self.total.clone_from(&other.total);
    }
}

impl Counts {
    /// Bytes that its tables hold, used or kept for the next call.
    pub fn memory_usage(&self) -> usize {
        vec_memory_usage(&self.below) + vec_memory_usage(&self.total)
    }

    /// Forgets everything: no rank has contributed. `words` is the number of bins, plus the number
    /// of ranks where rows are relayed.
    pub fn clear(&mut self, words: u32) {
        refill(&mut self.below, words as usize, 0);
        refill(&mut self.total, words as usize, 0);
    }

    /// Adds the counts of a rank, as rank `me` needs them.
    pub fn add(&mut self, me: u32, source: u32, counts: &[u32]) {
        if source < me {
            add(&mut self.below, counts);
        }
        add(&mut self.total, counts);
    }

    /// Counts of all ranks with fixed slots: `rows` in every bin from every rank. To relay, every
    /// source has as many rows as it may have tokens, or as there are slots for them.
    pub fn fix(&mut self, bins: &Bins, paths: &Paths, rows: u32, max_tokens: u32) {
        self.below.clear();
        self.total.clear();
        let (me, ranks) = (paths.me(), paths.ranks());
        for _ in 0..bins.count() {
            self.below.push(rows.saturating_mul(me));
            self.total.push(rows.saturating_mul(ranks));
        }
        for rank in 0..paths.staged_ranks() {
            let served = paths.served_by(rank).iter();
            let slots = served.map(|&rank| rows.saturating_mul(bins.of(rank).len() as u32));
            let most = slots.fold(0, u32::saturating_add).min(max_tokens);
            let sources = paths.of(rank).sources().count() as u32;
            let place = if paths.relays().any(|relay| relay == rank) { paths.place_at(rank) } else { 0 };
            self.below.push(place.saturating_mul(most));
            self.total.push(sources.saturating_mul(most));
        }
    }

    /// Adds the counts of a node.
    pub fn add_node(&mut self, below: &[u32], total: &[u32]) {
        add(&mut self.below, below);
        add(&mut self.total, total);
    }
}

/// Saturates, so that a nonsensical contribution ends as a size that does not fit anywhere.
fn add(sums: &mut [u32], counts: &[u32]) {
    for (sum, &count) in sums.iter_mut().zip(counts) {
        *sum = sum.saturating_add(count);
    }
}

/// Rows per rank, pads counted: known to every rank from the totals.
#[derive(Debug, Default)]
pub struct ReceiveSizes {
    /// First row of each bin at its rank.
    pub begin: Vec<u32>,
    /// Rows of each rank, at most as many as there is a budget for.
    pub rows: Vec<u32>,
    /// Rows that each rank would need. Saturated at `u32::MAX` where the totals are nonsensical.
    pub required: Vec<u32>,
    /// Rows that each rank stages; empty where none does.
    pub staged: Vec<u32>,
}

impl Clone for ReceiveSizes {
    fn clone(&self) -> Self {
        let ReceiveSizes { begin, rows, required, staged } = self;
        let [begin, rows, required, staged] = [begin, rows, required, staged].map(Vec::clone);
        ReceiveSizes { begin, rows, required, staged }
    }

    /// Its tables keep their memory.
    fn clone_from(&mut self, other: &Self) {
        self.begin.clone_from(&other.begin);
        self.rows.clone_from(&other.rows);
        self.required.clone_from(&other.required);
        self.staged.clone_from(&other.staged);
    }
}

impl ReceiveSizes {
    /// Sizes for these totals.
    pub fn fill(&mut self, bins: &Bins, align: u32, total: &[u32], budget: Option<u32>) {
        refill(&mut self.begin, bins.count() as usize, 0);
        refill(&mut self.rows, bins.ranks() as usize, 0);
        for rank in 0..bins.ranks() {
            let mut row = 0u32;
            for bin in bins.of(rank) {
                self.begin[bin as usize] = row;
                row = row.saturating_add(padded(total[bin as usize], align));
            }
            self.rows[rank as usize] = row;
        }
        self.required.clone_from(&self.rows);
        if let Some(budget) = budget {
            self.rows.iter_mut().for_each(|rows| *rows = (*rows).min(budget));
        }
        self.staged.clear();
        self.staged.extend_from_slice(&total[bins.count() as usize..]);
    }

    /// Rows that a rank stages.
    pub fn staged_at(&self, rank: u32) -> u32 {
        self.staged.get(rank as usize).copied().unwrap_or(0)
    }

    /// How many rows of this contributor a bin has room for. Rows beyond a budget are the end of
    /// each bin, and every rank finds its own part of it.
    pub fn room(&self, bins: &Bins, counts: &Counts, bin: u32) -> u32 {
        let first = self.begin[bin as usize].saturating_add(counts.below[bin as usize]);
        self.rows[bins.rank_of(bin) as usize].saturating_sub(first)
    }
}

/// `rows` rounded up to a multiple of `align`, saturating.
pub(super) fn padded(rows: u32, align: u32) -> u32 {
    rows.checked_next_multiple_of(align).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_below_follow_group_order_for_interleaved_nodes() {
        // Ranks 0 and 3 are one node, ranks 1 and 2 the other; rank 2 counts.
        let counts = [[1, 0], [2, 5], [4, 0], [8, 3]];
        let mut counted = Counts::default();
        counted.clear(2);
        for rank in [1, 2] {
            counted.add(2, rank, &counts[rank as usize]);
        }
        counted.add_node(&counts[0], &[9, 3]);
        assert_eq!((counted.below, counted.total), (vec![3, 5], vec![15, 8]));
    }

    #[test]
    fn nonsense_saturates_and_fits_nowhere() {
        let mut counts = Counts::default();
        counts.clear(1);
        counts.add_node(&[u32::MAX], &[u32::MAX]);
        counts.add(1, 0, &[7]);
        assert_eq!((&counts.below[..], &counts.total[..]), (&[u32::MAX][..], &[u32::MAX][..]));
        assert_eq!(padded(counts.total[0], 16), u32::MAX);
    }
}
