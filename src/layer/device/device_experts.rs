//! SwiGLU experts on a device: their weights, the products that they use, and the rows of chunks on
//! their way through them.
//!
//! ```text
//!   rows of a chunk   | e0 e0 . . | e1 e1 e1 . | e2 ..      . pads: undefined, and never read
//!                         |            |
//!                     DeviceSwiGlu::forward .. rows_backward     per chunk, in f32 or with factors of bf16
//!
//!   all chunks        gathered by (expert, source rank, token) -> weights_backward, one product per expert
//! ```
//!
//! **Weights** are f32 and, where products take that, also a copy in bf16. The copy is made on the
//! layer's stream before a pass, unless the weights are unchanged since the last one. Callers
//! change them by the range that a layer hands out, so a pass converts them after each
//! [`hand_out`](DeviceWeights::hand_out). If a clone or a part of that range is alive then, a
//! stream's included, the next pass converts them again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::device_memory::{DeviceTensor, LayerMemory, StagingBuffer, from, span};
use super::device_swiglu::{Bf16Saved, Bf16Weights, F32Matrix, F32Saved, F32Weights};
use crate::device::{
    Blas, ByteSpan, Columns, DeviceRange, DotScale, GatherRun, GatherRuns, GroupSegments, Kernels,
    LayerKernels, MatmulArgs, MatmulShape, Stream, wheels,
};
use crate::dtype::Dtype;
use crate::error::{DeviceError, Error};
use crate::layer::{GradientOrder, GroupedSwiGlu};

/// Experts with their weights on the device.
#[derive(Debug)]
pub(super) struct DeviceSwiGlu {
    sizes: Sizes,
    weights: DeviceWeights,
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
    pub fn new(compute: &Compute, host: &GroupedSwiGlu, staging: &mut StagingBuffer) -> Result<Self, Error> {
        let weights = DeviceWeights::new(compute, host, staging)?;
        Ok(DeviceSwiGlu { sizes: Sizes::of(host), weights })
    }

    /// All weights, f32, in the order of [`GroupedSwiGlu`].
    pub fn weights(&self) -> &DeviceWeights {
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
        (staging, out): (&mut StagingBuffer, &DeviceRange),
    ) -> Result<(), Error> {
        let Sizes { experts, hidden, ffn } = self.sizes;
        let gathered = Gathered::new(on, experts, chunks.len(), order, staging)?;
        let product =
            |matrix: F32Matrix, (a, rows): (&GradientRows<'_>, u32), (b, columns, of_b): Right<'_>| {
                let apart = self.sizes.apart();
                let shape = MatmulShape::Depth { rows, depth: gathered.rows, columns, apart };
                let (a, b, out) = (a.span()?, b.span()?, from(out, matrix.offset(self.sizes))?);
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
        product(F32Matrix::Gate, (&x, hidden), (&of_gate, ffn, part(0)))?;
        let of_up = match joined {
            true => of_gate,
            false => {
                let of_up = chunks.iter().map(|chunk| chunk.kept.inner.up().span());
                gathered.rows(on, of_up, row_bytes(width))?
            }
        };
        product(F32Matrix::Up, (&x, hidden), (&of_up, ffn, part(ffn)))?;
        let act = gathered.rows(on, chunks.iter().map(|chunk| chunk.kept.act.span()), row_bytes(ffn))?;
        let of_outputs = chunks.iter().map(|chunk| Ok(chunk.of_outputs));
        let of_outputs = gathered.rows(on, of_outputs, row_bytes(hidden))?;
        product(F32Matrix::Down, (&act, ffn), (&of_outputs, hidden, None))?;
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
type Right<'a> = (&'a GradientRows<'a>, u32, Option<Columns>);

/// Sizes of SwiGLU experts: `w1` and `w3` are `[hidden, ffn]`, `w2` is `[ffn, hidden]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub experts: u32,
    pub hidden: u32,
    pub ffn: u32,
}

impl Sizes {
    pub fn of(host: &GroupedSwiGlu) -> Sizes {
        let [experts, hidden, ffn] = [host.experts, host.hidden, host.ffn].map(|number| number as u32);
        Sizes { experts, hidden, ffn }
    }

    /// Elements of a matrix.
    pub fn matrix(self) -> u64 {
        u64::from(self.hidden) * u64::from(self.ffn)
    }

    /// Elements from a matrix of one expert to that of the next.
    pub fn apart(self) -> u64 {
        3 * self.matrix()
    }
}

/// Weights of all experts of a rank, in the order of [`GroupedSwiGlu`].
#[derive(Debug)]
pub(super) struct DeviceWeights {
    values: Arc<DeviceRange>,
    /// The same memory, by a claim on the value above: so clones that others hold are counted.
    handed_out: DeviceRange,
    may_have_changed: AtomicBool,
    bf16: Option<Arc<Bf16Weights>>,
}

/// Claims on the values if no caller has one: that of [`DeviceWeights`], and that of the range that
/// it hands out.
const OWN_CLAIMS: usize = 2;

impl DeviceWeights {
    pub fn new(on: &Compute, host: &GroupedSwiGlu, staging: &mut StagingBuffer) -> Result<Self, Error> {
        let values = on.memory.alone(host.weights.len())?;
        staging.send(&on.stream, &values, &host.weights)?;
        let values = Arc::new(values);
        let handed_out = DeviceRange::part_of(&values, |values| values, (0, values.len()))?;
        let copy = |blas| -> Result<_, DeviceError> {
            let values = on.memory.alone(host.weights.len().div_ceil(2))?;
            Ok(Arc::new(Bf16Weights { values, sizes: Sizes::of(host), blas }))
        };
        let bf16 = on.bf16_products().map(copy).transpose()?;
        Ok(DeviceWeights { values, handed_out, may_have_changed: AtomicBool::new(true), bf16 })
    }

    /// For products of f32.
    pub fn values(&self) -> &DeviceRange {
        &self.values
    }

    /// For products of bf16, if the layer makes these.
    pub fn bf16(&self) -> Option<&Arc<Bf16Weights>> {
        self.bf16.as_ref()
    }

    /// The values, for a caller that may change them.
    pub fn hand_out(&self) -> &DeviceRange {
        // Relaxed: read with `get_mut` alone, behind the end of all shared borrows.
        self.may_have_changed.store(true, Ordering::Relaxed);
        &self.handed_out
    }

    /// Has the stream make the copy again, if it may differ from the weights. No other pass uses
    /// them meanwhile: the layer is borrowed for this one.
    pub fn refresh(&mut self, on: &Compute) -> Result<(), DeviceError> {
        let Some(bf16) = &self.bf16 else { return Ok(()) };
        // The holder of a claim may write until it drops it, also behind this pass.
        let is_held = Arc::strong_count(&self.values) > OWN_CLAIMS;
        if !is_held && !*self.may_have_changed.get_mut() {
            return Ok(());
        }
        let Sizes { experts, hidden, ffn } = bf16.sizes;
        let [from, to] = [span(&self.values)?, span(&bf16.values)?];
        on.kernels.narrow_weights(&on.stream, [experts, hidden, ffn], [from, to])?;
        *self.may_have_changed.get_mut() = is_held;
        Ok(())
    }
}

/// Maker of the products of a [`DeviceMoeLayer`](super::DeviceMoeLayer).
///
/// The default promises bits and needs no library. A layer that is to be fast says so:
/// [`CublasBf16`](Self::CublasBf16), or [`CublasTf32`](Self::CublasTf32) and
/// [`Cublas`](Self::Cublas) where rows are f32 or factors must stay so. They are no default,
/// because results would then depend on what a machine has installed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Products {
    /// A kernel of ours, without tensor cores: to the bit the products of the host.
    #[default]
    Own,
    /// cuBLAS, loaded at run time. Products are made and summed in f32, without TF32, in the
    /// library's own order: the same bits from run to run, and others than the host's.
    ///
    /// Two results of a sum of `k` products differ by at most `2 * k * 2^-24` times the sum of
    /// their absolute values, to first order. Sums of whole numbers below `2^24` are equal.
    Cublas,
    /// cuBLAS on tensor cores, in TF32: several times as fast. The experts' products round each
    /// factor to 10 bits behind its leading one, by `2^-10` of it at most, and add up in f32.
    /// Tokens of bf16 and f16 have no more bits and lose nothing; weights, activations and
    /// gradients do. The router's products are those of [`Cublas`](Self::Cublas): a choice of
    /// experts does not hang on such a rounding.
    ///
    /// A sum of `k` products differs from [`Cublas`](Self::Cublas)'s by at most
    /// `2^-9 + 2 * k * 2^-24` times the sum of their absolute values, to first order. Sums of whole
    /// numbers below `2^24`, of factors up to `2^11`, are equal.
    CublasTf32,
    /// cuBLAS on tensor cores, with factors in bf16: the fastest. The experts' rows, weights,
    /// activations and gradients of outputs are bf16, and products add up in f32. Weights stay f32
    /// with a copy in bf16, which a pass makes anew where they may have changed
    /// ([`experts`](super::DeviceMoeLayer::experts)). Their gradients are f32, and so is the
    /// router. Rows must be bf16. They are the factors as they come, and what is kept for gradients
    /// takes about a third of the memory.
    ///
    /// Each rounding loses at most `2^-8` of a number. A sum of `k` products differs from that of
    /// the same factors in another order by at most `2 * k * 2^-24` times the sum of their absolute
    /// values, to first order, and by that rounding.
    CublasBf16,
}

impl Products {
    /// Type of the factors of the experts' products.
    pub(super) fn factors(self) -> Dtype {
        if self == Products::CublasBf16 { Dtype::Bf16 } else { Dtype::F32 }
    }
}

/// Kernels, memory and products of the experts, on one stream.
#[derive(Clone, Debug)]
pub(super) struct Compute {
    pub stream: Arc<Stream>,
    pub kernels: LayerKernels,
    /// Those of dispatch and combine, for gradients of routing weights.
    pub exchange_kernels: Kernels,
    pub memory: Arc<LayerMemory>,
    blas: Option<Arc<Blas>>,
    products: Products,
}

impl Compute {
    /// Loads what makes the products. With cuBLAS it waits for the device.
    pub fn new(
        stream: &Arc<Stream>,
        (kernels, exchange_kernels): (LayerKernels, Kernels),
        products: Products,
    ) -> Result<Self, DeviceError> {
        let blas = match products {
            Products::Own => None,
            Products::Cublas | Products::CublasTf32 | Products::CublasBf16 => {
                let fake_driver = stream.context().driver().is_fake();
                Some(Arc::new(Blas::load(stream, &wheels::folders(fake_driver, Vec::new))?))
            }
        };
        let memory = LayerMemory::new(stream.context());
        Ok(Compute { stream: Arc::clone(stream), kernels, exchange_kernels, memory, blas, products })
    }

    /// Type of the factors of the experts' products.
    pub fn factors(&self) -> Dtype {
        self.products.factors()
    }

    /// cuBLAS, if factors of the experts' products are bf16.
    pub fn bf16_products(&self) -> Option<Arc<Blas>> {
        self.blas.clone().filter(|_| self.factors() == Dtype::Bf16)
    }

    /// Enqueues a product of the experts' groups of rows in f32.
    pub fn expert_product(&self, matmul: &MatmulArgs<'_>) -> Result<(), DeviceError> {
        match &self.blas {
            Some(blas) if self.products == Products::CublasTf32 => blas.matmul_tf32(&self.kernels, matmul),
            _ => self.router_product(matmul),
        }
    }

    /// Enqueues a product of the router, which is always of f32.
    pub fn router_product(&self, matmul: &MatmulArgs<'_>) -> Result<(), DeviceError> {
        match &self.blas {
            None => self.kernels.matmul(&self.stream, matmul),
            Some(blas) => blas.matmul(&self.kernels, matmul),
        }
    }
}

/// Rows of all experts, `[rows, hidden]`, in the type of the products' factors.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceSegments<'a> {
    pub rows: u32,
    pub values: ByteSpan<'a>,
    /// Rows of each expert; without them one expert has them all.
    pub counts: Option<GroupSegments<'a>>,
}

/// Gradients of gate and up.
#[derive(Debug)]
pub(super) enum HiddenGradients {
    /// `[rows, ffn]` each.
    Apart([DeviceTensor; 2]),
    /// Side by side, `[rows, 2 * ffn]`.
    Joined(DeviceTensor),
}

/// Tensors of a chunk, besides its rows, that gradients of weights are made of.
#[derive(Debug)]
pub(super) struct Differentials {
    pub inner: HiddenGradients,
    pub act: DeviceTensor,
}

/// A chunk for the gradients of weights: its rows, the gradients of its outputs, and what was kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceChunk<'a> {
    pub rows: ByteSpan<'a>,
    pub of_outputs: ByteSpan<'a>,
    pub kept: &'a Differentials,
}

impl HiddenGradients {
    pub fn gate(&self) -> &DeviceTensor {
        match self {
            HiddenGradients::Apart([gate, _]) | HiddenGradients::Joined(gate) => gate,
        }
    }

    pub fn up(&self) -> &DeviceTensor {
        match self {
            HiddenGradients::Apart([_, up]) | HiddenGradients::Joined(up) => up,
        }
    }
}

/// Rows of a run, at most: a block moves a run, and many blocks keep the memory busy.
const ROWS_OF_A_RUN: u32 = 16;

/// Rows of all chunks in the order of the gradients' sums, without pads.
pub(super) struct Gathered {
    pub rows: u32,
    runs: GatherRuns,
    _runs: DeviceTensor,
    /// Whether the rows of the first chunk lie so already, and are all.
    in_place: bool,
    /// Of each expert.
    counts: Vec<i64>,
    /// Twice the counts, as there are no pads.
    table_of_counts: DeviceTensor,
    /// Room for the addresses of as many matrices.
    table: DeviceTensor,
}

/// Rows for the gradients of weights: where a chunk has them, or copied together.
pub(super) enum GradientRows<'a> {
    InPlace(ByteSpan<'a>),
    Gathered(DeviceTensor),
}

impl GradientRows<'_> {
    pub fn span(&self) -> Result<ByteSpan<'_>, DeviceError> {
        match self {
            GradientRows::InPlace(span) => Ok(*span),
            GradientRows::Gathered(tensor) => tensor.span(),
        }
    }
}

impl Gathered {
    pub fn new(
        on: &Compute,
        experts: u32,
        chunks: usize,
        order: &GradientOrder,
        staging: &mut StagingBuffer,
    ) -> Result<Self, Error> {
        let (mut runs, mut rows) = (Vec::new(), 0);
        for run in (0..experts as usize).flat_map(|expert| order.runs(expert)) {
            let [matrix, first, count] = [run.chunk, run.first, run.rows].map(|number| number as u32);
            for at in (0..count).step_by(ROWS_OF_A_RUN as usize) {
                let part = ROWS_OF_A_RUN.min(count - at);
                runs.push(GatherRun { matrix, first: first + at, rows: part, to: rows + at });
            }
            rows += count;
        }
        let in_place = runs.iter().all(|run| run.matrix == 0 && run.first == run.to);
        if in_place {
            runs.clear();
        }
        let counts: Vec<i64> = (0..experts as usize).map(|expert| order.rows(expert) as i64).collect();
        let of_runs = on.memory.take(size_of_val(runs.as_slice()) as u64)?;
        let table_of_counts = on.memory.take(16 * u64::from(experts))?;
        staging.send(&on.stream, of_runs.range(), &runs)?;
        staging.send(&on.stream, table_of_counts.range(), &[counts.as_slice(), &counts].concat())?;
        let (table, listed) = (on.memory.take(8 * chunks as u64)?, GatherRuns::new(&runs, of_runs.range()));
        Ok(Gathered { rows, runs: listed, _runs: of_runs, in_place, counts, table_of_counts, table })
    }

    pub fn segments(&self) -> Result<GroupSegments<'_>, DeviceError> {
        Ok(GroupSegments { table: self.table_of_counts.span()?, rows: &self.counts, padded: &self.counts })
    }

    /// One matrix of those of the chunks, whose rows have so many bytes.
    pub fn rows<'a>(
        &self,
        on: &Compute,
        parts: impl Iterator<Item = Result<ByteSpan<'a>, DeviceError>>,
        row_bytes: u64,
    ) -> Result<GradientRows<'a>, DeviceError> {
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        if let (true, Some(&first)) = (self.in_place, parts.first()) {
            return Ok(GradientRows::InPlace(first));
        }
        let out = on.memory.take(u64::from(self.rows) * row_bytes)?;
        on.kernels.gather(&on.stream, (&self.runs, row_bytes), &parts, self.table.range(), out.span()?)?;
        Ok(GradientRows::Gathered(out))
    }
}
