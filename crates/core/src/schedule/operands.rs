//! Operands that fill a skeleton in each call, and the effect of an operation on the windows.
//!
//! Operands borrow from tables that live as long as the handle of a dispatch: rows by index, runs,
//! terms. A call that reuses a handle fills in bases and tags only. Nothing here allocates.
//!
//! ```text
//!   table[operand] --> Spans { first, count }            --> spans[first..]   window/offset -> window/offset
//!               --> Rows  { first, count, base, .. }  --> runs[first..]    rows[run.first..] -> base + run.to_row
//!               --> SumRows, FetchWeights             --> terms per output row: (owner, row) in a fixed order
//! ```

use std::iter::from_fn;
use std::ops::Range;

use super::{Flag, FlagValue, OperandId, Tag};
use crate::dtype::PartialDtype;
use crate::plan::{DispatchLayout, Partials, RowBuffer, RowRun, Summand};

/// Number of a window in the table of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WindowId(pub u32);

impl WindowId {
    /// The receive pool of each rank.
    pub const POOL: WindowId = WindowId(0);
    /// Flags, publications, messages and headers of one `ExpertParallel`.
    pub const CONTROL: WindowId = WindowId(1);
    /// Where the pool is device memory: host memory next to it, from which copy engines bring rows
    /// in. If no net reaches the device, crossing rows land there, at the same offsets; otherwise
    /// it is the planner's scratch.
    pub const HOST_STAGING: WindowId = WindowId(2);
}

/// Where the bytes of a put come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PutSource {
    /// The call's input tensor.
    Input,
    /// Metadata of each of this rank's entries.
    Metadata,
    /// A window of this rank or of one of its node.
    Window {
        /// The owner.
        owner: u32,
        /// Which.
        window: WindowId,
    },
}

/// Which rows of its source a run takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Index {
    /// Those that [`Operands::rows`] lists from `run.first` on.
    Listed,
    /// Those from row `run.first` on.
    Contiguous,
}

/// One span of a put: `len` bytes from (`from`, `from_offset`) here to (`to`, `to_offset`) at the
/// peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanCopy {
    /// Source.
    pub from: PutSource,
    /// First byte in the source.
    pub from_offset: u64,
    /// Window at the peer.
    pub to: WindowId,
    /// First byte in that window.
    pub to_offset: u64,
    /// Bytes.
    pub len: u64,
}

impl SpanCopy {
    /// Whether `next` goes on where this ends, on both sides.
    pub fn reaches(&self, next: &SpanCopy) -> bool {
        let ends = (self.from_offset + self.len, self.to_offset + self.len);
        (self.from, self.to) == (next.from, next.to) && ends == (next.from_offset, next.to_offset)
    }
}

/// Where sums go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SumTarget {
    /// The call's output tensor, in the type of the rows.
    Output,
    /// One of this rank's own windows, as partials in the type of the wire.
    Partials {
        /// The window.
        window: WindowId,
        /// First byte in it.
        offset: u64,
    },
}

/// One entry of the operand table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Operand {
    /// Moves nothing.
    #[default]
    Empty,
    /// `spans[first..first + count]`.
    Spans {
        /// First span.
        first: u32,
        /// Number of spans.
        count: u32,
    },
    /// `runs[first..first + count]` of rows, to the window at `base`.
    Rows {
        /// First run.
        first: u32,
        /// Number of runs.
        count: u32,
        /// Where the rows come from.
        from: PutSource,
        /// Where row 0 lies there, in bytes.
        from_offset: u64,
        /// Which rows a run takes.
        index: Index,
        /// Window at the peer.
        to: WindowId,
        /// Where row 0 lies in that window, in bytes.
        base: u64,
        /// Bytes of one row.
        row_bytes: u64,
    },
    /// Sums outputs `first..first + count` of [`Operands::sum`].
    SumRows {
        /// First output row.
        first: u32,
        /// Number of output rows.
        count: u32,
        /// Where they go, one after another.
        to: SumTarget,
    },
    /// Sums outputs `first..first + count` of [`Operands::sum`] on a device. Rows of other ranks
    /// have been pulled to this rank's pool, each to the place of its entry. Those of this rank are
    /// read where they lie.
    SumPulled {
        /// First output row.
        first: u32,
        /// Number of output rows.
        count: u32,
        /// Where the row of entry 0 lies in this rank's pool.
        pulled: u64,
        /// Entries of all output rows.
        entries: u32,
        /// Where output row `first` goes in it.
        to: u64,
    },
    /// Fetches one `f32` per term from behind the chunks of [`Operands::sum`] into the call's
    /// weights.
    FetchWeights,
}

/// Rows that a `Reduce` sums.
///
/// Each owner offers one [`RowBuffer`]. It lies in the pool window of `held_by[owner]`: the owner's
/// own pool where it can be read by loads, this rank's otherwise (it was copied there).
#[derive(Clone, Copy, Debug, Default)]
pub struct SumOperands<'a> {
    /// Summands of all output rows, output row after output row, each in summation order.
    pub terms: &'a [Summand],
    /// `starts[t]..starts[t + 1]` are the terms of output row `t`: rows + 1 entries.
    pub starts: &'a [u32],
    /// For each term, the place of its weight.
    pub choices: &'a [u32],
    /// Lengths of groups of consecutive terms that are summed first, all output rows after one
    /// another, or [`PARTIAL`](crate::dtype::PARTIAL); empty for plain sums.
    pub groups: &'a [u32],
    /// `group_starts[t]..group_starts[t + 1]` are the groups of output row `t`; empty with
    /// `groups`.
    pub group_starts: &'a [u32],
    /// Type to which the sums of groups are rounded, and in which partials travel.
    pub wire: PartialDtype,
    /// Per owner: the rank whose pool holds its chunk.
    pub held_by: &'a [u32],
    /// Per owner: first byte of its chunk in that pool.
    pub bases: &'a [u64],
    /// Per owner: its chunk.
    pub chunks: &'a [RowBuffer],
    /// Weights that the rows are multiplied with; empty for a plain sum.
    pub weights: &'a [f32],
    /// Words that a fetch reads: one `f32` of each of these, behind the rows of its owner's chunk.
    pub fetched: &'a [Summand],
    /// For each of those, its place in the caller's `[tokens, top_k]` array.
    pub places: &'a [u32],
}

impl<'a> SumOperands<'a> {
    /// Sums of the tokens of a layout, whose owners' chunks begin at `bases`: unweighted, with
    /// partials in `f32`.
    pub fn of_layout(layout: &'a DispatchLayout, bases: &'a [u64]) -> Self {
        let (terms, starts, choices) = layout.summands();
        let (fetched, places) = layout.fetches();
        SumOperands {
            terms,
            starts,
            choices,
            groups: &layout.groups,
            group_starts: &layout.group_starts,
            held_by: &layout.held_by,
            bases,
            chunks: &layout.chunks,
            fetched,
            places,
            ..SumOperands::default()
        }
    }

    /// The partial sums of a relay, over these chunks of its node's ranks.
    pub fn of_partials(
        partials: &'a Partials,
        bases: &'a [u64],
        held_by: &'a [u32],
        chunks: &'a [RowBuffer],
    ) -> Self {
        let Partials { terms, starts, entries, .. } = partials;
        SumOperands { terms, starts, choices: entries, held_by, bases, chunks, ..SumOperands::default() }
    }
}

/// Everything one call fills into a skeleton.
#[derive(Clone, Copy, Debug, Default)]
pub struct Operands<'a> {
    /// One entry per operand of the skeleton.
    pub table: &'a [Operand],
    /// Spans of all `Put`s.
    pub spans: &'a [SpanCopy],
    /// Runs of all `PutRows`.
    pub runs: &'a [RowRun],
    /// Source rows by index.
    pub rows: &'a [u32],
    /// Bytes of one row of the call's tensors.
    pub row_bytes: u64,
    /// Rows that a `Reduce` sums.
    pub sum: SumOperands<'a>,
    /// Tags of entry signals and offers to each peer; empty where there are none.
    pub tags: &'a [Tag],
    /// Value of [`FlagValue::Call`]: see [`Calls`](super::Calls).
    pub call: u64,
    /// Value of [`FlagValue::LastReturn`], of the same form.
    pub last_return: u64,
}

impl Operands<'_> {
    /// The value of a level in this call.
    #[inline]
    pub fn value(&self, level: FlagValue) -> u64 {
        match level {
            FlagValue::Call => self.call,
            FlagValue::Part(part) => self.call + u64::from(part),
            FlagValue::LastReturn => self.last_return,
            FlagValue::Credit => 1,
            FlagValue::Reset => 0,
        }
    }

    /// The tag that comes with a signal: with those that begin something.
    #[inline]
    pub fn tag(&self, to: u32, flag: Flag, level: FlagValue) -> Option<&Tag> {
        let begins = level == FlagValue::Call && matches!(flag, Flag::Entry | Flag::Block);
        begins.then(|| self.tags.get(to as usize)).flatten()
    }
}

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
        /// Number of the call that signaled.
        call: usize,
    },
}

impl Operands<'_> {
    /// Copies of a put to rank `to`.
    pub fn puts(&self, to: u32, operand: OperandId) -> Vec<Effect> {
        match self.table[operand.0 as usize] {
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
            Operand::Empty | Operand::SumRows { .. } | Operand::SumPulled { .. } | Operand::FetchWeights => {
                Vec::new()
            }
        }
    }

    /// Reads of a sum at rank `me`, and the partial sums that it leaves in a window.
    pub fn sums(&self, operand: OperandId, (me, partial_bytes): (u32, u64)) -> Vec<Effect> {
        let sum = &self.sum;
        match self.table[operand.0 as usize] {
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
            Operand::SumPulled { first, count, pulled, to, .. } => {
                let at = |output: u32| sum.starts[output as usize] as usize;
                let pool = |start, len| Bytes::new(me, WindowId::POOL, start, len);
                let read = |term: usize| {
                    let Summand { owner, row } = sum.terms[term];
                    let (start, row) = match owner == me {
                        true => (sum.bases[me as usize], row),
                        false => (pulled, sum.choices[term]),
                    };
                    Effect::Read(pool(start + u64::from(row) * partial_bytes, partial_bytes))
                };
                let mut effects: Vec<Effect> = (at(first)..at(first + count)).map(read).collect();
                effects.push(Effect::Sums(pool(to, u64::from(count) * partial_bytes)));
                effects
            }
            Operand::FetchWeights => {
                reads(sum, sum.fetched, |chunk, word| (chunk.metadata_at() + u64::from(word) * 4, 4))
            }
            _ => Vec::new(),
        }
    }
}

fn source(from: PutSource, start: u64, len: u64) -> Option<Bytes> {
    match from {
        PutSource::Input | PutSource::Metadata => None,
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
        (PutSource::Input | PutSource::Metadata, _) => {
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

/// Copies, or memory operations, that a driver takes in one call.
pub const MAX_BATCH: usize = 255;

/// Copies of the first batch. On a host that takes a microsecond to enqueue one, engines begin
/// after some 16 us, and copies of a megabyte keep them busy until the next batch is there.
const FIRST: usize = 16;

/// Sizes of the batches that enqueue so many copies, in their order.
///
/// Engines begin with a batch when the host has enqueued all of it. So the first batch is small,
/// and each has twice as many copies as the one before, up to [`MAX_BATCH`]: engines make copies
/// while the host enqueues the next ones.
///
/// ```
/// use sidelane_core::schedule::copy_batches;
///
/// assert_eq!(copy_batches(7).collect::<Vec<_>>(), [7]);
/// assert_eq!(copy_batches(224).collect::<Vec<_>>(), [16, 32, 64, 112]);
/// ```
pub fn copy_batches(copies: usize) -> impl Iterator<Item = usize> {
    let (mut rest, mut size) = (copies, FIRST);
    from_fn(move || {
        let batch = size.min(rest);
        (rest, size) = (rest - batch, (2 * size).min(MAX_BATCH));
        (batch > 0).then_some(batch)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn copy_batches_hold_all_copies_and_grow_to_driver_maximum(copies in 0usize..5000) {
            let sizes: Vec<usize> = copy_batches(copies).collect();
            prop_assert_eq!(sizes.iter().sum::<usize>(), copies);
            prop_assert!(sizes.iter().all(|&size| 0 < size && size <= MAX_BATCH));
            let full = &sizes[..sizes.len().saturating_sub(1)];
            prop_assert!(full.iter().enumerate().all(|(nth, &size)| size == MAX_BATCH.min(FIRST << nth.min(8))));
        }
    }
}
