//! Launches of `cuda/expand.cu`: slots become expert-major rows within a budget.
//!
//! ```text
//!   tally    choices of received slots --> rows for each bin
//!   admit    rows for each bin, budget --> first row of each bin, or a fault
//!   expand   rows of slots --> rows of bins
//! ```

use std::sync::Arc;

use super::{Addresses, Kernels};
use super::{Operands, VECTOR, WORD, bytes};
use crate::device::module::{Function, Module};
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::error::DeviceError;
use crate::plan::{Overflow, SlotShape};

/// Inputs and outputs of [`Kernels::tally`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct Tally<'a> {
    /// The shape of every slot, with counts of all bins.
    pub shape: SlotShape,
    /// Number of choices: tokens times `top_k`.
    pub choices: u32,
    /// Chosen experts, `i32 [choices]`; -1 is dropped.
    pub experts: ByteSpan<'a>,
    /// Number of experts.
    pub n_experts: u32,
    /// The bin that this rank uses for each expert, `i32 [n_experts]`.
    pub bin_of: ByteSpan<'a>,
    /// Where the slot for each rank was packed.
    pub slots: &'a Addresses,
    /// The bin of each choice, `i32 [choices]`, or -1.
    pub bins: ByteSpan<'a>,
    /// Choices of its bin before each choice, `u32 [choices]`.
    pub before: ByteSpan<'a>,
}

/// Inputs and outputs of [`Kernels::admit`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct Admit<'a> {
    /// The shape of every slot, with counts of all bins.
    pub shape: SlotShape,
    /// Number of ranks, and this one.
    pub ranks: u32,
    /// This rank.
    pub rank: u32,
    /// Bins of this rank.
    pub own: u32,
    /// Rows for which there is room.
    pub budget: u32,
    /// Treatment of more rows.
    pub overflow: Overflow,
    /// Rows of a bin are padded to a multiple of this.
    pub align: u32,
    /// The slots that this rank received, one for each rank, one behind the other.
    pub received: ByteSpan<'a>,
    /// The first bin of each rank, and of none, `u32 [ranks + 1]`.
    pub starts: ByteSpan<'a>,
    /// The first row of each bin at its rank, `u32 [bins]`.
    pub begin: ByteSpan<'a>,
    /// Rows of this rank for which each bin has room, `u32 [bins]`.
    pub room: ByteSpan<'a>,
    /// The first row of each source at each bin of this rank, `u32 [ranks, own]`.
    pub first: ByteSpan<'a>,
    /// Rows of each bin of this rank, then the same with pads, `i64 [2, own]`.
    pub counts: ByteSpan<'a>,
    /// The source of each row, `i32 [budget]`: -1 is written.
    pub index: ByteSpan<'a>,
    /// The weight of each row, `f32 [budget]`: 0 is written.
    pub weights: ByteSpan<'a>,
    /// Fault that kernels found before: a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
    /// The verdict of [`Kernels::check`], or which rank is over its budget: the status of this call
    /// alone, and its number.
    pub verdict: Word<'a, u64>,
    /// Where it is said which rank refuses the call or is over its budget, likewise, and nothing
    /// else: all ranks find the same.
    pub refusal: Word<'a, u32>,
}

/// Inputs and outputs of [`Kernels::expand`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct Expand<'a> {
    /// The shape of every slot.
    pub shape: SlotShape,
    /// Number of ranks.
    pub ranks: u32,
    /// Bins of this rank.
    pub own: u32,
    /// Rows for which there is room.
    pub budget: u32,
    /// Choices of this rank in this call.
    pub choices: u32,
    /// The slots that this rank received.
    pub received: ByteSpan<'a>,
    /// As [`Kernels::admit`] wrote it.
    pub first: ByteSpan<'a>,
    /// The place of each bin of this rank in the order of sums, `i32 [own]`.
    pub place: ByteSpan<'a>,
    /// The row of each choice that came, `i32 [ranks, max_tokens, top_k]`, or -1.
    pub rows: ByteSpan<'a>,
    /// The place of its bin, likewise.
    pub sums: ByteSpan<'a>,
    /// The row of the slots that each row is, `i32 [budget]`.
    pub index: ByteSpan<'a>,
    /// Its routing weight, `f32 [budget]`.
    pub weights: ByteSpan<'a>,
    /// As [`Kernels::tally`] wrote them.
    pub bins: ByteSpan<'a>,
    /// Likewise.
    pub before: ByteSpan<'a>,
    /// As [`Kernels::admit`] wrote it, `u32 [bins]`.
    pub room: ByteSpan<'a>,
    /// Whether each choice of this rank was dropped, `u8 [choices]`: those without room are added
    /// to those that `pack` has marked.
    pub dropped: ByteSpan<'a>,
    /// As [`Kernels::admit`] wrote it: if it is not 0, nothing lands.
    pub refusal: Word<'a, u32>,
}

/// `struct Tally` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct TallyParameters {
    experts: u64,
    bin_of: u64,
    slots: u64,
    bins: u64,
    before: u64,
    counts_at: u64,
    choices: u32,
    n_experts: u32,
    ranks: u32,
    n_bins: u32,
}

/// `struct Admit` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct AdmitParameters {
    received: u64,
    slot_bytes: u64,
    counts_at: u64,
    starts: u64,
    begin: u64,
    room: u64,
    first: u64,
    counts: u64,
    index: u64,
    weights: u64,
    status: u64,
    verdict: u64,
    refusal: u64,
    ranks: u32,
    rank: u32,
    bins: u32,
    budget: u32,
    align: u32,
    strict: u32,
}

/// `struct Expand` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct ExpandParameters {
    received: u64,
    slot_bytes: u64,
    weights_at: u64,
    first: u64,
    place: u64,
    rows: u64,
    sums: u64,
    index: u64,
    weights: u64,
    bins: u64,
    before: u64,
    room: u64,
    dropped: u64,
    refusal: u64,
    ranks: u32,
    own: u32,
    budget: u32,
    max_tokens: u32,
    top_k: u32,
    slot_rows: u32,
    header_rows: u32,
    choices: u32,
}

#[derive(Clone, Debug)]
pub(super) struct ExpandFunctions {
    tally: Function,
    admit: Function,
    expand: Function,
}

impl ExpandFunctions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(ExpandFunctions {
            tally: module.function(c"tally")?,
            admit: module.function(c"admit")?,
            expand: module.function(c"expand")?,
        })
    }
}

fn refuse(kernel: &'static str, what: &'static str, given: u32, expected: &'static str) -> DeviceError {
    DeviceError::Shape { kernel, what, given: given.into(), expected }
}

impl Kernels {
    /// Enqueues the counts of this rank's choices by bin, which go into the header of every packed
    /// slot.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Shape`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn tally(&self, stream: &Stream, tally: &Tally<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "tally";
        let Tally { shape, choices, n_experts, .. } = *tally;
        if choices > shape.max_tokens() * shape.top_k() {
            return Err(refuse(KERNEL, "choices", choices, "at most those of a slot"));
        }
        if !(1..=i32::MAX as u32).contains(&n_experts) {
            return Err(refuse(KERNEL, "n_experts", n_experts, "between 1 and 2^31 - 1"));
        }
        if !(1..=i32::MAX as u32).contains(&shape.bins()) {
            return Err(refuse(KERNEL, "bins", shape.bins(), "between 1 and 2^31 - 1"));
        }
        let list = bytes([choices.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = TallyParameters {
            experts: operands.span("experts", tally.experts, list, WORD)?,
            bin_of: operands.span("bin_of", tally.bin_of, bytes([n_experts.into(), WORD]), WORD)?,
            slots: operands.addresses("slots", tally.slots, Some(shape.bytes()))?,
            bins: operands.span("bins", tally.bins, list, WORD)?,
            before: operands.span("before", tally.before, list, WORD)?,
            counts_at: shape.counts_at(),
            choices,
            n_experts,
            ranks: tally.slots.count,
            n_bins: shape.bins(),
        };
        let grid = self.limit.grid([shape.bins(), 1]);
        // SAFETY: the struct is the one of the source. The kernel stays inside of what was checked:
        // choices below `choices`, experts are compared before they are used, and bins are
        // those which slots have counts of.
        unsafe { self.expansion.tally.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues the layout of received rows from the counts of all ranks, and whether it is within
    /// the budget.
    ///
    /// # Errors
    /// As [`Kernels::tally`].
    pub fn admit(&self, stream: &Stream, admit: &Admit<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "admit";
        let Admit { shape, ranks, rank, own, budget, align, .. } = *admit;
        if rank >= ranks {
            return Err(refuse(KERNEL, "rank", rank, "less than the number of ranks"));
        }
        if align == 0 {
            return Err(refuse(KERNEL, "align", align, "at least 1"));
        }
        if budget > i32::MAX as u32 {
            return Err(refuse(KERNEL, "budget", budget, "less than 2^31"));
        }
        let bins = bytes([shape.bins().into(), WORD]);
        let rows = bytes([budget.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let received = bytes([ranks.into(), shape.bytes()]);
        let parameters = AdmitParameters {
            received: operands.span("received", admit.received, received, VECTOR)?,
            slot_bytes: shape.bytes(),
            counts_at: shape.counts_at(),
            starts: operands.span("starts", admit.starts, bytes([u64::from(ranks) + 1, WORD]), WORD)?,
            begin: operands.span("begin", admit.begin, bins, WORD)?,
            room: operands.span("room", admit.room, bins, WORD)?,
            first: operands.span("first", admit.first, bytes([ranks.into(), own.into(), WORD]), WORD)?,
            counts: operands.span("counts", admit.counts, bytes([2, own.into(), 2 * WORD]), 2 * WORD)?,
            index: operands.span("index", admit.index, rows, WORD)?,
            weights: operands.span("weights", admit.weights, rows, WORD)?,
            status: operands.word(admit.status)?,
            verdict: operands.word(admit.verdict)?,
            refusal: operands.word(admit.refusal)?,
            ranks,
            rank,
            bins: shape.bins(),
            budget,
            align,
            strict: (admit.overflow == Overflow::Error).into(),
        };
        let grid = self.limit.threads(stream, budget.into());
        // SAFETY: the struct is the one of the source. The kernel stays inside of what was checked:
        // bins below `bins`, of which the table of starts has those of each rank, ranks below
        // `ranks` and rows below `budget`.
        unsafe { self.expansion.admit.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues the index of expert-major rows, the row of each choice that came, and the mask of
    /// this rank's own choices that were dropped. [`Kernels::regroup`] makes the rows.
    ///
    /// # Errors
    /// As [`Kernels::tally`].
    pub fn expand(&self, stream: &Stream, expand: &Expand<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "expand";
        let Expand { shape, ranks, own, budget, choices, .. } = *expand;
        let choices_of_slot = u64::from(shape.max_tokens()) * u64::from(shape.top_k());
        if u64::from(choices) > choices_of_slot {
            return Err(refuse(KERNEL, "choices", choices, "at most those of a slot"));
        }
        if budget > i32::MAX as u32 {
            return Err(refuse(KERNEL, "budget", budget, "less than 2^31"));
        }
        if u64::from(ranks) * u64::from(shape.slot_rows()) > i32::MAX as u64 || ranks >= (1 << 16) - 1 {
            return Err(refuse(KERNEL, "ranks", ranks, "fewer: rows of slots are counted in 31 bits"));
        }
        let (came, rows) = (bytes([ranks.into(), choices_of_slot, WORD]), bytes([budget.into(), WORD]));
        let list = bytes([choices.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let received = bytes([ranks.into(), shape.bytes()]);
        let parameters = ExpandParameters {
            received: operands.span("received", expand.received, received, VECTOR)?,
            slot_bytes: shape.bytes(),
            weights_at: shape.weights_at(),
            first: operands.span("first", expand.first, bytes([ranks.into(), own.into(), WORD]), WORD)?,
            place: operands.span("place", expand.place, bytes([own.into(), WORD]), WORD)?,
            rows: operands.span("rows", expand.rows, came, WORD)?,
            sums: operands.span("sums", expand.sums, came, WORD)?,
            index: operands.span("index", expand.index, rows, WORD)?,
            weights: operands.span("weights", expand.weights, rows, WORD)?,
            bins: operands.span("bins", expand.bins, list, WORD)?,
            before: operands.span("before", expand.before, list, WORD)?,
            room: operands.span("room", expand.room, bytes([shape.bins().into(), WORD]), WORD)?,
            dropped: operands.span("dropped", expand.dropped, Some(choices.into()), 1)?,
            refusal: operands.word(expand.refusal)?,
            ranks,
            own,
            budget,
            max_tokens: shape.max_tokens(),
            top_k: shape.top_k(),
            slot_rows: shape.slot_rows(),
            header_rows: shape.header_rows(),
            choices,
        };
        let grid = self.limit.grid([own.max(1), ranks + 1]);
        // SAFETY: the struct is the one of the source. The kernel stays inside of what was checked:
        // choices below those of a slot, rows are compared with `budget` before they are used, and
        // bins are those that `tally` wrote.
        unsafe { self.expansion.expand.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}
