//! Launches of kernels that sum a token's rows at the rank of their experts: `cuda/rank_sums.cu`.

use std::sync::Arc;

use super::sum::check_columns;
use super::{AT_WORK, Kernels, Operands, VECTOR, WORD, bytes};
use crate::device::module::{Function, Module};
use crate::device::range::ByteSpan;
use crate::device::stream::Stream;
use crate::dtype::Dtype;
use crate::error::DeviceError;

/// Inputs and outputs of [`Kernels::rank_sums`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct RankSumArgs<'a> {
    /// Sums, at most: some may have no rows.
    pub sums: u32,
    /// Elements of a row.
    pub columns: u32,
    /// Type of rows and sums: `f32` or bf16.
    pub dtype: Dtype,
    /// Rows that are there, pads counted.
    pub n_rows: u32,
    /// `[n_rows, columns]`, at a multiple of 16 bytes.
    pub rows: ByteSpan<'a>,
    /// Which sum each row is part of, `i32 [n_rows]`: ascending within each expert; -1 of pads.
    pub numbers: ByteSpan<'a>,
    /// Number of local experts.
    pub n_experts: u32,
    /// Rows of each expert, then the same with pads, `i64 [2, n_experts]`.
    pub counts: ByteSpan<'a>,
    /// Local experts in the order in which their rows are added up, `u32 [n_experts]`.
    pub order: ByteSpan<'a>,
    /// Routing weights, `f32 [n_rows]`, for rows that have not got theirs yet.
    pub weights: Option<ByteSpan<'a>>,
    /// Sums, `[sums, columns]`, at a multiple of 16 bytes. Those without rows are not written.
    pub out: ByteSpan<'a>,
}

/// `struct RankSums` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct RankSumParameters {
    out: u64,
    rows: u64,
    numbers: u64,
    counts: u64,
    order: u64,
    weights: u64,
    sums: u32,
    columns: u32,
    n_rows: u32,
    n_experts: u32,
}

/// A kernel for each type.
#[derive(Clone, Debug)]
pub(super) struct RankSumFunctions {
    f32: Function,
    bf16: Function,
}

impl RankSumFunctions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(RankSumFunctions {
            f32: module.function(c"rank_sums_f32")?,
            bf16: module.function(c"rank_sums_bf16")?,
        })
    }
}

impl Kernels {
    /// The kernels of a combine whose ranks sum a token's rows before these return, for reports.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`].
    pub fn rank_sums_names(dtype: Dtype) -> Result<&'static [&'static str], DeviceError> {
        match dtype {
            Dtype::F32 => Ok(&["rank_sums_f32", "sum_choices_f32"]),
            Dtype::Bf16 => Ok(&["rank_sums_bf16", "sum_choices_bf16"]),
            _ => Err(DeviceError::NoSum { rows: dtype, out: dtype }),
        }
    }

    /// Enqueues the sums of a token's rows at this rank, in `f32` from +0: in the order of experts,
    /// each row times its weight, rounded, then added; one rounding at the end.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`], [`DeviceError::TooSmall`], [`DeviceError::Shape`],
    /// [`DeviceError::Misaligned`], [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`],
    /// [`DeviceError::Call`].
    pub fn rank_sums(&self, stream: &Stream, sums: &RankSumArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "rank_sums";
        let dtype = sums.dtype;
        let function = match dtype {
            Dtype::F32 => &self.sums_by_rank.f32,
            Dtype::Bf16 => &self.sums_by_rank.bf16,
            _ => return Err(DeviceError::NoSum { rows: dtype, out: dtype }),
        };
        check_columns(KERNEL, sums.columns, dtype)?;
        for (what, given) in [("sums", sums.sums), ("n_rows", sums.n_rows)] {
            if given > i32::MAX as u32 {
                let (given, expected) = (given.into(), "less than 2^31");
                return Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
            }
        }
        let row_bytes = u64::from(sums.columns) * dtype.size() as u64;
        let words = bytes([sums.n_rows.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = RankSumParameters {
            out: operands.span("out", sums.out, bytes([sums.sums.into(), row_bytes]), VECTOR)?,
            rows: operands.span("rows", sums.rows, bytes([sums.n_rows.into(), row_bytes]), VECTOR)?,
            numbers: operands.span("numbers", sums.numbers, words, WORD)?,
            counts: operands.span(
                "counts",
                sums.counts,
                bytes([2, sums.n_experts.into(), 2 * WORD]),
                2 * WORD,
            )?,
            order: operands.span("order", sums.order, bytes([sums.n_experts.into(), WORD]), WORD)?,
            weights: operands.optional("weights", sums.weights, words, WORD)?,
            sums: sums.sums,
            columns: sums.columns,
            n_rows: sums.n_rows,
            n_experts: sums.n_experts,
        };
        let grid = self.limit.line(stream, sums.sums.into(), AT_WORK);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // sums below `sums`, columns below `columns`, experts below `n_experts`, and rows of
        // experts are cut off at `n_rows`.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}
