//! Metadata of received rows, as a handle keeps it.

use std::sync::Arc;

use super::RowIndex;
use crate::plan::{DispatchLayout, RowMetadata};

/// Metadata of the rows of one dispatch.
#[derive(Clone, Debug, Default)]
pub(super) struct ReceivedMetadata {
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
    pub fn fill(&mut self, notes: RowMetadata, layout: &DispatchLayout, experts: usize, words: &[u32]) {
        self.weights.clear();
        self.experts.clear();
        self.tokens_per_expert.clear();
        match notes {
            // Whoever gathered looks at the notes itself.
            RowMetadata::Gathered => {}
            RowMetadata::Weight => {
                self.weights.extend(words.iter().map(|&word| f32::from_bits(word)));
                self.tokens_per_expert.extend_from_slice(&layout.rows_per_bin);
            }
            RowMetadata::Marked => {
                self.weights.extend(words.chunks_exact(2).map(|note| f32::from_bits(note[0])));
                self.tokens_per_expert.resize(layout.begin.len(), 0);
                let bins =
                    self.tokens_per_expert.iter_mut().zip(layout.begin.iter().zip(&layout.rows_per_bin));
                for (used, (&first, &rows)) in bins {
                    let notes = words.chunks_exact(2).skip(first as usize).take(rows as usize);
                    *used = notes.map(|note| i64::from(note[1])).sum();
                }
            }
            RowMetadata::Choices | RowMetadata::Indexed => {
                let top_k = layout.top_k as usize;
                self.tokens_per_expert.resize(experts, 0);
                let rows = words.chunks_exact(notes.words(layout.top_k) as usize);
                if notes == RowMetadata::Indexed {
                    let index = Arc::make_mut(self.index.get_or_insert_default());
                    index.fill(rows.clone().map(|note| note[2 * top_k]));
                }
                for note in rows {
                    let (ids, weights) = note[..2 * top_k].split_at(top_k);
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
