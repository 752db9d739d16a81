//! The launches of `cuda/layer.cu` and `swiglu_bf16.cu`: what an MoE layer computes around its
//! dispatch and combine.
//!
//! ```text
//!   products    rows of groups x matrices of groups --> rows, or gradients of matrices
//!   swiglu      gate, up --> act;   backward: gradient of act --> of gate, of up      in f32, or between
//!               products of bf16
//!   gather      rows of chunks --> rows by (expert, source rank, token)
//!   widen, weigh, accumulate                                                          on rows of tokens
//! ```

use std::ffi::CStr;
use std::sync::Arc;

use super::sum::check_columns;
use super::{AT_WORK, Addresses, BlockLimit, Operands, VECTOR, WORD, bytes};
use crate::device::driver::Context;
use crate::device::module::{Function, Module};
use crate::device::range::{ByteSpan, DeviceRange};
use crate::device::stream::Stream;
use crate::dtype::Dtype;
use crate::error::DeviceError;

/// Made by `cuda/build.py`.
const PTX: &str = concat!(include_str!("../../../cuda/layer.ptx"), "\0");

/// Rows and columns of a tile of a product: `TILE_SIDE` in the source.
const TILE: u32 = 64;

/// Blocks of a product that a multiprocessor has at work.
const PRODUCTS_AT_WORK: u32 = 2;

/// The kernels of a layer, loaded for one device.
#[derive(Clone, Debug)]
pub struct LayerKernels {
    matmul: Function,
    swiglu: Function,
    swiglu_backward: Function,
    widen: [Function; 2],
    weigh: [Function; 3],
    accumulate: [Function; 3],
    gather: Function,
    pub(super) gate: Function,
    pub(super) narrow_weights: Function,
    pub(super) swiglu_bf16: Function,
    pub(super) swiglu_backward_bf16: Function,
    pub(super) limit: BlockLimit,
}

/// A product of matrices in f32 for each group: of rows that lie one group after another with a
/// matrix of the group.
#[derive(Clone, Copy, Debug)]
pub struct MatmulArgs<'a> {
    /// The left matrix.
    pub a: ByteSpan<'a>,
    /// The right one.
    pub b: ByteSpan<'a>,
    /// The result.
    pub out: ByteSpan<'a>,
    /// Where groups lie.
    pub shape: MatmulShape,
    /// How long the segment of each group is. Without them there is one group of all rows.
    pub segments: Option<GroupSegments<'a>>,
    /// Adds to the result that is there.
    pub add: bool,
}

/// Segments of groups, one after another: on the device for our kernel, which reads the table when
/// the stream comes to it, and on the host for libraries.
#[derive(Clone, Copy, Debug)]
pub struct GroupSegments<'a> {
    /// Both lists, `i64 [2, groups]`.
    pub table: ByteSpan<'a>,
    /// Rows of each group.
    pub rows: &'a [i64],
    /// The same with pads.
    pub padded: &'a [i64],
}

/// One group of a product.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Its number.
    pub nth: u64,
    /// Its first row.
    pub first: u32,
    /// Its rows.
    pub rows: u32,
}

/// Shapes of a product's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulShape {
    /// `out [rows, columns] = a [rows, depth] * b [groups, depth, columns]`: each row by the matrix
    /// of its group.
    Rows {
        /// Rows of all groups, with pads.
        rows: u32,
        /// Elements of a row of `a`.
        depth: u32,
        /// Elements of a row of the result.
        columns: u32,
        /// Whether each matrix of `b` lies as its transpose, `[columns, depth]`.
        transposed: bool,
        /// Elements from one matrix of `b` to the next.
        apart: u64,
    },
    /// `out [groups, rows, columns] = transposed a [depth, rows] * b [depth, columns]`: a matrix
    /// for each group, of its rows in both.
    Depth {
        /// Elements of a row of `a`.
        rows: u32,
        /// Rows of all groups, with pads.
        depth: u32,
        /// Elements of a row of `b`.
        columns: u32,
        /// Elements from one matrix of the result to the next.
        apart: u64,
    },
}

impl<'a> MatmulArgs<'a> {
    /// How many groups there are.
    fn n_groups(&self) -> u32 {
        self.segments.map_or(1, |segments| segments.rows.len() as u32)
    }

    /// All groups, by the host's lists. As in the kernel, no segment goes beyond the rows that
    /// there are, regardless of the lists.
    pub fn groups(&self) -> impl Iterator<Item = Group> + use<'a> {
        let all = match self.shape {
            MatmulShape::Rows { rows, .. } => rows,
            MatmulShape::Depth { depth, .. } => depth,
        };
        let (segments, mut first) = (self.segments, 0);
        (0..self.n_groups()).map(move |nth| {
            let left = all - first;
            let listed = |list: fn(&GroupSegments<'a>) -> &'a [i64]| {
                let segments = segments.as_ref()?;
                let size = list(segments).get(nth as usize).copied().unwrap_or(0);
                Some(u32::try_from(size.max(0)).unwrap_or(u32::MAX))
            };
            let padded = listed(|segments| segments.padded).unwrap_or(left).min(left);
            let rows = listed(|segments| segments.rows).unwrap_or(left).min(padded);
            let group = Group { nth: nth.into(), first, rows };
            first += padded;
            group
        })
    }

    /// Elements that a, b and the result must have, if they can be counted.
    pub fn elements(&self) -> [Option<u64>; 3] {
        let groups = self.n_groups();
        let matrices = |rows: u32, columns: u32, apart: u64| {
            let before = u64::from(groups.saturating_sub(1)).checked_mul(apart)?;
            before.checked_add(bytes([rows.into(), columns.into()])?)
        };
        let one = |rows: u32, columns: u32| bytes([rows.into(), columns.into()]);
        match self.shape {
            MatmulShape::Rows { rows, depth, columns, apart, .. } => {
                [one(rows, depth), matrices(depth, columns, apart), one(rows, columns)]
            }
            MatmulShape::Depth { rows, depth, columns, apart } => {
                [one(depth, rows), one(depth, columns), matrices(rows, columns, apart)]
            }
        }
    }
}

/// `struct Matmul` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct MatmulParameters {
    out: u64,
    a: u64,
    b: u64,
    segments: u64,
    b_group: u64,
    out_group: u64,
    groups: u32,
    rows: u32,
    depth: u32,
    columns: u32,
    a_row: u32,
    a_depth: u32,
    b_depth: u32,
    b_column: u32,
    along_depth: u32,
    add: u32,
}

/// Sums of a layer, rounded once: `out = rows + residual + more`, from the left.
#[derive(Clone, Copy, Debug)]
pub struct AccumulateArgs<'a> {
    /// How many elements there are: whole vectors of 16 bytes.
    pub count: u64,
    /// Type of rows, residual and result.
    pub dtype: Dtype,
    /// First term of the sum.
    pub rows: ByteSpan<'a>,
    /// Term that is added in the element type.
    pub residual: Option<ByteSpan<'a>>,
    /// Terms that are added in f32.
    pub more: [Option<ByteSpan<'a>>; 2],
    /// The result; it may be `rows`.
    pub out: ByteSpan<'a>,
}

/// `struct Accumulate` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct AccumulateParameters {
    out: u64,
    rows: u64,
    residual: u64,
    more: [u64; 2],
    count: u64,
}

/// Consecutive rows of one of several matrices, and where they go: `struct Run` of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::NoUninit)]
#[repr(C)]
pub struct GatherRun {
    /// Which matrix.
    pub matrix: u32,
    /// Its first row.
    pub first: u32,
    /// How many rows.
    pub rows: u32,
    /// Row of the result that the first goes to.
    pub to: u32,
}

const RUN: u64 = size_of::<GatherRun>() as u64;

/// Runs that a gather takes, in memory of the device.
#[derive(Clone, Debug)]
pub struct GatherRuns {
    table: DeviceRange,
    count: u32,
    /// Rows of the result.
    rows: u32,
    /// Rows that each matrix must have.
    needed: Vec<u32>,
}

impl GatherRuns {
    /// Runs that the caller has a stream write to `table`, as they lie in memory, before the first
    /// gather. No one else may write there while this value lives.
    pub fn new(runs: &[GatherRun], table: &DeviceRange) -> Self {
        let mut needed = Vec::new();
        for run in runs {
            needed.resize(needed.len().max(run.matrix as usize + 1), 0);
            let least: &mut u32 = &mut needed[run.matrix as usize];
            *least = run.first.saturating_add(run.rows).max(*least);
        }
        let rows = runs.iter().map(|run| run.to.saturating_add(run.rows)).max().unwrap_or(0);
        GatherRuns { table: table.clone(), count: runs.len() as u32, rows, needed }
    }
}

/// `struct Gather` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct GatherParameters {
    out: u64,
    matrices: u64,
    runs: u64,
    row_bytes: u64,
    n_runs: u32,
    unused: u32,
}

/// `struct Weigh` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct WeighParameters {
    out: u64,
    rows: u64,
    weights: u64,
    n_rows: u32,
    columns: u32,
}

impl LayerKernels {
    /// Has the driver compile them. It needs a driver for CUDA 12.5 or later, and a device of
    /// compute capability 8.0 or later.
    ///
    /// # Errors
    /// [`DeviceError::Module`], [`DeviceError::NoFunction`], [`DeviceError::TooOld`],
    /// [`DeviceError::Call`].
    pub fn load(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let text = CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap_or_default();
        let module = Module::load(context, "sidelane-layer", text)?;
        let each = |names: [&CStr; 3]| -> Result<[Function; 3], DeviceError> {
            let [f32, bf16, f16] = names.map(|name| module.function(name));
            Ok([f32?, bf16?, f16?])
        };
        Ok(LayerKernels {
            matmul: module.function(c"matmul")?,
            swiglu: module.function(c"swiglu")?,
            swiglu_backward: module.function(c"swiglu_backward")?,
            widen: [module.function(c"widen_bf16")?, module.function(c"widen_f16")?],
            weigh: each([c"weigh_f32", c"weigh_bf16", c"weigh_f16"])?,
            accumulate: each([c"accumulate_f32", c"accumulate_bf16", c"accumulate_f16"])?,
            gather: module.function(c"gather")?,
            gate: module.function(c"gate")?,
            narrow_weights: module.function(c"narrow_weights")?,
            swiglu_bf16: module.function(c"swiglu_bf16")?,
            swiglu_backward_bf16: module.function(c"swiglu_backward_bf16")?,
            limit: BlockLimit::default(),
        })
    }

    /// The same kernels with a limit on blocks, as
    /// [`Kernels::max_blocks`](super::Kernels::max_blocks).
    pub fn max_blocks(self, blocks: Option<u32>) -> Self {
        LayerKernels { limit: BlockLimit(blocks), ..self }
    }

    /// Enqueues a product: to the bit the host's [`product`](crate::rows::product) of each group,
    /// where the host has fused multiply-adds and a result has at least two columns.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Misaligned`], [`DeviceError::NoAccess`],
    /// [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn matmul(&self, stream: &Stream, matmul: &MatmulArgs<'_>) -> Result<(), DeviceError> {
        let MatmulArgs { a, b, out, shape, segments, add } = *matmul;
        let groups = matmul.n_groups();
        let (rows, depth, columns, tiles) = match shape {
            MatmulShape::Rows { rows, depth, columns, .. } => {
                (rows, depth, columns, u64::from(rows.div_ceil(TILE)) + u64::from(groups))
            }
            MatmulShape::Depth { rows, depth, columns, .. } => {
                (rows, depth, columns, u64::from(rows.div_ceil(TILE)) * u64::from(groups))
            }
        };
        if rows == 0 || columns == 0 || groups == 0 {
            return Ok(());
        }
        let mut operands = Operands::of("matmul", stream);
        let words = |elements: Option<u64>| elements?.checked_mul(WORD);
        let [of_a, of_b, of_out] = matmul.elements().map(words);
        let table = segments.map(|segments| segments.table);
        let (out, a, b, segments) = (
            operands.span("out", out, of_out, WORD)?,
            operands.span("a", a, of_a, WORD)?,
            operands.span("b", b, of_b, WORD)?,
            operands.optional("segments", table, bytes([2, groups.into(), 8]), 8)?,
        );
        let common = MatmulParameters {
            out,
            a,
            b,
            segments,
            b_group: 0,
            out_group: 0,
            groups,
            rows,
            depth,
            columns,
            a_row: depth,
            a_depth: 1,
            b_depth: columns,
            b_column: 1,
            along_depth: 0,
            add: add.into(),
        };
        let parameters = match shape {
            MatmulShape::Rows { transposed: false, apart, .. } => {
                MatmulParameters { b_group: apart, ..common }
            }
            MatmulShape::Rows { transposed: true, apart, .. } => {
                MatmulParameters { b_group: apart, b_depth: 1, b_column: depth, ..common }
            }
            MatmulShape::Depth { apart, .. } => {
                MatmulParameters { out_group: apart, a_row: 1, a_depth: rows, along_depth: 1, ..common }
            }
        };
        let tiles = tiles.saturating_mul(columns.div_ceil(TILE).into());
        let grid = self.limit.line(stream, tiles, PRODUCTS_AT_WORK);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // it goes to no row behind the last, for any table of segments.
        unsafe { self.matmul.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues `act = silu(gate) * up`, all f32 and of one length.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    pub fn swiglu(&self, stream: &Stream, count: u64, all: [ByteSpan<'_>; 3]) -> Result<(), DeviceError> {
        self.activation(&self.swiglu, "swiglu", stream, count, all)
    }

    /// Enqueues its gradient: `act` has the gradients of what was made, and afterwards what was
    /// made. Those of `gate` and `up` take their places.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    pub fn swiglu_backward(
        &self,
        stream: &Stream,
        count: u64,
        all: [ByteSpan<'_>; 3],
    ) -> Result<(), DeviceError> {
        self.activation(&self.swiglu_backward, "swiglu_backward", stream, count, all)
    }

    fn activation(
        &self,
        function: &Function,
        kernel: &'static str,
        stream: &Stream,
        count: u64,
        [gate, up, act]: [ByteSpan<'_>; 3],
    ) -> Result<(), DeviceError> {
        let mut operands = Operands::of(kernel, stream);
        let needed = bytes([count, WORD]);
        let parameters = [
            operands.span("gate", gate, needed, WORD)?,
            operands.span("up", up, needed, WORD)?,
            operands.span("act", act, needed, WORD)?,
            count,
        ];
        let grid = self.limit.threads(stream, count);
        // SAFETY: the struct of both sources has these words. The kernels stay inside the checked
        // memory, elements below `count`.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues `out = rows` in f32, exactly: whole vectors of 16 bytes.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul); [`DeviceError::NoSum`] for a type that is no half.
    pub fn widen(
        &self,
        stream: &Stream,
        (count, dtype): (u64, Dtype),
        [rows, out]: [ByteSpan<'_>; 2],
    ) -> Result<(), DeviceError> {
        let function = match dtype {
            Dtype::Bf16 => &self.widen[0],
            Dtype::F16 => &self.widen[1],
            _ => return Err(DeviceError::NoSum { rows: dtype, out: Dtype::F32 }),
        };
        let mut operands = Operands::of("widen", stream);
        let parameters = [
            operands.span("out", out, bytes([count, WORD]), VECTOR)?,
            operands.span("rows", rows, bytes([count, dtype.size() as u64]), VECTOR)?,
            count,
        ];
        let grid = self.limit.threads(stream, count * dtype.size() as u64 / VECTOR);
        // SAFETY: the struct of the source has these words. The kernel stays inside the checked
        // memory: whole vectors below `count`.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues `out [rows, columns] = weights [rows] * rows [rows, columns]` in f32, rounded to
    /// elements; without weights `rows` alone.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul); [`DeviceError::NoSum`], [`DeviceError::Shape`].
    pub fn weigh(
        &self,
        stream: &Stream,
        ([n_rows, columns], dtype): ([u32; 2], Dtype),
        [rows, out]: [ByteSpan<'_>; 2],
        weights: Option<ByteSpan<'_>>,
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = "weigh";
        let function = &self.weigh[of(dtype)?];
        check_columns(KERNEL, columns, dtype)?;
        let all = |size: u64| bytes([n_rows.into(), columns.into(), size]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = WeighParameters {
            out: operands.span("out", out, all(dtype.size() as u64), VECTOR)?,
            rows: operands.span("rows", rows, all(WORD), VECTOR)?,
            weights: operands.optional("weights", weights, bytes([n_rows.into(), WORD]), WORD)?,
            n_rows,
            columns,
        };
        let grid =
            self.limit.threads(stream, u64::from(n_rows) * u64::from(columns) * dtype.size() as u64 / VECTOR);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // rows below `n_rows`, of whole vectors below `columns`.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues a sum.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul); [`DeviceError::NoSum`], [`DeviceError::Shape`].
    pub fn accumulate(&self, stream: &Stream, sum: &AccumulateArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "accumulate";
        let AccumulateArgs { count, dtype, rows, residual, more, out } = *sum;
        let function = &self.accumulate[of(dtype)?];
        let elements = VECTOR / dtype.size() as u64;
        if !count.is_multiple_of(elements) {
            let expected = "whole vectors of 16 bytes";
            return Err(DeviceError::Shape { kernel: KERNEL, what: "elements", given: count, expected });
        }
        let mut operands = Operands::of(KERNEL, stream);
        let (all, wide) = (bytes([count, dtype.size() as u64]), bytes([count, WORD]));
        let parameters = AccumulateParameters {
            out: operands.span("out", out, all, VECTOR)?,
            rows: operands.span("rows", rows, all, VECTOR)?,
            residual: operands.optional("residual", residual, all, VECTOR)?,
            more: [
                operands.optional("more", more[0], wide, VECTOR)?,
                operands.optional("more", more[1], wide, VECTOR)?,
            ],
            count,
        };
        let grid = self.limit.threads(stream, count / elements);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // whole vectors below `count`.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues the copy of runs of rows, of so many bytes each, from several matrices into one.
    /// `table` has room for the addresses of the matrices, eight bytes each.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul); [`Addresses::new`]; [`DeviceError::Shape`] for rows of an odd
    /// number of bytes.
    pub fn gather(
        &self,
        stream: &Stream,
        (runs, row_bytes): (&GatherRuns, u64),
        matrices: &[ByteSpan<'_>],
        table: &DeviceRange,
        out: ByteSpan<'_>,
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = "gather";
        if runs.count == 0 {
            return Ok(());
        }
        if !row_bytes.is_multiple_of(2) {
            let (what, expected) = ("bytes of a row", "whole elements of two bytes");
            return Err(DeviceError::Shape { kernel: KERNEL, what, given: row_bytes, expected });
        }
        let of_rows = |rows: u32| bytes([rows.into(), row_bytes]);
        for (nth, &rows) in runs.needed.iter().enumerate() {
            let given = matrices.get(nth).map_or(0, |matrix| matrix.len);
            if of_rows(rows).is_none_or(|needed| needed > given) {
                let needed = of_rows(rows).unwrap_or(u64::MAX);
                return Err(DeviceError::TooSmall { kernel: KERNEL, what: "matrices", given, needed });
            }
        }
        let addresses = Addresses::new(stream, table, matrices)?;
        let mut operands = Operands::of(KERNEL, stream);
        let listed = runs.table.span(0, runs.table.len())?;
        let parameters = GatherParameters {
            out: operands.span("out", out, of_rows(runs.rows), 2)?,
            matrices: operands.addresses("matrices", &addresses, Some(0))?,
            runs: operands.span("runs", listed, bytes([runs.count.into(), RUN]), WORD)?,
            row_bytes,
            n_runs: runs.count,
            unused: 0,
        };
        let grid = self.limit.line(stream, runs.count.into(), AT_WORK);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // every run was compared with its matrix and with the result.
        unsafe { self.gather.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Which of the kernels for each type.
fn of(dtype: Dtype) -> Result<usize, DeviceError> {
    match dtype {
        Dtype::F32 => Ok(0),
        Dtype::Bf16 => Ok(1),
        Dtype::F16 => Ok(2),
        _ => Err(DeviceError::NoSum { rows: dtype, out: dtype }),
    }
}

/// Bytes of an element of bf16.
const HALF: u64 = 2;

/// Warps of a block: `WARPS` in `cuda/shim.h`.
const WARPS: u64 = 8;

/// Rows between the products of SwiGLU experts, in bf16.
#[derive(Clone, Copy, Debug)]
pub struct SwigluRows<'a> {
    /// Rows of all experts, with pads.
    pub rows: u32,
    /// Elements of gate, of up, and of what is made of them.
    pub ffn: u32,
    /// Gate and up side by side, `[rows, 2 * ffn]`.
    pub inner: ByteSpan<'a>,
    /// Activations, `[rows, ffn]`.
    pub act: ByteSpan<'a>,
    /// Routing weights, `f32 [rows]`; without them all are 1.
    pub weights: Option<ByteSpan<'a>>,
}

/// `struct SwigluBf16` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct SwigluParameters {
    inner: u64,
    act: u64,
    weights: u64,
    of_weights: u64,
    rows: u32,
    ffn: u32,
}

/// `struct NarrowWeights` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct NarrowParameters {
    out: u64,
    weights: u64,
    experts: u32,
    hidden: u32,
    ffn: u32,
    unused: u32,
}

impl LayerKernels {
    /// Enqueues weights of experts in bf16, `[experts, 3 * hidden * ffn]`, from those in f32: the
    /// rows of gate and up side by side, `[hidden, 2 * ffn]`, then down as it lies.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul); [`DeviceError::Shape`] for more rows of matrices than `u32`
    /// counts.
    pub fn narrow_weights(
        &self,
        stream: &Stream,
        [experts, hidden, ffn]: [u32; 3],
        [weights, out]: [ByteSpan<'_>; 2],
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = "narrow_weights";
        let rows = u64::from(experts) * (u64::from(hidden) + u64::from(ffn));
        if rows > u32::MAX.into() || ffn > i32::MAX as u32 {
            let (what, expected) = ("rows of matrices", "at most 4294967295");
            return Err(DeviceError::Shape { kernel: KERNEL, what, given: rows, expected });
        }
        let all = |size: u64| bytes([experts.into(), 3, hidden.into(), ffn.into(), size]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = NarrowParameters {
            out: operands.span("out", out, all(HALF), VECTOR)?,
            weights: operands.span("weights", weights, all(WORD), VECTOR)?,
            experts,
            hidden,
            ffn,
            unused: 0,
        };
        let grid = self.limit.line(stream, rows, AT_WORK);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // rows of matrices below `experts`.
        unsafe { self.narrow_weights.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues `act = weights * silu(gate) * up`.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    pub fn swiglu_bf16(&self, stream: &Stream, rows: &SwigluRows<'_>) -> Result<(), DeviceError> {
        if rows.ffn == 0 {
            return Ok(());
        }
        let mut operands = Operands::of("swiglu_bf16", stream);
        let parameters = rows.parameters(&mut operands)?;
        let grid = self.limit.threads(stream, u64::from(rows.rows) * u64::from(rows.ffn) * HALF / VECTOR);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // elements below `ffn` of rows below `rows`.
        unsafe { self.swiglu_bf16.launch_struct(stream, operands.held(), grid, &parameters) }
    }

    /// Enqueues its gradient. `act` has those of what was made, as if all weights were 1, and
    /// afterwards what was made. Those of gate and up take their places, and those of the weights
    /// go to `of_weights`, `f32 [rows]`, if it is given.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    pub fn swiglu_backward_bf16(
        &self,
        stream: &Stream,
        rows: &SwigluRows<'_>,
        of_weights: Option<ByteSpan<'_>>,
    ) -> Result<(), DeviceError> {
        let mut operands = Operands::of("swiglu_backward_bf16", stream);
        let needed = bytes([rows.rows.into(), WORD]);
        let of_weights = operands.optional("of_weights", of_weights, needed, WORD)?;
        let parameters = SwigluParameters { of_weights, ..rows.parameters(&mut operands)? };
        let grid = self.limit.line(stream, u64::from(rows.rows).div_ceil(WARPS), AT_WORK);
        // SAFETY: as above; gradients of weights are of rows below `rows`.
        unsafe { self.swiglu_backward_bf16.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

impl SwigluRows<'_> {
    fn parameters(&self, operands: &mut Operands<'_>) -> Result<SwigluParameters, DeviceError> {
        let SwigluRows { rows, ffn, inner, act, weights } = *self;
        let [count, width] = [rows.into(), ffn.into()];
        Ok(SwigluParameters {
            inner: operands.span("inner", inner, bytes([2, count, width, HALF]), HALF)?,
            act: operands.span("act", act, bytes([count, width, HALF]), HALF)?,
            weights: operands.optional("weights", weights, bytes([count, WORD]), WORD)?,
            of_weights: 0,
            rows,
            ffn,
        })
    }
}
