//! What a skeleton is filled with per call.
//!
//! Operands borrow from tables that live as long as the handle of a dispatch: rows by index, runs, terms. A call
//! that reuses a handle fills in bases and tags only. Nothing here allocates.
//!
//! ```text
//!   table[slot] --> Spans { first, count }            --> spans[first..]   window/offset -> window/offset
//!               --> Rows  { first, count, base, .. }  --> runs[first..]    rows[run.first..] -> base + run.to_row
//!               --> Sum                               --> terms per output row: (owner, row) in a fixed order
//! ```

use crate::error::CallKind;
use crate::plan::{RowRun, Term};

/// Number of a window in the table of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WindowId(pub u32);

impl WindowId {
    /// The receive pool of each rank.
    pub const POOL: WindowId = WindowId(0);
    /// Publications and mailboxes of one `ExpertParallel`.
    pub const CONTROL: WindowId = WindowId(1);
}

/// Where the bytes of a put come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The call's input tensor.
    Input,
    /// One of this rank's own windows.
    Own(WindowId),
}

/// One span of a put: `len` bytes from (`from`, `from_offset`) here to (`to`, `to_offset`) at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanCopy {
    /// Source.
    pub from: Place,
    /// First byte in the source.
    pub from_offset: u64,
    /// Window at the peer.
    pub to: WindowId,
    /// First byte in that window.
    pub to_offset: u64,
    /// Bytes.
    pub len: u64,
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
    /// `runs[first..first + count]` of input rows, to the window at `base`.
    Rows {
        /// First run.
        first: u32,
        /// Number of runs.
        count: u32,
        /// Window at the peer.
        to: WindowId,
        /// Where row 0 lies in that window, in bytes.
        base: u64,
    },
    /// Sums the rows of [`Operands::sum`] into the call's output.
    SumRows,
    /// Fetches one `f32` per term from behind the chunks of [`Operands::sum`] into the call's weights.
    FetchWeights,
}

/// What a `Reduce` reads.
///
/// Each owner offers one *chunk*: rows of `row_bytes`, behind them one `f32` per row. The chunk lies in the pool
/// window of `held_by[owner]`: the owner's own pool where it can be read by loads, this rank's otherwise (the
/// owner put it there).
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum<'a> {
    /// Summands of all output rows, output row after output row, each in summation order.
    pub terms: &'a [Term],
    /// `starts[t]..starts[t + 1]` are the terms of output row `t`: rows + 1 entries.
    pub starts: &'a [u32],
    /// For each term, its place in the caller's `[tokens, top_k]` arrays.
    pub choices: &'a [u32],
    /// Where `order = rank`: lengths of groups of consecutive terms that are summed first, all output rows after one
    /// another; empty otherwise.
    pub groups: &'a [u32],
    /// `group_starts[t]..group_starts[t + 1]` are the groups of output row `t`; empty with `groups`.
    pub group_starts: &'a [u32],
    /// Per owner: whose pool holds its chunk.
    pub held_by: &'a [u32],
    /// Per owner: first byte of its chunk in that pool.
    pub bases: &'a [u64],
    /// Per owner: rows in its chunk.
    pub chunk_rows: &'a [u32],
    /// Routing weights `[tokens, top_k]` that the rows are multiplied with; empty for a plain sum.
    pub weights: &'a [f32],
}

impl Sum<'_> {
    /// Where the weights of an owner's chunk begin: behind its rows, on a cache line of their own.
    pub fn weights_base(&self, owner: usize, row_bytes: u64) -> u64 {
        self.bases[owner] + chunk_weights_offset(self.chunk_rows[owner], row_bytes)
    }
}

/// Offset of the `f32` per row behind the `rows` rows of a chunk.
pub fn chunk_weights_offset(rows: u32, row_bytes: u64) -> u64 {
    (u64::from(rows) * row_bytes).next_multiple_of(64)
}

/// Size of a chunk of `rows` rows with one `f32` per row behind them.
pub fn chunk_bytes(rows: u32, row_bytes: u64) -> u64 {
    (chunk_weights_offset(rows, row_bytes) + u64::from(rows) * 4).next_multiple_of(64)
}

/// What an entry signal says: which call this is, and where the receiver may write or read.
///
/// It lies in the flag's own cache line, so calls without a count exchange are checked too: a rank that calls
/// something else is found before any result is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Which call.
    pub kind: CallKind,
    /// Whether the sender can go on; if not, nothing may move on any rank.
    pub refusal: Refusal,
    /// Digest of the options of this call.
    pub options: u32,
    /// Number of the dispatch whose layout is used; the call's own number for a dispatch. With [`Refusal::Space`]: the
    /// bytes asked for.
    pub handle: u64,
    /// First byte in the sender's pool window: a licence to write there (cached dispatch, chunks that are put home)
    /// or the chunk to read (shared memory). With [`Refusal::Space`]: the bytes that were free.
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
        let head =
            u64::from(self.kind as u16) | u64::from(self.refusal as u8) << 16 | u64::from(self.options) << 32;
        [head, self.handle, self.base]
    }

    /// From three words. Anything unknown reads as a kind or refusal that no correct rank agrees with.
    pub fn from_words([head, handle, base]: [u64; 3]) -> Self {
        Tag {
            kind: CallKind::from_code(head as u16),
            refusal: Refusal::from_code((head >> 16) as u8),
            options: (head >> 32) as u32,
            handle,
            base,
        }
    }
}

impl Default for Tag {
    fn default() -> Self {
        Tag { kind: CallKind::Unknown, refusal: Refusal::None, options: 0, handle: 0, base: 0 }
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
    /// Input rows by index.
    pub rows: &'a [u32],
    /// Bytes of one row.
    pub row_bytes: u64,
    /// What a `Reduce` reads.
    pub sum: Sum<'a>,
    /// What the entry signal says to each peer; empty where entries say nothing.
    pub tags: &'a [Tag],
    /// Value of [`Level::Call`](super::Level::Call): epoch in the high 16 bits, call number below.
    pub call: u64,
    /// Value of [`Level::LastReturn`](super::Level::LastReturn), of the same form.
    pub last_return: u64,
}

impl Operands<'_> {
    /// The value of a level in this call.
    pub fn value(&self, level: super::Level) -> u64 {
        match level {
            super::Level::Call => self.call,
            super::Level::LastReturn => self.last_return,
        }
    }
}
