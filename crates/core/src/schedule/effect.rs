//! Effect of one operation on the windows, read from its operands.

use std::ops::Range;

use super::{Index, Operand, OperandId, Operands, PutSource, SumOperands, SumTarget, WindowId};
use crate::plan::{RowBuffer, RowRun, Summand};

/// Bytes of a rank's window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// Owner of the window.
    pub owner: u32,
    /// Which window.
    pub window: WindowId,
    /// Which bytes.
    pub range: Range<u64>,
}

impl Bytes {
    /// So many bytes from `start` on.
    pub fn new(owner: u32, window: WindowId, start: u64, len: u64) -> Self {
        Bytes { owner, window, range: start..start + len }
    }
}

/// A movement of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Bytes from here (or from the call's tensors) to a window.
    Copy {
        /// Source in a window of this rank or of its node, of the same length; `None` for the
        /// call's tensors and for zeros.
        from: Option<Bytes>,
        /// Destination.
        to: Bytes,
    },
    /// The tag that comes with a signal.
    Tag(
        /// Where it is left.
        Bytes,
    ),
    /// Bytes of a window that flow into a sum.
    Read(
        /// Where they lie.
        Bytes,
    ),
    /// Sums that are left in a window of this rank; others become the call's output.
    Sums(
        /// Where.
        Bytes,
    ),
    /// A flag word that does not grow is raised.
    Raises {
        /// The word.
        word: Bytes,
        /// In which call.
        call: usize,
        /// The call in which its owner has set it back; `None` before the first.
        after: Option<usize>,
    },
    /// A flag word that does not grow is awaited.
    Awaits {
        /// The word.
        word: Bytes,
        /// The call whose signal must be seen.
        call: usize,
    },
    /// A flag word that does not grow is set back.
    SetsBack {
        /// The word.
        word: Bytes,
        /// The call whose signal is taken back.
        call: usize,
    },
}

impl Operands<'_> {
    /// Copies of a put to rank `to`.
    pub fn puts(&self, to: u32, slot: OperandId) -> Vec<Effect> {
        match self.table[slot.0 as usize] {
            Operand::Spans { first, count } => self.spans[first as usize..][..count as usize]
                .iter()
                .map(|span| Effect::Copy {
                    from: source(span.from, span.from_offset, span.len),
                    to: Bytes::new(to, span.to, span.to_offset, span.len),
                })
                .collect(),
            Operand::Rows { first, count, from, from_offset, index, to: window, base, row_bytes } => {
                let copy = |Stretch { to_row, rows, from_row }| {
                    let (at, len) = (base + u64::from(to_row) * row_bytes, u64::from(rows) * row_bytes);
                    let start = from_row.map(|row| from_offset + u64::from(row) * row_bytes);
                    let from = start.and_then(|start| source(from, start, len));
                    Effect::Copy { from, to: Bytes::new(to, window, at, len) }
                };
                let runs = &self.runs[first as usize..][..count as usize];
                runs.iter().flat_map(|run| stretches(self.rows, run, from, index)).map(copy).collect()
            }
            Operand::Empty | Operand::SumRows { .. } | Operand::FetchWeights => Vec::new(),
        }
    }

    /// Reads of a sum at rank `me`, and the partial sums that it leaves in a window.
    pub fn sums(&self, slot: OperandId, (me, partial_bytes): (u32, u64)) -> Vec<Effect> {
        let sum = &self.sum;
        match self.table[slot.0 as usize] {
            Operand::SumRows { first, count, to } => {
                let at = |output: u32| sum.starts[output as usize] as usize;
                let terms = &sum.terms[at(first)..at(first + count)];
                let mut effects =
                    reads(sum, terms, |chunk, row| (u64::from(row) * chunk.row_bytes, chunk.row_bytes));
                if let SumTarget::Partials { window, offset } = to {
                    effects.push(Effect::Sums(Bytes::new(
                        me,
                        window,
                        offset,
                        u64::from(count) * partial_bytes,
                    )));
                }
                effects
            }
            Operand::FetchWeights => {
                reads(sum, sum.fetched, |chunk, word| (chunk.notes_at() + u64::from(word) * 4, 4))
            }
            _ => Vec::new(),
        }
    }
}

fn source(from: PutSource, start: u64, len: u64) -> Option<Bytes> {
    match from {
        PutSource::Input | PutSource::Notes => None,
        PutSource::Window { owner, window } => Some(Bytes::new(owner, window, start, len)),
    }
}

/// Rows that lie next to each other on both sides; zeros come from nowhere.
struct Stretch {
    to_row: u32,
    rows: u32,
    from_row: Option<u32>,
}

/// The rows of a run, adjacent ones joined, and its pad.
fn stretches(listed: &[u32], run: &RowRun, from: PutSource, index: Index) -> Vec<Stretch> {
    let RowRun { to_row, first, count, pad } = *run;
    let mut all: Vec<Stretch> = match (from, index) {
        // Only the call knows its own tensors, so reads there make no difference.
        (PutSource::Input | PutSource::Notes, _) => {
            return vec![Stretch { to_row, rows: count + pad, from_row: None }];
        }
        (_, Index::Contiguous) => vec![Stretch { to_row, rows: count, from_row: Some(first) }],
        (_, Index::Listed) => {
            let mut next = to_row;
            let joined = listed[first as usize..][..count as usize].chunk_by(|a, b| a + 1 == *b);
            let stretch = |rows: &[u32]| {
                let stretch = Stretch { to_row: next, rows: rows.len() as u32, from_row: Some(rows[0]) };
                next += stretch.rows;
                stretch
            };
            joined.map(stretch).collect()
        }
    };
    all.push(Stretch { to_row: to_row + count, rows: pad, from_row: None });
    all
}

/// Reads of terms, adjacent ones joined; `at` gives the place and length of one in its owner's
/// chunk.
fn reads(sum: &SumOperands, terms: &[Summand], at: impl Fn(&RowBuffer, u32) -> (u64, u64)) -> Vec<Effect> {
    let place = |term: &Summand| {
        let owner = term.owner as usize;
        let (start, len) = at(&sum.chunks[owner], term.row);
        (sum.held_by[owner], sum.bases[owner] + start, len)
    };
    let mut places: Vec<(u32, u64, u64)> = terms.iter().map(place).collect();
    places.sort_unstable();
    let mut reads: Vec<Bytes> = Vec::new();
    for (holder, start, len) in places {
        match reads.last_mut() {
            Some(last) if last.owner == holder && last.range.end == start => last.range.end += len,
            _ => reads.push(Bytes::new(holder, WindowId::POOL, start, len)),
        }
    }
    reads.into_iter().map(Effect::Read).collect()
}
