//! The launches of `cuda/sum_choices.cu`.

use std::sync::Arc;

use super::operands::{Operands, VECTOR, WORD, bytes};
use super::{Kernels, sums};
use crate::device::module::{Function, Module};
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::dtype::{Dtype, PartialDtype};
use crate::error::DeviceError;

/// Inputs and outputs of [`Kernels::sum_choices`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct SumChoices<'a> {
    /// Tokens.
    pub tokens: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// Elements of a row.
    pub columns: u32,
    /// Type of rows and results.
    pub dtype: Dtype,
    /// The type to which the sum of each group is rounded.
    pub wire: PartialDtype,
    /// Rows that are there.
    pub n_rows: u32,
    /// `[n_rows, columns]`, at a multiple of 16 bytes.
    pub rows: ByteSpan<'a>,
    /// The row of each choice, `i32 [tokens, top_k]`, or -1.
    pub index: ByteSpan<'a>,
    /// Number of experts.
    pub n_experts: u32,
    /// The expert of each choice, `i32 [tokens, top_k]`; -1 is dropped. None where choices are in
    /// the order of the sum already, in one group.
    pub experts: Option<ByteSpan<'a>>,
    /// Routing weights, `f32 [tokens, top_k]`, for rows that have not got theirs yet.
    pub weights: Option<ByteSpan<'a>>,
    /// The group of each expert, `i32 [n_experts]`: its rank for `order = rank`, its node for
    /// `node`. None for `expert`.
    pub group_of: Option<ByteSpan<'a>>,
    /// Where a fault is written, a [`KernelFault`](crate::error::KernelFault). If it is not 0,
    /// results are zeros.
    pub status: Word<'a, u32>,
    /// Results, `[tokens, columns]`, at a multiple of 16 bytes.
    pub out: ByteSpan<'a>,
}

/// `struct SumChoices` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    out: u64,
    rows: u64,
    index: u64,
    experts: u64,
    weights: u64,
    group_of: u64,
    status: u64,
    tokens: u32,
    top_k: u32,
    columns: u32,
    n_rows: u32,
    n_experts: u32,
    wire: u32,
}

/// A kernel for each type.
#[derive(Clone, Debug)]
pub(super) struct Functions {
    f32: Function,
    bf16: Function,
    f16: Function,
    bf16_to_f32: Function,
    f16_to_f32: Function,
}

impl Functions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(Functions {
            f32: module.function(c"sum_choices_f32")?,
            bf16: module.function(c"sum_choices_bf16")?,
            f16: module.function(c"sum_choices_f16")?,
            bf16_to_f32: module.function(c"sum_choices_bf16_to_f32")?,
            f16_to_f32: module.function(c"sum_choices_f16_to_f32")?,
        })
    }
}

impl Kernels {
    /// The kernels of [`Kernels::sum_choices`] for rows of this type, for reports.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`].
    pub fn sum_choices_names(dtype: Dtype) -> Result<&'static [&'static str], DeviceError> {
        match dtype {
            Dtype::F32 => Ok(&["sum_choices_f32"]),
            Dtype::Bf16 => Ok(&["sum_choices_bf16"]),
            Dtype::F16 => Ok(&["sum_choices_f16"]),
            Dtype::Bytes => Err(DeviceError::NoSum { rows: dtype, out: dtype }),
        }
    }

    /// The kernel of [`Kernels::sum_choices_to_f32`], likewise.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`].
    pub fn sum_choices_to_f32_names(dtype: Dtype) -> Result<&'static [&'static str], DeviceError> {
        match dtype {
            Dtype::Bf16 => Ok(&["sum_choices_bf16_to_f32"]),
            Dtype::F16 => Ok(&["sum_choices_f16_to_f32"]),
            _ => Self::sum_choices_names(dtype),
        }
    }

    /// Enqueues the sums of combine where every choice has a row of its own, in `f32` from +0: the
    /// rows of a group by ascending expert, each times its weight, rounded, then added; the groups,
    /// rounded to the wire's type, ascending; one rounding at the end. A token without rows gets
    /// zeros, and all do if the status word is set.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`], [`DeviceError::TooSmall`], [`DeviceError::Shape`],
    /// [`DeviceError::Misaligned`], [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`],
    /// [`DeviceError::Call`].
    pub fn sum_choices(&self, stream: &Stream, sum: &SumChoices<'_>) -> Result<(), DeviceError> {
        self.sum_choices_to(stream, sum, sum.dtype)
    }

    /// The same, but results are `f32`: partial sums that are yet to be added up.
    ///
    /// # Errors
    /// As [`Kernels::sum_choices`].
    pub fn sum_choices_to_f32(&self, stream: &Stream, sum: &SumChoices<'_>) -> Result<(), DeviceError> {
        self.sum_choices_to(stream, sum, Dtype::F32)
    }

    fn sum_choices_to(&self, stream: &Stream, sum: &SumChoices<'_>, out: Dtype) -> Result<(), DeviceError> {
        const KERNEL: &str = "sum_choices";
        let (dtype, wire, functions) = (sum.dtype, sum.wire, &self.sums_of_choices);
        let function = match (dtype, out) {
            _ if !wire.carries(dtype) => {
                return Err(DeviceError::NoSum { rows: dtype, out: wire.dtype() });
            }
            (Dtype::F32, Dtype::F32) => &functions.f32,
            (Dtype::F16, Dtype::F16) => &functions.f16,
            (Dtype::Bf16, Dtype::Bf16) => &functions.bf16,
            (Dtype::F16, Dtype::F32) => &functions.f16_to_f32,
            (Dtype::Bf16, Dtype::F32) => &functions.bf16_to_f32,
            _ => return Err(DeviceError::NoSum { rows: dtype, out }),
        };
        sums::check_columns(KERNEL, sum.columns, dtype)?;
        for (what, given) in [("n_rows", sum.n_rows), ("n_experts", sum.n_experts)] {
            if given > i32::MAX as u32 {
                let (given, expected) = (given.into(), "less than 2^31");
                return Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
            }
        }
        let row_bytes = u64::from(sum.columns) * dtype.size() as u64;
        let results = bytes([sum.tokens.into(), sum.columns.into(), out.size() as u64]);
        let choices = bytes([sum.tokens.into(), sum.top_k.into(), WORD]);
        let map = bytes([sum.n_experts.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = Parameters {
            out: operands.span("out", sum.out, results, VECTOR)?,
            rows: operands.span("rows", sum.rows, bytes([sum.n_rows.into(), row_bytes]), VECTOR)?,
            index: operands.span("index", sum.index, choices, WORD)?,
            experts: operands.optional("experts", sum.experts, choices, WORD)?,
            weights: operands.optional("weights", sum.weights, choices, WORD)?,
            group_of: operands.optional(
                "group_of",
                sum.group_of.filter(|_| sum.experts.is_some()),
                map,
                WORD,
            )?,
            status: operands.word(sum.status)?,
            tokens: sum.tokens,
            top_k: sum.top_k,
            columns: sum.columns,
            n_rows: sum.n_rows,
            n_experts: sum.experts.map_or(sum.top_k, |_| sum.n_experts),
            wire: u32::from(wire == PartialDtype::Bf16),
        };
        let grid = sums::grid(stream, sum.tokens, sum.columns, dtype);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, columns below `columns`, and every expert and index is compared
        // before it is used.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}
