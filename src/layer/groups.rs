//! Groups of the experts of one chunk, for compute streams that share it.
//!
//! ```text
//!   rows of a chunk   | e0 e0 e0 | e1 | e3 e3 | e4 |          three groups: e0, e1, e2 to e4
//!
//!   the last, as experts see it:   | e3 e3 | e4 |,   counts 0 0 0 2 1
//! ```
//!
//! So a group is like a chunk to experts: rows for some of them, and none for the others.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::Segments;
use crate::dtype::Element;
use crate::ep::{ExpertOutput, Handle};
use crate::error::{Error, OverlapError};
use crate::overlap::expert_groups;

/// A group of experts, and their rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    experts: Range<usize>,
    /// Where their rows are among those of the chunk, pads counted.
    pub rows: Range<usize>,
    /// Rows of each expert of this rank: of others there are none.
    counts: Vec<i64>,
    padded: Vec<i64>,
}

/// Those of a chunk with so many rows for each expert, without pads and with them.
pub(super) fn groups(counts: &[i64], padded: &[i64], most: u32) -> Vec<Group> {
    let mut first = 0;
    let group = |experts: Range<usize>| {
        let (counts, padded) = (only(&experts, counts), only(&experts, padded));
        let rows = first..first + padded.iter().sum::<i64>() as usize;
        first = rows.end;
        Group { experts, rows, counts, padded }
    };
    expert_groups(counts, most).into_iter().map(group).collect()
}

/// Zeros but for these experts.
fn only<T: Copy + Default>(experts: &Range<usize>, counts: &[T]) -> Vec<T> {
    let mut own = vec![T::default(); counts.len()];
    own[experts.clone()].copy_from_slice(&counts[experts.clone()]);
    own
}

impl Group {
    /// Where values of its rows are, so many of each.
    pub fn values(&self, columns: usize) -> Range<usize> {
        self.rows.start * columns..self.rows.end * columns
    }

    /// Length of each expert's segment.
    pub fn padded(&self) -> &[i64] {
        &self.padded
    }

    /// Of rows that each source has for each expert, those for its own.
    pub fn counts_of(&self, sources: &[Vec<u32>]) -> Vec<Vec<u32>> {
        sources.iter().map(|counts| only(&self.experts, counts)).collect()
    }

    /// Its rows of those of the chunk, as experts take them.
    pub fn segments<'a>(&'a self, rows: &'a [f32], hidden: usize) -> Segments<'a> {
        let Group { counts, padded, .. } = self;
        Segments { rows: &rows[self.values(hidden)], hidden, counts, padded }
    }
}

/// Output memory of a chunk: allocated when the first of its groups is done; each group writes its
/// own rows.
#[derive(Debug, Default)]
pub(super) struct Outgoing(Mutex<Option<Result<ExpertOutput, Error>>>);

impl Outgoing {
    /// Lets a group write. Without room no group does: the result of [`take`](Self::take) tells all
    /// ranks.
    pub fn write<E: Element>(
        &self,
        handle: &Handle,
        values: Range<usize>,
        fill: impl FnOnce(&mut [E]),
    ) -> Result<(), Error> {
        let mut output = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(output) = output.get_or_insert_with(|| handle.output()) {
            fill(&mut output.rows_mut::<E>()?[values]);
        }
        Ok(())
    }

    /// All of it, once all groups have written; or why there is no room.
    pub fn take(&self) -> Result<Result<ExpertOutput, Error>, Error> {
        let mut output = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(output.take().ok_or(OverlapError::HandoffEmpty)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_the_rows_of_its_experts_and_none_of_others() {
        // The picture above; expert 1 is padded to 2 rows.
        let rows: Vec<f32> = (0..8u8).map(f32::from).collect();
        let groups = groups(&[3, 1, 0, 2, 1], &[3, 2, 0, 2, 1], 3);
        let seen: Vec<_> = groups
            .iter()
            .map(|group| {
                let Segments { rows, counts, padded, .. } = group.segments(&rows, 1);
                (rows.to_vec(), counts.to_vec(), padded.to_vec())
            })
            .collect();
        let expected = [
            (vec![0.0, 1.0, 2.0], vec![3, 0, 0, 0, 0], vec![3, 0, 0, 0, 0]),
            (vec![3.0, 4.0], vec![0, 1, 0, 0, 0], vec![0, 2, 0, 0, 0]),
            (vec![5.0, 6.0, 7.0], vec![0, 0, 0, 2, 1], vec![0, 0, 0, 2, 1]),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_chunk_without_rows_is_one_group() {
        assert_eq!(groups(&[0, 0], &[0, 0], 4).len(), 1);
        assert_eq!(groups(&[], &[], 4).len(), 1);
    }
}
