//! Launches of kernels that read routing: `cuda/rank_major_choices.cu`, `counts.cu` and `check.cu`.
//!
//! ```text
//!   choices       expert ids and weights --> metadata of the rows of each slot
//!   counts        expert ids --> rows for each expert, and for each rank
//!   check         heads of received slots: are they of this call, from ranks with the same settings?
//! ```

use super::{AT_WORK, Kernels, Operands, THREADS, VECTOR, WORD, bytes};
use crate::device::module::Grid;
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::error::DeviceError;
use crate::plan::SlotShape;

/// Inputs and outputs of [`Kernels::choices`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct ChoiceArgs<'a> {
    /// Number of rows, pads counted.
    pub rows: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// Number of local experts.
    pub n_experts: u32,
    /// Metadata of the rows, `[rows, 2, top_k]`: per choice the local expert + 1, or 0; then per
    /// choice its weight.
    pub notes: ByteSpan<'a>,
    /// The local expert of each row and choice, `i32 [rows, top_k]`, or -1.
    pub experts: ByteSpan<'a>,
    /// The weight of each row and choice, `f32 [rows, top_k]`; 0 where there is no expert.
    pub weights: ByteSpan<'a>,
    /// Rows that chose each local expert, `i64 [n_experts]`.
    pub counts: ByteSpan<'a>,
}

/// `struct Choices` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct ChoiceParameters {
    notes: u64,
    experts: u64,
    weights: u64,
    counts: u64,
    rows: u32,
    top_k: u32,
    n_experts: u32,
    unused: u32,
}

impl Kernels {
    /// Enqueues that what goes with rank-major rows is laid apart, as
    /// [`Handle::row_experts`](crate::ep::Handle::row_experts) and
    /// [`row_weights`](crate::ep::Handle::row_weights) have it on the host, and that rows are
    /// counted by expert.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Shape`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn choices(&self, stream: &Stream, choices: &ChoiceArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "choices";
        let ChoiceArgs { rows, top_k, n_experts, .. } = *choices;
        if top_k == 0 || top_k >= 1 << 16 {
            let (given, expected) = (top_k.into(), "between 1 and 2^16 - 1");
            return Err(DeviceError::Shape { kernel: KERNEL, what: "top_k", given, expected });
        }
        let words = |each: u64| bytes([rows.into(), top_k.into(), each * WORD]);
        let counts = bytes([n_experts.into(), 2 * WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = ChoiceParameters {
            notes: operands.span("notes", choices.notes, words(2), WORD)?,
            experts: operands.span("experts", choices.experts, words(1), WORD)?,
            weights: operands.span("weights", choices.weights, words(1), WORD)?,
            counts: operands.span("counts", choices.counts, counts, 2 * WORD)?,
            rows,
            top_k,
            n_experts,
            unused: 0,
        };
        let needed = (u64::from(rows) * u64::from(top_k)).div_ceil(THREADS.into()).max(n_experts.into());
        let grid = self.limit.line(stream, needed, AT_WORK);
        // SAFETY: the struct is the one of the source. The kernel stays inside of what was checked:
        // rows below `rows`, choices below `top_k` and counts below `n_experts`.
        unsafe { self.choices.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Experts, or ranks, that a block counts for at a time: `WARP` in the source.
const BINS: u32 = 32;

/// Inputs and outputs of [`Kernels::counts`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct CountArgs<'a> {
    /// Tokens.
    pub tokens: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// Number of experts.
    pub n_experts: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Choices, `i32 [tokens, top_k]`; -1 is dropped.
    pub experts: ByteSpan<'a>,
    /// The rank that this one uses for each expert, `i32 [n_experts]`.
    pub rank_of: ByteSpan<'a>,
    /// Choices of each expert, `u32 [n_experts]`.
    pub per_expert: ByteSpan<'a>,
    /// Tokens that chose an expert of each rank, `u32 [ranks]`: rows where layouts are rank-major.
    pub per_rank: ByteSpan<'a>,
    /// Where a fault is written: a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
}

/// `struct Counts` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct CountParameters {
    experts: u64,
    rank_of: u64,
    per_expert: u64,
    per_rank: u64,
    status: u64,
    tokens: u32,
    top_k: u32,
    n_experts: u32,
    ranks: u32,
}

impl Kernels {
    /// Enqueues counting: how many rows this rank's tokens are for each expert, and for each rank.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Shape`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn counts(&self, stream: &Stream, counts: &CountArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "counts";
        let CountArgs { tokens, top_k, n_experts, ranks, .. } = *counts;
        for (what, given) in [("n_experts", n_experts), ("ranks", ranks)] {
            if !(1..=i32::MAX as u32).contains(&given) {
                let (given, expected) = (given.into(), "between 1 and 2^31 - 1");
                return Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
            }
        }
        let (map, choices) = (bytes([n_experts.into(), WORD]), bytes([tokens.into(), top_k.into(), WORD]));
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = CountParameters {
            experts: operands.span("experts", counts.experts, choices, WORD)?,
            rank_of: operands.span("rank_of", counts.rank_of, map, WORD)?,
            per_expert: operands.span("per_expert", counts.per_expert, map, WORD)?,
            per_rank: operands.span("per_rank", counts.per_rank, bytes([ranks.into(), WORD]), WORD)?,
            status: operands.word(counts.status)?,
            tokens,
            top_k,
            n_experts,
            ranks,
        };
        let grid = self.limit.grid([n_experts.div_ceil(BINS) + ranks.div_ceil(BINS), 1]);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, and every expert and rank is compared before it is used.
        unsafe { self.counts.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Inputs of [`Kernels::check`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    /// The shape of the slots.
    pub shape: SlotShape,
    /// Number of ranks.
    pub ranks: u32,
    /// This rank.
    pub rank: u32,
    /// The slots that this rank received, one for each rank, one behind the other.
    pub received: ByteSpan<'a>,
    /// The call of which they must be: the word that [`Kernels::pack`] counts in.
    pub counter: Word<'a, u64>,
    /// Where a fault is written, a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
    /// Where this call's own verdict is written: the status or, if a rank refuses the call, why.
    /// The upper half is the number of the call, modulo 2^32.
    pub verdict: Word<'a, u64>,
    /// The expected digest in the header of every slot.
    pub digest: u64,
}

/// `struct Check` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct CheckParameters {
    received: u64,
    slot_bytes: u64,
    counter: u64,
    status: u64,
    verdict: u64,
    digest: u64,
    ranks: u32,
    me: u32,
    choices: u32,
    unused: u32,
}

impl Kernels {
    /// Enqueues a comparison of the heads of received slots with this rank's digest and counter:
    /// rows of another call, or of ranks with other settings, must not be used. If a rank refuses
    /// the call, all slots are left without rows. It must run before the sources may write their
    /// next slots.
    ///
    /// # Errors
    /// [`DeviceError::Shape`], [`DeviceError::TooSmall`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn check(&self, stream: &Stream, check: &Check<'_>) -> Result<(), DeviceError> {
        if check.rank >= check.ranks {
            let (given, expected) = (check.rank.into(), "one of the ranks");
            return Err(DeviceError::Shape { kernel: "check", what: "rank", given, expected });
        }
        let received = bytes([check.ranks.into(), check.shape.bytes()]);
        let mut operands = Operands::of("check", stream);
        let parameters = CheckParameters {
            received: operands.span("received", check.received, received, VECTOR)?,
            slot_bytes: check.shape.bytes(),
            counter: operands.word(check.counter)?,
            status: operands.word(check.status)?,
            verdict: operands.word(check.verdict)?,
            digest: check.digest,
            ranks: check.ranks,
            me: check.rank,
            choices: check.shape.max_tokens() * check.shape.top_k(),
            unused: 0,
        };
        // SAFETY: the struct is the one of the source. The kernel stays inside the heads of the
        // checked slots and the experts behind them.
        unsafe { self.check.launch_struct(stream, operands.held(), Grid::line(1, THREADS), &parameters) }
    }
}
