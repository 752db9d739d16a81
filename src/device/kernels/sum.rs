//! The launches of `cuda/sum.cu`.

use std::sync::Arc;

use super::operands::{Operands, VECTOR, WORD, bytes};
use super::{Addresses, Kernels, sums};
use crate::device::module::{Function, Module};
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::dtype::Dtype;
use crate::error::DeviceError;
use crate::plan::SlotShape;

/// Inputs and outputs of [`Kernels::sum`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct SumArgs<'a> {
    /// The shape of the slots that were dispatched.
    pub shape: SlotShape,
    /// Tokens of this call, at most those of the shape.
    pub tokens: u32,
    /// Elements of a row.
    pub columns: u32,
    /// Type of the returned rows: that of the results, or `f32`.
    pub rows: Dtype,
    /// Type of the results.
    pub dtype: Dtype,
    /// The returned rows of each rank, `[max_tokens, columns]`, in the order of the slot that was
    /// packed for it.
    pub homes: &'a Addresses,
    /// What [`Kernels::pack`] wrote, `i32 [tokens, ranks]`.
    pub places: ByteSpan<'a>,
    /// Where a fault is written, a [`KernelFault`](crate::error::KernelFault). If it is not 0,
    /// results are zeros.
    pub status: Word<'a, u32>,
    /// Results, `[tokens, columns]`, at a multiple of 16 bytes.
    pub out: ByteSpan<'a>,
}

/// `struct Sum` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    out: u64,
    homes: u64,
    places: u64,
    status: u64,
    tokens: u32,
    max_tokens: u32,
    ranks: u32,
    columns: u32,
}

/// A kernel for each pair of types.
#[derive(Clone, Debug)]
pub(super) struct Functions {
    f32: Function,
    bf16: Function,
    f16: Function,
    f32_to_bf16: Function,
    f32_to_f16: Function,
}

impl Functions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(Functions {
            f32: module.function(c"sum_f32")?,
            bf16: module.function(c"sum_bf16")?,
            f16: module.function(c"sum_f16")?,
            f32_to_bf16: module.function(c"sum_f32_to_bf16")?,
            f32_to_f16: module.function(c"sum_f32_to_f16")?,
        })
    }

    fn for_types(&self, rows: Dtype, out: Dtype) -> Result<&Function, DeviceError> {
        match (rows, out) {
            (Dtype::F32, Dtype::F32) => Ok(&self.f32),
            (Dtype::Bf16, Dtype::Bf16) => Ok(&self.bf16),
            (Dtype::F16, Dtype::F16) => Ok(&self.f16),
            (Dtype::F32, Dtype::Bf16) => Ok(&self.f32_to_bf16),
            (Dtype::F32, Dtype::F16) => Ok(&self.f32_to_f16),
            _ => Err(DeviceError::NoSum { rows, out }),
        }
    }
}

impl Kernels {
    /// Enqueues the sums of combine with `order = rank`: for each token the rows that its ranks
    /// returned, ranks ascending, in `f32` from +0, with one rounding. A token without rows gets
    /// zeros.
    ///
    /// If the status word is set, all results are zeros.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`], [`DeviceError::TooSmall`], [`DeviceError::Shape`],
    /// [`DeviceError::Misaligned`], [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`],
    /// [`DeviceError::Call`].
    pub fn sum(&self, stream: &Stream, sum: &SumArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "sum";
        let function = self.sums.for_types(sum.rows, sum.dtype)?;
        let (shape, ranks) = (sum.shape, sum.homes.count);
        let refuse =
            |what, given, expected| Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
        if sum.tokens > shape.max_tokens() {
            return refuse("tokens", sum.tokens.into(), "at most the tokens of a slot");
        }
        sums::check_columns(KERNEL, sum.columns, sum.dtype)?;
        let (tokens, columns) = (u64::from(sum.tokens), u64::from(sum.columns));
        let home = bytes([shape.max_tokens().into(), columns, sum.rows.size() as u64]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = Parameters {
            out: operands.span("out", sum.out, bytes([tokens, columns, sum.dtype.size() as u64]), VECTOR)?,
            homes: operands.addresses("homes", sum.homes, home)?,
            places: operands.span("places", sum.places, bytes([tokens, ranks.into(), WORD]), WORD)?,
            status: operands.word(sum.status)?,
            tokens: sum.tokens,
            max_tokens: shape.max_tokens(),
            ranks,
            columns: sum.columns,
        };
        // A launch has one block at least.
        let grid = sums::grid(stream, sum.tokens, sum.columns, sum.dtype);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, columns below `columns`, ranks below `ranks`, and every place is
        // compared before it is used.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}
