//! The launches of `cuda/swiglu_bf16.cu`: SwiGLU between products of bf16.

use super::layer::LayerKernels;
use super::{AT_WORK, Operands, VECTOR, WORD, bytes};
use crate::device::range::ByteSpan;
use crate::device::stream::Stream;
use crate::error::DeviceError;

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
