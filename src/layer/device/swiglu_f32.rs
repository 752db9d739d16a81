//! SwiGLU in f32, with the products and sums of [`GroupedSwiGlu`](crate::layer::GroupedSwiGlu), in
//! its order.

use super::chunk_rows::{DeviceSegments, Differentials, Inner};
use super::device_memory::{DeviceTensor, from};
use super::expert_products::Compute;
use super::weights::Sizes;
use crate::device::{ByteSpan, DeviceRange, MatmulArgs, MatmulShape};
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
pub(super) enum Which {
    Gate,
    Up,
    Down,
}

/// The matrix that rows are multiplied with, and whether the result is added to the output.
#[derive(Clone, Copy)]
struct Factor {
    which: Which,
    transposed: bool,
    add: bool,
}

impl Which {
    /// Where the matrix of the first expert begins among the weights, in bytes of f32.
    pub fn offset(self, sizes: Sizes) -> u64 {
        self as u64 * sizes.matrix() * 4
    }

    /// The matrix itself.
    fn plain(self) -> Factor {
        Factor { which: self, transposed: false, add: false }
    }

    fn transposed(self) -> Factor {
        Factor { transposed: true, ..self.plain() }
    }
}

impl Factor {
    fn added(self) -> Factor {
        Factor { add: true, ..self }
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
        self.product(on, rows, (rows.values, gate.span()?), Which::Gate.plain())?;
        self.product(on, rows, (rows.values, up.span()?), Which::Up.plain())?;
        let all = [gate.span()?, up.span()?, act.span()?];
        on.kernels.swiglu(&on.stream, self.inner(rows.rows), all)?;
        let outputs = on.memory.words(rows.rows as usize * self.sizes.hidden as usize)?;
        self.product(on, rows, (act.span()?, outputs.span()?), Which::Down.plain())?;
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
        self.product(on, rows, (of_outputs, act.span()?), Which::Down.transposed())?;
        let all = [gate.span()?, up.span()?, act.span()?];
        on.kernels.swiglu_backward(&on.stream, self.inner(rows.rows), all)?;
        self.product(on, rows, (gate.span()?, of_rows.span()?), Which::Gate.transposed())?;
        self.product(on, rows, (up.span()?, of_rows.span()?), Which::Up.transposed().added())?;
        Ok((of_rows, Differentials { inner: Inner::Apart([gate, up]), act }))
    }

    /// Rows times a matrix of their expert, or its transpose.
    fn product(
        self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        (a, out): (ByteSpan<'_>, ByteSpan<'_>),
        Factor { which, transposed, add }: Factor,
    ) -> Result<(), DeviceError> {
        let Sizes { hidden, ffn, .. } = self.sizes;
        let (taken, made) = match which {
            Which::Gate | Which::Up => (hidden, ffn),
            Which::Down => (ffn, hidden),
        };
        let (depth, columns) = if transposed { (made, taken) } else { (taken, made) };
        let b = from(self.values, which.offset(self.sizes))?;
        let apart = self.sizes.apart();
        let shape = MatmulShape::Rows { rows: rows.rows, depth, columns, transposed, apart };
        on.expert_product(&MatmulArgs { a, b, out, shape, segments: rows.counts, add })
    }

    fn inner(self, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.sizes.ffn)
    }
}
