//! SwiGLU experts on a device, in f32 or with factors of bf16, and the gradients of their weights.
//!
//! Rows of all experts lie one expert after another, with pads behind each. What the kernels make
//! of pads is undefined, and nothing reads it.

use super::chunk_rows::{DeviceChunk, DeviceSegments, Differentials, Gathered, Rows};
use super::device_memory::{DeviceTensor, HostStaging, from};
use super::expert_products::Compute;
use super::swiglu_bf16::Bf16Saved;
use super::swiglu_f32::{F32Saved, F32Weights, Which};
use super::weights::{Sizes, Weights};
use crate::device::{ByteSpan, Columns, DeviceRange, DotScale, MatmulArgs, MatmulShape};
use crate::dtype::Dtype;
use crate::error::{DeviceError, Error};
use crate::layer::{GradientOrder, GroupedSwiGlu};

/// Experts with their weights on the device.
#[derive(Debug)]
pub(super) struct DeviceSwiGlu {
    sizes: Sizes,
    weights: Weights,
}

/// Rows in the layer's element type, where peers read them. Without memory for them the transfer
/// that follows is refused on all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Returned<'a> {
    pub to: Option<ByteSpan<'a>>,
    pub dtype: Dtype,
}

/// Tensors that a forward pass keeps of a chunk of routed rows.
#[derive(Debug)]
pub(super) enum RoutedSaved {
    /// With the outputs before they were weighted, f32 `[rows, hidden]`.
    F32(F32Saved, DeviceTensor),
    Bf16(Bf16Saved),
}

/// Tensors that it keeps of the expert that all tokens pass.
#[derive(Debug)]
pub(super) enum SharedSaved {
    F32(F32Saved),
    Bf16(Bf16Saved),
}

impl DeviceSwiGlu {
    pub fn new(compute: &Compute, host: &GroupedSwiGlu, staging: &mut HostStaging) -> Result<Self, Error> {
        let weights = Weights::new(compute, host, staging)?;
        Ok(DeviceSwiGlu { sizes: Sizes::of(host), weights })
    }

    /// All weights, f32, in the order of [`GroupedSwiGlu`].
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Makes ready for a pass with the weights as they are.
    pub fn refresh(&mut self, on: &Compute) -> Result<(), DeviceError> {
        self.weights.refresh(on)
    }

    /// Has outputs written, times the routing weights of their rows.
    pub fn forward(
        &self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        weights: ByteSpan<'_>,
        returned: Returned<'_>,
    ) -> Result<RoutedSaved, Error> {
        let Some(bf16) = self.weights.bf16() else {
            let (outputs, saved) = self.f32().forward(on, rows)?;
            self.weigh(on, (&outputs, rows.rows), returned, Some(weights))?;
            return Ok(RoutedSaved::F32(saved, outputs));
        };
        let lost;
        let out = match returned.to {
            Some(to) => to,
            None => {
                lost = on.memory.take(self.outer(rows.rows) as u64 * 2)?;
                lost.span()?
            }
        };
        Ok(RoutedSaved::Bf16(bf16.forward(on, rows, Some(weights), (out, Dtype::Bf16))?))
    }

    /// Outputs, f32 `[rows, hidden]`, of rows that have no routing weights.
    pub fn forward_shared(
        &self,
        on: &Compute,
        rows: DeviceSegments<'_>,
    ) -> Result<(DeviceTensor, SharedSaved), Error> {
        let Some(bf16) = self.weights.bf16() else {
            let (outputs, saved) = self.f32().forward(on, rows)?;
            return Ok((outputs, SharedSaved::F32(saved)));
        };
        let outputs = on.memory.words(self.outer(rows.rows))?;
        let saved = bf16.forward(on, rows, None, (outputs.span()?, Dtype::F32))?;
        Ok((outputs, SharedSaved::Bf16(saved)))
    }

    /// Has gradients of the rows written, from those of the weighted outputs. Returns those of the
    /// routing weights, f32 `[rows]`. Gradients in f32 are those of the outputs themselves
    /// afterwards, in their place.
    pub fn rows_backward(
        &self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        saved: RoutedSaved,
        (of_outputs, weights): (ByteSpan<'_>, ByteSpan<'_>),
        returned: Returned<'_>,
    ) -> Result<(DeviceTensor, Differentials), Error> {
        let of_weights = on.memory.words(rows.rows as usize)?;
        let kept = match saved {
            RoutedSaved::F32(saved, outputs) => {
                let dot = DotScale {
                    rows: rows.rows,
                    columns: self.sizes.hidden,
                    dtype: Dtype::F32,
                    y: outputs.span()?,
                    gradients: of_outputs,
                    weights,
                    products: of_weights.span()?,
                };
                on.exchange_kernels.dot_scale(&on.stream, &dot)?;
                drop(outputs);
                let (of_rows, kept) = self.f32().backward(on, rows, saved, of_outputs)?;
                self.weigh(on, (&of_rows, rows.rows), returned, None)?;
                kept
            }
            RoutedSaved::Bf16(saved) => {
                let lost;
                let to = match returned.to {
                    Some(to) => to,
                    None => {
                        lost = on.memory.take(self.outer(rows.rows) as u64 * 2)?;
                        lost.span()?
                    }
                };
                let weights = Some([weights, of_weights.span()?]);
                saved.backward(on, rows, weights, (of_outputs, (to, Dtype::Bf16)))?
            }
        };
        Ok((of_weights, kept))
    }

    /// Gradients of the rows, f32 `[rows, hidden]`, of rows that have no routing weights.
    pub fn rows_backward_shared(
        &self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        saved: SharedSaved,
        of_outputs: ByteSpan<'_>,
    ) -> Result<(DeviceTensor, Differentials), Error> {
        match saved {
            SharedSaved::F32(saved) => Ok(self.f32().backward(on, rows, saved, of_outputs)?),
            SharedSaved::Bf16(saved) => {
                let of_rows = on.memory.words(self.outer(rows.rows))?;
                let out = (of_rows.span()?, Dtype::F32);
                let kept = saved.backward(on, rows, None, (of_outputs, out))?;
                Ok((of_rows, kept))
            }
        }
    }

    /// The gradient of the weights, f32, over all chunks of a step, into `out`.
    pub fn weights_backward(
        &self,
        on: &Compute,
        chunks: &[DeviceChunk<'_>],
        order: &GradientOrder,
        (staging, out): (&mut HostStaging, &DeviceRange),
    ) -> Result<(), Error> {
        let Sizes { experts, hidden, ffn } = self.sizes;
        let gathered = Gathered::new(on, experts, chunks.len(), order, staging)?;
        let product = |which: Which, (a, rows): (&Rows<'_>, u32), (b, columns, of_b): Right<'_>| {
            let apart = self.sizes.apart();
            let shape = MatmulShape::Depth { rows, depth: gathered.rows, columns, apart };
            let (a, b, out) = (a.span()?, b.span()?, from(out, which.offset(self.sizes))?);
            let segments = Some(gathered.segments()?);
            let matmul = MatmulArgs { a, b, out, shape, segments, add: false };
            match self.weights.bf16() {
                None => on.expert_product(&matmul),
                Some(bf16) => bf16.product_to_f32(on, matmul, of_b),
            }
        };
        // Gate and up side by side are gathered once.
        let joined = self.weights.bf16().is_some();
        let (size, width) = if joined { (2, ffn.saturating_mul(2)) } else { (4, ffn) };
        let row_bytes = |columns: u32| u64::from(columns) * size;
        let part = |first| joined.then_some(Columns { first, row: width });
        let x = gathered.rows(on, chunks.iter().map(|chunk| Ok(chunk.rows)), row_bytes(hidden))?;
        let of_gate = chunks.iter().map(|chunk| chunk.kept.inner.gate().span());
        let of_gate = gathered.rows(on, of_gate, row_bytes(width))?;
        product(Which::Gate, (&x, hidden), (&of_gate, ffn, part(0)))?;
        let of_up = match joined {
            true => of_gate,
            false => {
                let of_up = chunks.iter().map(|chunk| chunk.kept.inner.up().span());
                gathered.rows(on, of_up, row_bytes(width))?
            }
        };
        product(Which::Up, (&x, hidden), (&of_up, ffn, part(ffn)))?;
        let act = gathered.rows(on, chunks.iter().map(|chunk| chunk.kept.act.span()), row_bytes(ffn))?;
        let of_outputs = chunks.iter().map(|chunk| Ok(chunk.of_outputs));
        let of_outputs = gathered.rows(on, of_outputs, row_bytes(hidden))?;
        product(Which::Down, (&act, ffn), (&of_outputs, hidden, None))?;
        Ok(())
    }

    fn f32(&self) -> F32Weights<'_> {
        F32Weights { values: self.weights.values(), sizes: self.sizes }
    }

    /// Rows to where peers read them, perhaps times their weights, as elements.
    fn weigh(
        &self,
        on: &Compute,
        (rows, n_rows): (&DeviceTensor, u32),
        Returned { to, dtype }: Returned<'_>,
        weights: Option<ByteSpan<'_>>,
    ) -> Result<(), DeviceError> {
        let Some(to) = to else { return Ok(()) };
        on.kernels.weigh(&on.stream, ([n_rows, self.sizes.hidden], dtype), [rows.span()?, to], weights)
    }

    /// Elements of rows of the hidden size.
    fn outer(&self, rows: u32) -> usize {
        rows as usize * self.sizes.hidden as usize
    }
}

/// The right matrix of a gradient of weights: its rows, how many columns, and which, if not all.
type Right<'a> = (&'a Rows<'a>, u32, Option<Columns>);
