//! The launch of `cuda/counts.cu`.

use super::operands::{Operands, WORD, bytes};
use super::{Kernels, THREADS};
use crate::device::launch::Grid;
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// Experts, or ranks, that a block counts for: `WARP` in the source.
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
struct Parameters {
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
        let parameters = Parameters {
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
        let grid = Grid::line(n_experts.div_ceil(BINS) + ranks.div_ceil(BINS), THREADS);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, and every expert and rank is compared before it is used.
        unsafe { self.counts.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}
