//! From gathered rows to the visible order: which gathered rows a rank copies, and where to.
//!
//! ```text
//!   gathered   | rows of rank 0 | rows of rank 1 | ...
//!                   \\___  ____/
//!   visible    | bin 0 | bin 1 | ...           as if each source had put its rows there itself
//! ```

use super::layout::segment;
use super::{PlanContext, RankRouting, RowRun};

/// The copies of one rank, and the metadata of its rows. Reused from call to call.
#[derive(Clone, Debug, Default)]
pub struct LocalPermutation {
    /// Runs of `rows` to the places where they belong.
    pub runs: Vec<RowRun>,
    /// What runs index into: gathered rows.
    pub rows: Vec<u32>,
    /// Metadata of each of `rows`.
    pub notes: Vec<u32>,
}

impl LocalPermutation {
    /// Forgets the last call.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.rows.clear();
        self.notes.clear();
    }

    /// Copies of rank `me` from the rows of one source, whose first row is row `first` of the
    /// gathered ones. `frame` and `known` are the source's.
    pub fn add(&mut self, frame: &PlanContext, known: &RankRouting, me: u32, first: u32) {
        let RankRouting { sorted, counts, sizes, .. } = known;
        for bin in frame.bins.of(me) {
            let to = segment(frame, bin as usize, sorted, counts, sizes);
            if to.count + to.pad > 0 {
                let (to_row, count, pad) = (to.to_row, to.count, to.pad);
                self.runs.push(RowRun { to_row, first: self.rows.len() as u32, count, pad });
                self.rows.extend(sorted.tokens_of(bin..bin + 1).iter().map(|token| first + token));
                self.notes.extend_from_slice(sorted.notes_of(bin..bin + 1));
            }
        }
    }

    /// Writes the row metadata, `words` words each, to its place; zero in pads.
    pub fn write_notes(&self, words: usize, to: &mut [u32]) {
        to.fill(0);
        for run in &self.runs {
            let (from, count) = (run.first as usize * words, run.count as usize * words);
            to[run.to_row as usize * words..][..count].copy_from_slice(&self.notes[from..][..count]);
        }
    }
}
