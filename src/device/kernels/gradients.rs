//! The launches of `cuda/gradients.cu`.

use std::sync::Arc;

use super::operands::{Operands, VECTOR, WORD, bytes};
use super::{Kernels, THREADS, sums};
use crate::device::launch::Grid;
use crate::device::module::{Function, Module};
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::dtype::Dtype;
use crate::error::DeviceError;

/// Blocks that a multiprocessor has at work.
const BLOCKS_AT_WORK: u32 = 8;

/// Inputs and outputs of [`Kernels::dot_scale`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct DotScale<'a> {
    /// Rows.
    pub rows: u32,
    /// Elements of a row.
    pub columns: u32,
    /// Type of the rows.
    pub dtype: Dtype,
    /// Expert outputs, `[rows, columns]`, at a multiple of 16 bytes.
    pub y: ByteSpan<'a>,
    /// Gradients of the rows as they were summed, likewise: afterwards multiplied with the weights.
    pub gradients: ByteSpan<'a>,
    /// Routing weights, `f32 [rows]`.
    pub weights: ByteSpan<'a>,
    /// Gradients of the weights, `f32 [rows]`.
    pub products: ByteSpan<'a>,
}

/// `struct DotScale` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct DotScaleParameters {
    y: u64,
    gradients: u64,
    weights: u64,
    products: u64,
    rows: u32,
    columns: u32,
}

/// Inputs and outputs of [`Kernels::fetch_weights`]. Memory may be larger than the sizes named
/// here.
#[derive(Clone, Copy, Debug)]
pub struct FetchWeights<'a> {
    /// Number of choices: tokens times `top_k`.
    pub choices: u32,
    /// Rows that are there.
    pub n_rows: u32,
    /// Numbers of a row: one, or as many as a token has choices, one for each.
    pub words: u32,
    /// The numbers of the rows, `f32 [n_rows, words]`.
    pub from: ByteSpan<'a>,
    /// The row of each choice, `i32 [choices]`, or -1.
    pub index: ByteSpan<'a>,
    /// Where a fault is written, a [`KernelFault`](crate::error::KernelFault). If it is not 0,
    /// results are zeros.
    pub status: Word<'a, u32>,
    /// The number of each choice, `f32 [choices]`.
    pub out: ByteSpan<'a>,
}

/// `struct FetchWeights` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct FetchWeightsParameters {
    out: u64,
    from: u64,
    index: u64,
    status: u64,
    choices: u32,
    n_rows: u32,
    words: u32,
    unused: u32,
}

/// A kernel of products for each type, and the one that fetches.
#[derive(Clone, Debug)]
pub(super) struct Functions {
    f32: Function,
    bf16: Function,
    f16: Function,
    fetch: Function,
}

impl Functions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(Functions {
            f32: module.function(c"dot_scale_f32")?,
            bf16: module.function(c"dot_scale_bf16")?,
            f16: module.function(c"dot_scale_f16")?,
            fetch: module.function(c"fetch_weights")?,
        })
    }
}

impl Kernels {
    /// Enqueues the gradients of a weighted combine at the rank of its experts: `<y, g>` of each
    /// row, in the order of [`RowKernels::dot_rows`](crate::rows::RowKernels::dot_rows), then `g`
    /// times the weight of the row, rounded.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`], [`DeviceError::TooSmall`], [`DeviceError::Shape`],
    /// [`DeviceError::Misaligned`], [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`],
    /// [`DeviceError::Call`].
    pub fn dot_scale(&self, stream: &Stream, dot: &DotScale<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "dot_scale";
        let DotScale { rows, columns, dtype, .. } = *dot;
        let function = match dtype {
            Dtype::F32 => &self.gradients.f32,
            Dtype::Bf16 => &self.gradients.bf16,
            Dtype::F16 => &self.gradients.f16,
            Dtype::Bytes => return Err(DeviceError::NoSum { rows: dtype, out: dtype }),
        };
        sums::check_columns(KERNEL, columns, dtype)?;
        let all = bytes([rows.into(), columns.into(), dtype.size() as u64]);
        let words = bytes([rows.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = DotScaleParameters {
            y: operands.span("y", dot.y, all, VECTOR)?,
            gradients: operands.span("gradients", dot.gradients, all, VECTOR)?,
            weights: operands.span("weights", dot.weights, words, WORD)?,
            products: operands.span("products", dot.products, words, WORD)?,
            rows,
            columns,
        };
        // As many threads for a row as it takes vectors to have 16 elements.
        let threads = u64::from(rows) * dtype.size() as u64;
        let grid = grid(stream, threads);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // rows below `rows`, and columns, which are whole vectors, below `columns`.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues the copy of row numbers to choices: zero for a choice without a row, and for all if
    /// the status word is set.
    ///
    /// # Errors
    /// As [`Kernels::dot_scale`].
    pub fn fetch_weights(&self, stream: &Stream, fetch: &FetchWeights<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "fetch_weights";
        let FetchWeights { choices, n_rows, words: of_row, .. } = *fetch;
        for (what, given) in [("choices", choices), ("n_rows", n_rows)] {
            if given > i32::MAX as u32 {
                let (given, expected) = (given.into(), "less than 2^31");
                return Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
            }
        }
        if of_row == 0 {
            let expected = "at least 1";
            return Err(DeviceError::Shape { kernel: KERNEL, what: "words", given: 0, expected });
        }
        let words = |count: u32| bytes([count.into(), WORD]);
        let all = bytes([n_rows.into(), of_row.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = FetchWeightsParameters {
            out: operands.span("out", fetch.out, words(choices), WORD)?,
            from: operands.span("from", fetch.from, all, WORD)?,
            index: operands.span("index", fetch.index, words(choices), WORD)?,
            status: operands.word(fetch.status)?,
            choices,
            n_rows,
            words: of_row,
            unused: 0,
        };
        let grid = grid(stream, choices.into());
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // choices below `choices`, and every index is compared with `n_rows` before it is used.
        unsafe { self.gradients.fetch.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Blocks for so many threads, or as many as the device has at work; one if there are none.
fn grid(stream: &Stream, threads: u64) -> Grid {
    let at_work = stream.context.facts().multiprocessors.saturating_mul(BLOCKS_AT_WORK).clamp(1, 1 << 16);
    let blocks = threads.div_ceil(THREADS.into()).clamp(1, at_work.into()) as u32;
    Grid::line(blocks, THREADS)
}
