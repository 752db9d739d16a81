//! SwiGLU on a device, in f32 or with factors of bf16.
//!
//! In f32 the products and sums are those of [`GroupedSwiGlu`](crate::layer::GroupedSwiGlu), in its
//! order. With factors of bf16, products run on tensor cores, and everything between two roundings
//! is f32:
//!
//! ```text
//!   g|u = x w1|w3 ->    a = weight * silu(g) u ->    y = a w2 ->       -> : rounded to bf16
//!
//!   da = dy w2' ->      of the weight = <da, silu(g) u>
//!   d = weight * da     dg, du as in f32, by d ->    a again ->        dx = dg|du (w1|w3)' ->
//!   dw1 = x' dg         dw3 = x' du                  dw2 = a' dy       all three in f32
//! ```
//!
//! Gate and up of a row lie side by side, and so do their weights: one product makes both, and one
//! the gradient of `x`, with a single sum and rounding. A routing weight is a factor of `a`. So the
//! last product writes rows that are weighted, to where peers read them, and neither outputs nor a
//! pass over them are left: the gradient of a routing weight is by `da`.
//!
//! | held | bytes of a row |
//! |---|---|
//! | from forward to `rows_backward` | `4 ffn` (g, u) |
//! | from there to `weights_backward` | `6 ffn` (dg, du, a) |

use std::sync::Arc;

use super::device_experts::{Compute, DeviceSegments, Differentials, HiddenGradients, Sizes};
use super::device_memory::{DeviceTensor, from};
use crate::device::{Bf16Product, Blas, ByteSpan, Columns, DeviceRange, MatmulArgs, MatmulShape, SwigluRows};
use crate::dtype::Dtype;
use crate::error::DeviceError;

/// Weights of each expert: `w1` and `w3` are `[hidden, ffn]`, `w2` is `[ffn, hidden]`.
#[derive(Clone, Copy)]
pub(super) struct F32Weights<'a> {
    pub values: &'a DeviceRange,
    pub sizes: Sizes,
}

/// Tensors that a forward pass keeps of a chunk, `[rows, ffn]` each.
#[derive(Debug)]
pub(super) struct F32Saved {
    gate: DeviceTensor,
    up: DeviceTensor,
}

/// The three matrices of an expert, in their order.
#[derive(Clone, Copy)]
pub(super) enum F32Matrix {
    Gate,
    Up,
    Down,
}

/// The matrix that rows are multiplied with, and whether the result is added to the output.
#[derive(Clone, Copy)]
struct F32Factor {
    matrix: F32Matrix,
    transposed: bool,
    add: bool,
}

impl F32Matrix {
    /// Where the matrix of the first expert begins among the weights, in bytes of f32.
    pub fn offset(self, sizes: Sizes) -> u64 {
        self as u64 * sizes.matrix() * 4
    }

    /// The matrix itself.
    fn plain(self) -> F32Factor {
        F32Factor { matrix: self, transposed: false, add: false }
    }

    fn transposed(self) -> F32Factor {
        F32Factor { transposed: true, ..self.plain() }
    }
}

impl F32Factor {
    fn added(self) -> F32Factor {
        F32Factor { add: true, ..self }
    }
}

impl F32Weights<'_> {
    /// Outputs, f32 `[rows, hidden]`.
    pub fn forward(
        self,
        on: &Compute,
        rows: DeviceSegments<'_>,
    ) -> Result<(DeviceTensor, F32Saved), DeviceError> {
        let inner = || on.memory.words(rows.rows as usize * self.sizes.ffn as usize);
        let (gate, up, act) = (inner()?, inner()?, inner()?);
        self.product(on, rows, (rows.values, gate.span()?), F32Matrix::Gate.plain())?;
        self.product(on, rows, (rows.values, up.span()?), F32Matrix::Up.plain())?;
        let all = [gate.span()?, up.span()?, act.span()?];
        on.kernels.swiglu(&on.stream, self.inner(rows.rows), all)?;
        let outputs = on.memory.words(rows.rows as usize * self.sizes.hidden as usize)?;
        self.product(on, rows, (act.span()?, outputs.span()?), F32Matrix::Down.plain())?;
        Ok((outputs, F32Saved { gate, up }))
    }

    /// Gradients of the rows, f32 `[rows, hidden]`, from those of the outputs.
    pub fn backward(
        self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        F32Saved { gate, up }: F32Saved,
        of_outputs: ByteSpan<'_>,
    ) -> Result<(DeviceTensor, Differentials), DeviceError> {
        let act = on.memory.words(rows.rows as usize * self.sizes.ffn as usize)?;
        let of_rows = on.memory.words(rows.rows as usize * self.sizes.hidden as usize)?;
        self.product(on, rows, (of_outputs, act.span()?), F32Matrix::Down.transposed())?;
        let all = [gate.span()?, up.span()?, act.span()?];
        on.kernels.swiglu_backward(&on.stream, self.inner(rows.rows), all)?;
        self.product(on, rows, (gate.span()?, of_rows.span()?), F32Matrix::Gate.transposed())?;
        self.product(on, rows, (up.span()?, of_rows.span()?), F32Matrix::Up.transposed().added())?;
        Ok((of_rows, Differentials { inner: HiddenGradients::Apart([gate, up]), act }))
    }

    /// Rows times a matrix of their expert, or its transpose.
    fn product(
        self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        (a, out): (ByteSpan<'_>, ByteSpan<'_>),
        F32Factor { matrix, transposed, add }: F32Factor,
    ) -> Result<(), DeviceError> {
        let Sizes { hidden, ffn, .. } = self.sizes;
        let (taken, made) = match matrix {
            F32Matrix::Gate | F32Matrix::Up => (hidden, ffn),
            F32Matrix::Down => (ffn, hidden),
        };
        let (depth, columns) = if transposed { (made, taken) } else { (taken, made) };
        let b = from(self.values, matrix.offset(self.sizes))?;
        let apart = self.sizes.apart();
        let shape = MatmulShape::Rows { rows: rows.rows, depth, columns, transposed, apart };
        on.expert_product(&MatmulArgs { a, b, out, shape, segments: rows.counts, add })
    }

    fn inner(self, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.sizes.ffn)
    }
}

/// Bytes of an element.
const HALF: u64 = 2;

/// Weights of each expert, `w1 | w3` as `[hidden, 2 * ffn]` and `w2`, and what multiplies by them.
#[derive(Debug)]
pub(super) struct Bf16Weights {
    pub values: DeviceRange,
    pub sizes: Sizes,
    pub blas: Arc<Blas>,
}

/// Tensors that a forward pass keeps of a chunk: gate and up, `[rows, 2 * ffn]`.
#[derive(Debug)]
pub(super) struct Bf16Saved {
    inner: DeviceTensor,
    weights: Arc<Bf16Weights>,
}

/// The two matrices of an expert.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bf16Matrix {
    GateUp,
    Down,
}

/// The matrix that rows are multiplied with.
#[derive(Clone, Copy)]
struct Bf16Factor {
    matrix: Bf16Matrix,
    transposed: bool,
}

/// Where a product is written, and in which type.
pub(super) type Out<'a> = (ByteSpan<'a>, Dtype);

impl Bf16Weights {
    /// Has outputs written to `out`, times the routing weights.
    pub fn forward(
        self: &Arc<Self>,
        on: &Compute,
        rows: DeviceSegments<'_>,
        weights: Option<ByteSpan<'_>>,
        out: Out<'_>,
    ) -> Result<Bf16Saved, DeviceError> {
        let [inner, act] = [2, 1].map(|of| on.memory.take(of * self.row_bytes() * u64::from(rows.rows)));
        let (inner, act) = (inner?, act?);
        let plain = |matrix| Bf16Factor { matrix, transposed: false };
        self.product(on, rows, (rows.values, (inner.span()?, Dtype::Bf16)), plain(Bf16Matrix::GateUp))?;
        let between = self.between(rows.rows, [inner.span()?, act.span()?], weights);
        on.kernels.swiglu_bf16(&on.stream, &between)?;
        self.product(on, rows, (act.span()?, out), plain(Bf16Matrix::Down))?;
        Ok(Bf16Saved { inner, weights: Arc::clone(self) })
    }

    /// Rows times a matrix of their expert, or its transpose.
    fn product(
        &self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        (a, (out, dtype)): (ByteSpan<'_>, Out<'_>),
        Bf16Factor { matrix, transposed }: Bf16Factor,
    ) -> Result<(), DeviceError> {
        let Sizes { hidden, ffn, .. } = self.sizes;
        let (taken, made, offset) = match matrix {
            Bf16Matrix::GateUp => (hidden, ffn.saturating_mul(2), 0),
            Bf16Matrix::Down => (ffn, hidden, 2 * self.sizes.matrix() * HALF),
        };
        let (depth, columns) = if transposed { (made, taken) } else { (taken, made) };
        let b = from(&self.values, offset)?;
        let apart = self.sizes.apart();
        let shape = MatmulShape::Rows { rows: rows.rows, depth, columns, transposed, apart };
        let matmul = MatmulArgs { a, b, out, shape, segments: rows.counts, add: false };
        self.blas.matmul_bf16(&on.kernels, &Bf16Product { matmul, b_columns: None, out: dtype })
    }

    /// A product of rows with rows, such as a gradient of the weights, in f32.
    pub fn product_to_f32(
        &self,
        on: &Compute,
        matmul: MatmulArgs<'_>,
        b_columns: Option<Columns>,
    ) -> Result<(), DeviceError> {
        self.blas.matmul_bf16(&on.kernels, &Bf16Product { matmul, b_columns, out: Dtype::F32 })
    }

    fn between<'a>(
        &self,
        rows: u32,
        [inner, act]: [ByteSpan<'a>; 2],
        weights: Option<ByteSpan<'a>>,
    ) -> SwigluRows<'a> {
        SwigluRows { rows, ffn: self.sizes.ffn, inner, act, weights }
    }

    /// Bytes of a row of what is between the products.
    fn row_bytes(&self) -> u64 {
        u64::from(self.sizes.ffn) * HALF
    }
}

impl Bf16Saved {
    /// Has gradients of the rows written to `out`, from those of the outputs, and those of the
    /// routing weights, if there are any, to the second of `weights`.
    pub fn backward(
        self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        weights: Option<[ByteSpan<'_>; 2]>,
        (of_outputs, out): (ByteSpan<'_>, Out<'_>),
    ) -> Result<Differentials, DeviceError> {
        let Bf16Saved { inner, weights: by } = self;
        let act = on.memory.take(by.row_bytes() * u64::from(rows.rows))?;
        let transposed = |matrix| Bf16Factor { matrix, transposed: true };
        let (routing, of_routing) = weights.map(<(_, _)>::from).unzip();
        by.product(on, rows, (of_outputs, (act.span()?, Dtype::Bf16)), transposed(Bf16Matrix::Down))?;
        let between = by.between(rows.rows, [inner.span()?, act.span()?], routing);
        on.kernels.swiglu_backward_bf16(&on.stream, &between, of_routing)?;
        by.product(on, rows, (inner.span()?, out), transposed(Bf16Matrix::GateUp))?;
        Ok(Differentials { inner: HiddenGradients::Joined(inner), act })
    }
}
