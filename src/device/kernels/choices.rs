//! The launch of `cuda/choices.cu`.

use super::operands::{Operands, WORD, bytes};
use super::{Kernels, THREADS};
use crate::device::launch::Grid;
use crate::device::range::ByteSpan;
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// Blocks that a multiprocessor has at work.
const BLOCKS_AT_WORK: u32 = 8;

/// What [`Kernels::choices`] reads and writes. Memory may be larger than what is named here.
#[derive(Clone, Copy, Debug)]
pub struct ChoiceArgs<'a> {
    /// Number of rows, pads counted.
    pub rows: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// Number of local experts.
    pub n_experts: u32,
    /// What goes with the rows, `[rows, 2, top_k]`: per choice the local expert + 1, or 0; then per
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
struct Parameters {
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
        let parameters = Parameters {
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
        let at_work = stream.context.facts().multiprocessors.saturating_mul(BLOCKS_AT_WORK).clamp(1, 1 << 16);
        let blocks = needed.clamp(1, at_work.into()) as u32;
        // SAFETY: the struct is the one of the source. The kernel stays inside of what was checked:
        // rows below `rows`, choices below `top_k` and counts below `n_experts`.
        unsafe {
            self.choices.launch_struct(stream, operands.held(), Grid::line(blocks, THREADS), &parameters)
        }
    }
}
