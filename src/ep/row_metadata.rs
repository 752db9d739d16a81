//! Metadata of received rows: weights, experts and counts, the order of rows that relays copied in
//! spans, and tensors whose rows have gaps.
//!
//! ```text
//!   | rows | words behind them |  --fill-->  ReceivedMetadata: weights, experts, tokens per expert, RowIndex
//! ```

use std::sync::Arc;

use crate::plan::{DispatchLayout, RowMetadata};

/// Metadata of the rows of one dispatch.
#[derive(Clone, Debug, Default)]
pub(in crate::ep) struct ReceivedMetadata {
    /// `[rows]`, or `[rows, top_k]` where a row stands for several choices: routing weights, 0 in
    /// pads.
    pub weights: Vec<f32>,
    /// `[rows, top_k]` where a row stands for several choices: local experts, -1 where there is
    /// none. Empty otherwise.
    pub experts: Vec<i32>,
    /// Per local expert: rows that chose it.
    pub tokens_per_expert: Vec<i64>,
    /// Where rows lie, if not in visible order.
    pub index: Option<Arc<RowIndex>>,
}

impl ReceivedMetadata {
    /// Reads the words behind the rows.
    pub fn fill(&mut self, metadata: RowMetadata, layout: &DispatchLayout, experts: usize, words: &[u32]) {
        self.weights.clear();
        self.experts.clear();
        self.tokens_per_expert.clear();
        match metadata {
            // The gathering call reads the words itself.
            RowMetadata::Gathered => {}
            RowMetadata::Weight => {
                self.weights.extend(words.iter().map(|&word| f32::from_bits(word)));
                self.tokens_per_expert.extend_from_slice(&layout.rows_per_bin);
            }
            RowMetadata::Marked => {
                self.weights.extend(words.chunks_exact(2).map(|of_row| f32::from_bits(of_row[0])));
                self.tokens_per_expert.resize(layout.begin.len(), 0);
                let bins =
                    self.tokens_per_expert.iter_mut().zip(layout.begin.iter().zip(&layout.rows_per_bin));
                for (used, (&first, &rows)) in bins {
                    let metadata = words.chunks_exact(2).skip(first as usize).take(rows as usize);
                    *used = metadata.map(|of_row| i64::from(of_row[1])).sum();
                }
            }
            RowMetadata::Summed => {
                self.weights.extend(words.chunks_exact(2).map(|of_row| f32::from_bits(of_row[1])));
                self.tokens_per_expert.extend_from_slice(&layout.rows_per_bin);
            }
            RowMetadata::Choices | RowMetadata::Indexed => {
                let top_k = layout.top_k as usize;
                self.tokens_per_expert.resize(experts, 0);
                let rows = words.chunks_exact(metadata.words(layout.top_k) as usize);
                if metadata == RowMetadata::Indexed {
                    let index = Arc::make_mut(self.index.get_or_insert_default());
                    index.fill(rows.clone().map(|of_row| of_row[2 * top_k]));
                }
                for of_row in rows {
                    let (ids, weights) = of_row[..2 * top_k].split_at(top_k);
                    self.experts.extend(ids.iter().map(|&id| id as i32 - 1));
                    self.weights.extend(weights.iter().map(|&word| f32::from_bits(word)));
                    for &id in ids.iter().filter(|&&id| id > 0) {
                        if let Some(count) = self.tokens_per_expert.get_mut(id as usize - 1) {
                            *count += 1;
                        }
                    }
                }
            }
        }
    }
}

/// Places of rows that were relayed in
/// [coalesce_relays](crate::ep::ExpertParallelBuilder::coalesce_relays), against the *visible*
/// order of
/// rank-major rows: (source rank, token).
///
/// ```text
///   visible order   | source 0: token 0 1 2 | source 1: token 0 2 3 |     row v lies at landing()[v]
///   rows as landed  | source 0: token 0 1 2 | source 1: token 3 0 2 |     row r is visible()[r]
/// ```
///
/// Rows of a source stay together, and pads and unused slots stay in place. Rows of this node lie
/// in visible order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowIndex {
    landing: Vec<u32>,
    visible: Vec<u32>,
}

impl RowIndex {
    /// For each row in visible order, pads counted: where it lies. A gather by this index makes
    /// visible order; a grouped matrix product that takes a row index needs none.
    pub fn landing(&self) -> &[u32] {
        &self.landing
    }

    /// For each row as it lies: which row it is in visible order.
    pub fn visible(&self) -> &[u32] {
        &self.visible
    }

    /// From what rows say of themselves: row + 1 in visible order, 0 for one that stays where it
    /// is.
    pub(in crate::ep) fn fill(&mut self, said: impl ExactSizeIterator<Item = u32>) {
        for table in [&mut self.landing, &mut self.visible] {
            table.clear();
            table.extend(0..said.len() as u32);
        }
        for (row, said) in (0..).zip(said) {
            if let Some(landing) = self.landing.get_mut((said as usize).wrapping_sub(1)) {
                *landing = row;
                self.visible[row as usize] = said - 1;
            }
        }
    }
}

/// A tensor `[rows, columns]` whose rows do not follow each other.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a, T> {
    all: &'a [T],
    rows: usize,
    columns: usize,
    stride: usize,
}

impl<'a, T> Strided<'a, T> {
    /// Rows of so many columns, each `stride` elements behind the one before.
    pub(in crate::ep) fn new(all: &'a [T], (rows, columns): (usize, usize), stride: usize) -> Self {
        Strided { all, rows, columns, stride }
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// Elements from the start of one row to that of the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// From the first element of the first row on: what lies between rows included.
    pub fn as_slice(&self) -> &'a [T] {
        self.all
    }

    /// The rows, one after another.
    pub fn rows(&self) -> impl Iterator<Item = &'a [T]> + use<'a, T> {
        let columns = self.columns;
        self.all.chunks(self.stride.max(1)).take(self.rows).map(move |row| &row[..columns])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_in_the_documentation_is_right() {
        let mut index = RowIndex::default();
        index.fill([1, 2, 3, 6, 4, 5].into_iter());
        assert_eq!((index.landing(), index.visible()), (&[0, 1, 2, 4, 5, 3][..], &[0, 1, 2, 5, 3, 4][..]));
    }

    #[test]
    fn unset_or_invalid_row_index_entry_keeps_its_place() {
        let mut index = RowIndex::default();
        index.fill([0, 3, 2, u32::MAX].into_iter());
        assert_eq!((index.landing(), index.visible()), (&[0, 2, 1, 3][..], &[0, 2, 1, 3][..]));
        index.fill(std::iter::empty());
        assert!(index.landing().is_empty() && index.visible().is_empty());
    }
}
