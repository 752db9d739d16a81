//! Operands that fill a skeleton in each call.
//!
//! Operands borrow from tables that live as long as the handle of a dispatch: rows by index, runs,
//! terms. A call that reuses a handle fills in bases and tags only. Nothing here allocates.
//!
//! ```text
//!   table[slot] --> Spans { first, count }            --> spans[first..]   window/offset -> window/offset
//!               --> Rows  { first, count, base, .. }  --> runs[first..]    rows[run.first..] -> base + run.to_row
//!               --> SumRows, FetchWeights             --> terms per output row: (owner, row) in a fixed order
//! ```

use super::{Flag, FlagValue};
use crate::dtype::PartialDtype;
use crate::error::CallKind;
use crate::plan::{RowBuffer, RowRun, Summand};

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
    Notes,
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
    /// Fetches one `f32` per term from behind the chunks of [`Operands::sum`] into the call's
    /// weights.
    FetchWeights,
}

/// What a `Reduce` reads.
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

/// What an entry signal says: which call this is, and where the receiver may write or read.
///
/// It lies in the flag's own cache line, so calls without a count exchange are checked, too: a rank
/// with another call is found before any result is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Which call.
    pub kind: CallKind,
    /// Whether the sender can go on; if not, nothing may move on any rank.
    pub refusal: Refusal,
    /// Which of the sender's dispatch contexts the call uses: metadata lands there. Ranks need not
    /// agree on it.
    pub context: u16,
    /// Digest of the options of this call.
    pub options: u32,
    /// Number of the dispatch whose layout is used; for a dispatch with counts, the bytes that may
    /// be written from `base` on. With [`Refusal::Space`]: the requested bytes.
    pub handle: u64,
    /// First byte in the sender's pool window: a grant to write there (dispatches, rows that are
    /// returned by puts) or the chunk to read (shared memory). With [`Refusal::Space`]: the free
    /// bytes.
    pub base: u64,
}

/// Why a rank cannot take part in a call that it has entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Refusal {
    /// It can.
    #[default]
    None = 0,
    /// Its caller's input is wrong.
    Input = 1,
    /// Its pool has no room.
    Space = 2,
}

impl Refusal {
    /// The refusal of this number; an unknown one counts as wrong input.
    pub fn from_code(code: u8) -> Refusal {
        match code {
            0 => Refusal::None,
            2 => Refusal::Space,
            _ => Refusal::Input,
        }
    }
}

impl Tag {
    /// As three words, for a flag line or a wire.
    pub fn to_words(self) -> [u64; 3] {
        let choice = u64::from(self.kind as u8) | u64::from(self.refusal as u8) << 8;
        let head = choice | u64::from(self.context) << 16 | u64::from(self.options) << 32;
        [head, self.handle, self.base]
    }

    /// From three words. Anything unknown reads as a kind or refusal that no correct rank agrees
    /// with.
    pub fn from_words([head, handle, base]: [u64; 3]) -> Self {
        Tag {
            kind: CallKind::from_code(head as u8),
            refusal: Refusal::from_code((head >> 8) as u8),
            context: (head >> 16) as u16,
            options: (head >> 32) as u32,
            handle,
            base,
        }
    }
}

impl Default for Tag {
    fn default() -> Self {
        Tag { kind: CallKind::Unknown, refusal: Refusal::None, context: 0, options: 0, handle: 0, base: 0 }
    }
}

/// Everything one call fills into a skeleton.
#[derive(Clone, Copy, Debug, Default)]
pub struct Operands<'a> {
    /// One entry per slot of the skeleton.
    pub table: &'a [Operand],
    /// Spans of all `Put`s.
    pub spans: &'a [SpanCopy],
    /// Runs of all `PutRows`.
    pub runs: &'a [RowRun],
    /// Source rows by index.
    pub rows: &'a [u32],
    /// Bytes of one row of the call's tensors.
    pub row_bytes: u64,
    /// What a `Reduce` reads.
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
