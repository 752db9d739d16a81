//! Launches of kernels that sum rows, and their gradients: `cuda/sum.cu`, `sum_choices.cu`,
//! `rank_sums.cu` and `gradients.cu`.
//!
//! ```text
//!   sum            a row of each rank, in ascending order --> a row for each token
//!   sum_choices    rows of choices, weighted --> partial rows, or a row for each token
//!   rank_sums      rows of a token at the rank of its experts --> one row that returns
//!   dot_scale      rows, gradients --> gradients of weights, gradients of rows
//!   fetch_weights  words behind received rows --> weights of choices
//! ```
//!
//! A block sums a token and a part of its row, and then others.

use std::sync::Arc;

use super::{AT_WORK, Addresses, Kernels, Operands, THREADS, VECTOR, WORD, blocks_at_work, bytes};
use crate::device::module::{Function, Grid, Module};
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::dtype::{Dtype, PartialDtype};
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
    pub returned_rows: &'a Addresses,
    /// Places that [`Kernels::pack`] wrote, `i32 [tokens, ranks]`.
    pub places: ByteSpan<'a>,
    /// Where a fault is written, a [`KernelFault`](crate::error::KernelFault). If it is not 0,
    /// results are zeros.
    pub status: Word<'a, u32>,
    /// Where ranks refuse to combine, if they can.
    pub marks: Option<RefusalMarks<'a>>,
    /// Results, `[tokens, columns]`, at a multiple of 16 bytes.
    pub out: ByteSpan<'a>,
}

/// Marks by which ranks refuse to combine.
#[derive(Clone, Copy, Debug)]
pub struct RefusalMarks<'a> {
    /// Of each rank, the last call that it refused, `u64 [ranks, 2]`, of which the second is
    /// unused.
    pub marks: ByteSpan<'a>,
    /// This call: the word that [`Kernels::pack`] counts in.
    pub counter: Word<'a, u64>,
    /// This rank, whose own refusal is its verdict. Of others it is that of the lowest rank.
    pub rank: u32,
    /// Where it is written that a rank refuses the call: as [`Kernels::check`] does. The status of
    /// the sum is the lower half of this word.
    pub verdict: Word<'a, u64>,
    /// The lasting verdict, which is that of every call: a failed world, or a fault.
    pub lasting: Word<'a, u32>,
}

/// `struct Sum` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct SumParameters {
    out: u64,
    returned_rows: u64,
    places: u64,
    status: u64,
    marks: u64,
    counter: u64,
    verdict: u64,
    lasting: u64,
    tokens: u32,
    max_tokens: u32,
    ranks: u32,
    columns: u32,
    rank: u32,
    unused: u32,
}

/// A kernel for each pair of types.
#[derive(Clone, Debug)]
pub(super) struct SumFunctions {
    f32: Function,
    bf16: Function,
    f16: Function,
    f32_to_bf16: Function,
    f32_to_f16: Function,
}

impl SumFunctions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(SumFunctions {
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
    /// If the status word is set, or a mark says that a rank refuses this call, all results are
    /// zeros.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`], [`DeviceError::TooSmall`], [`DeviceError::Shape`],
    /// [`DeviceError::Misaligned`], [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`],
    /// [`DeviceError::Call`].
    pub fn sum(&self, stream: &Stream, sum: &SumArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "sum";
        let function = self.sums.for_types(sum.rows, sum.dtype)?;
        let (shape, ranks) = (sum.shape, sum.returned_rows.count);
        let refuse =
            |what, given, expected| Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
        if sum.tokens > shape.max_tokens() {
            return refuse("tokens", sum.tokens.into(), "at most the tokens of a slot");
        }
        check_columns(KERNEL, sum.columns, sum.dtype)?;
        let (tokens, columns) = (u64::from(sum.tokens), u64::from(sum.columns));
        let returned = bytes([shape.max_tokens().into(), columns, sum.rows.size() as u64]);
        let mut operands = Operands::of(KERNEL, stream);
        let (marks, [counter, verdict, lasting], rank) = match sum.marks {
            Some(RefusalMarks { rank, .. }) if rank >= ranks => {
                return refuse("rank", rank.into(), "one of the ranks");
            }
            Some(RefusalMarks { marks, counter, rank, verdict, lasting }) => {
                let marks = operands.span("marks", marks, bytes([ranks.into(), 2 * WORD, 2]), VECTOR)?;
                let words = [operands.word(counter)?, operands.word(verdict)?, operands.word(lasting)?];
                (marks, words, rank)
            }
            None => (0, [0; 3], 0),
        };
        let parameters = SumParameters {
            out: operands.span("out", sum.out, bytes([tokens, columns, sum.dtype.size() as u64]), VECTOR)?,
            returned_rows: operands.addresses("returned_rows", sum.returned_rows, returned)?,
            places: operands.span("places", sum.places, bytes([tokens, ranks.into(), WORD]), WORD)?,
            status: operands.word(sum.status)?,
            marks,
            counter,
            verdict,
            lasting,
            tokens: sum.tokens,
            max_tokens: shape.max_tokens(),
            ranks,
            columns: sum.columns,
            rank,
            unused: 0,
        };
        let grid = self.token_grid(stream, sum.tokens, sum.columns, sum.dtype);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, columns below `columns`, ranks below `ranks`, and every place is
        // compared before it is used.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Rows that a rank made itself, and reads where it made them: as many as these.
#[derive(Clone, Copy, Debug)]
pub struct OwnRows<'a> {
    /// The rows, at a multiple of 16 bytes.
    pub rows: ByteSpan<'a>,
    /// How many there are.
    pub count: u32,
}

impl OwnRows<'_> {
    /// Address and number of own rows of `row_bytes` bytes, if there are any, behind `n_rows`
    /// others.
    fn checked(
        own: Option<Self>,
        operands: &mut Operands<'_>,
        (kernel, n_rows): (&'static str, u32),
        (row_bytes, align): (Option<u64>, u64),
    ) -> Result<(u64, u32), DeviceError> {
        let Some(OwnRows { rows, count }) = own else { return Ok((0, 0)) };
        if u64::from(n_rows) + u64::from(count) > i32::MAX as u64 {
            let expected = "less than 2^31, with the others";
            return Err(DeviceError::Shape { kernel, what: "own rows", given: count.into(), expected });
        }
        let needed = row_bytes.and_then(|row| row.checked_mul(count.into()));
        Ok((operands.span("own rows", rows, needed, align)?, count))
    }
}

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
    /// Rows that lie elsewhere, which an index counts on behind those.
    pub own: Option<OwnRows<'a>>,
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
struct SumChoicesParameters {
    out: u64,
    rows: u64,
    own: u64,
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
    own_rows: u32,
    unused: u32,
}

/// A kernel for each type.
#[derive(Clone, Debug)]
pub(super) struct SumChoicesFunctions {
    f32: Function,
    bf16: Function,
    f16: Function,
    bf16_to_f32: Function,
    f16_to_f32: Function,
}

impl SumChoicesFunctions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(SumChoicesFunctions {
            f32: module.function(c"sum_choices_f32")?,
            bf16: module.function(c"sum_choices_bf16")?,
            f16: module.function(c"sum_choices_f16")?,
            bf16_to_f32: module.function(c"sum_choices_bf16_to_f32")?,
            f16_to_f32: module.function(c"sum_choices_f16_to_f32")?,
        })
    }
}

impl Kernels {
    /// The kernel of [`Kernels::sum_choices`] for rows of this type, for reports.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`].
    pub fn sum_choices_name(dtype: Dtype) -> Result<&'static str, DeviceError> {
        match dtype {
            Dtype::F32 => Ok("sum_choices_f32"),
            Dtype::Bf16 => Ok("sum_choices_bf16"),
            Dtype::F16 => Ok("sum_choices_f16"),
            _ => Err(DeviceError::NoSum { rows: dtype, out: dtype }),
        }
    }

    /// The kernel of [`Kernels::sum_choices_to_f32`], likewise.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`].
    pub fn sum_choices_to_f32_name(dtype: Dtype) -> Result<&'static str, DeviceError> {
        match dtype {
            Dtype::Bf16 => Ok("sum_choices_bf16_to_f32"),
            Dtype::F16 => Ok("sum_choices_f16_to_f32"),
            _ => Self::sum_choices_name(dtype),
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
        check_columns(KERNEL, sum.columns, dtype)?;
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
        let sizes = ((KERNEL, sum.n_rows), (Some(row_bytes), VECTOR));
        let (own, own_rows) = OwnRows::checked(sum.own, &mut operands, sizes.0, sizes.1)?;
        let parameters = SumChoicesParameters {
            out: operands.span("out", sum.out, results, VECTOR)?,
            rows: operands.span("rows", sum.rows, bytes([sum.n_rows.into(), row_bytes]), VECTOR)?,
            own,
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
            own_rows,
            unused: 0,
        };
        let grid = self.token_grid(stream, sum.tokens, sum.columns, dtype);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, columns below `columns`, and every expert and index is compared
        // before it is used.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// A block for each token and part of a row, or as many as the device runs at once; one if
    /// there are no tokens.
    fn token_grid(&self, stream: &Stream, tokens: u32, columns: u32, out: Dtype) -> Grid {
        let across = (columns / elements(out)).div_ceil(THREADS).clamp(1, 1 << 15);
        let down = tokens.min(blocks_at_work(stream, AT_WORK).div_ceil(across)).max(1);
        self.limit.grid([down, across])
    }
}

/// Elements of a vector of 16 bytes.
fn elements(dtype: Dtype) -> u32 {
    (VECTOR / dtype.size() as u64) as u32
}

/// Refuses rows that are not whole vectors of results, or too long to count in.
pub(super) fn check_columns(kernel: &'static str, columns: u32, out: Dtype) -> Result<(), DeviceError> {
    if columns == 0 || !columns.is_multiple_of(elements(out)) || columns >= 1 << 30 {
        let expected = "whole vectors of 16 bytes, and less than 2^30";
        return Err(DeviceError::Shape { kernel, what: "columns", given: columns.into(), expected });
    }
    Ok(())
}

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
    /// Rows that lie elsewhere, which an index counts on behind those.
    pub own: Option<OwnRows<'a>>,
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
    own: u64,
    index: u64,
    status: u64,
    choices: u32,
    n_rows: u32,
    words: u32,
    own_rows: u32,
}

/// A kernel of products for each type, and the one that fetches.
#[derive(Clone, Debug)]
pub(super) struct GradientFunctions {
    f32: Function,
    bf16: Function,
    f16: Function,
    fetch: Function,
}

impl GradientFunctions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(GradientFunctions {
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
            _ => return Err(DeviceError::NoSum { rows: dtype, out: dtype }),
        };
        check_columns(KERNEL, columns, dtype)?;
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
        let grid = self.limit.threads(stream, threads);
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
        let sizes = ((KERNEL, n_rows), (bytes([of_row.into(), WORD]), WORD));
        let (own, own_rows) = OwnRows::checked(fetch.own, &mut operands, sizes.0, sizes.1)?;
        let parameters = FetchWeightsParameters {
            out: operands.span("out", fetch.out, words(choices), WORD)?,
            from: operands.span("from", fetch.from, all, WORD)?,
            own,
            index: operands.span("index", fetch.index, words(choices), WORD)?,
            status: operands.word(fetch.status)?,
            choices,
            n_rows,
            words: of_row,
            own_rows,
        };
        let grid = self.limit.threads(stream, choices.into());
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // choices below `choices`, and every index is compared with the number of rows before it is
        // used.
        unsafe { self.gradients.fetch.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

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
    /// The kernel by which ranks sum a token's rows before these return, for reports.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`].
    pub fn rank_sums_name(dtype: Dtype) -> Result<&'static str, DeviceError> {
        match dtype {
            Dtype::F32 => Ok("rank_sums_f32"),
            Dtype::Bf16 => Ok("rank_sums_bf16"),
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
