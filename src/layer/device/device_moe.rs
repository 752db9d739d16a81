//! The object that steps on a device are made on, how it is built, and the tape of its forward
//! passes.
//!
//! ```text
//!   MoeLayerBuilder::on(stream) --> DeviceMoeLayerBuilder --build--> DeviceMoeLayer
//!
//!   forward  --> out, DeviceTape { x, gate's decision, chunks: rows, handle, what experts saved }
//!   backward <-- DeviceTape
//! ```

use std::ops::Range;
use std::sync::Arc;

use super::device_experts::{
    Compute, DeviceSegments, DeviceSwiGlu, Products, Returned, RoutedSaved, SharedSaved,
};
use super::device_memory::{DeviceTensor, StagingBuffer, span};
use crate::device::{ByteSpan, DeviceRange, GroupSegments, Kernels, LayerKernels, Priority, Stream};
use crate::dtype::Dtype;
use crate::ep::{
    ExpertOutput, ExpertParallel, ExpertParallelBuilder, ExpertRows, Handle, HeapLoad, Place, RowCollective,
    RowPartition,
};
use crate::error::{CallKind, DeviceError, Error, LayerError, PlanError};
use crate::gate::{Decision, Gate, GateConfig};
use crate::layer::moe::{OverlapSettings, cause_of, next_instance, refused_alike};
use crate::layer::router_step::{Gated, Losses};
use crate::layer::{Experts, GroupedSwiGlu, MoeLayerBuilder};
use crate::overlap::{CudaExecutor, Graph, StreamPool};
use crate::plan::ExpertMap;
use crate::world::WorldState;

/// A Mixture-of-Experts layer of one rank on a device, forward and backward: as
/// [`MoeLayer`](crate::layer::MoeLayer), to the same bits unless cuBLAS makes its
/// [`products`](super::DeviceMoeLayerBuilder::products).
///
/// ```no_run
/// use std::sync::Arc;
/// use sidelane::device::{DeviceRange, Driver, Priority, Stream};
/// use sidelane::gate::Preset;
/// use sidelane::layer::{DeviceGradients, GroupedSwiGlu, Input, MoeLayer};
/// use sidelane::World;
/// # fn step([x, out, of_out, of_x, of_router, of_experts]: [DeviceRange; 6]) -> sidelane::Result<()> {
/// let world = World::from_env()?;
/// let stream = Arc::new(Stream::new(&Driver::open()?.context(0)?, Priority::Normal)?);
/// let (hidden, ffn) = (1024, 512);
/// let weights = vec![0.01; GroupedSwiGlu::values(8, hidden, ffn)];                    // 8 of 16 experts are here
/// let experts = GroupedSwiGlu::new(8, hidden, ffn, weights)?;
/// let gate = Preset::Mixtral.config(16, 2)?;
/// let mut layer = MoeLayer::builder(&world.all()?, gate, hidden, experts).chunks(2).on(&stream).build()?;
/// let tape = layer.forward(&Input::new(&x).with_residual(Some(&x)), &out)?;
/// // ... enqueue on `stream` what reads `out` and writes `of_out` ...
/// let gradients = DeviceGradients::new(&of_x, &of_router, &of_experts, None);
/// layer.backward(tape, &of_out, gradients)?;                                           // there for what is enqueued next
/// # Ok(())
/// # }
/// ```
pub struct DeviceMoeLayer {
    pub(super) exchange: ExpertParallel,
    /// Gathers each rank's row counts for every expert in every chunk.
    pub(super) sources: RowCollective,
    pub(super) one_each: RowPartition,
    pub(super) gate: Gate,
    pub(super) losses: Losses,
    /// Whether the device chooses experts.
    pub(super) device_gate: bool,
    pub(super) router: DeviceRange,
    pub(super) placed: PlacedExperts,
    pub(super) staging: StagingBuffer,
    pub(super) pool: StreamPool,
    pub(super) max_tokens: u32,
    pub(super) plan: OverlapSettings,
    pub(super) world: Arc<WorldState>,
    /// Distinguishes tapes of different layers within this process.
    pub(super) instance: u64,
}

/// Experts on the device of a layer, and the kernels that they use.
#[derive(Debug)]
pub(super) struct PlacedExperts {
    pub experts: DeviceSwiGlu,
    pub shared: Option<DeviceSwiGlu>,
    pub hidden: usize,
    pub dtype: Dtype,
    pub compute: Compute,
}

impl PlacedExperts {
    pub fn row_bytes(&self) -> u64 {
        (self.hidden * self.dtype.size()) as u64
    }

    /// The part of a tensor that some tokens have.
    pub fn part(&self, tensor: &DeviceRange, tokens: &Range<usize>) -> Result<DeviceRange, DeviceError> {
        let row = self.row_bytes();
        tensor.part(tokens.start as u64 * row, tokens.len() as u64 * row)
    }

    /// Elements as f32, in memory of their own.
    pub fn widened(&self, tensor: &DeviceRange) -> Result<DeviceTensor, DeviceError> {
        let Compute { stream, kernels, memory, .. } = &self.compute;
        let count = tensor.len() / self.dtype.size() as u64;
        let wide = memory.words(count as usize)?;
        match self.dtype {
            Dtype::F32 => stream.copy(wide.span()?, span(tensor)?)?,
            dtype => kernels.widen(stream, (count, dtype), [span(tensor)?, wide.span()?])?,
        }
        Ok(wide)
    }

    /// Rows as factors of the experts' products: where they lie, if they are of that type.
    pub fn factors(&self, tensor: &DeviceRange) -> Result<FactorRows, DeviceError> {
        match self.dtype == self.compute.factors() {
            true => Ok(FactorRows::InPlace(tensor.clone(), None)),
            false => Ok(FactorRows::Widened(self.widened(tensor)?)),
        }
    }

    /// A copy of tokens for the shared expert, if there is one and takes them as they are: for
    /// gradients, when the caller's may be gone. In f32 there is one already, for the router.
    pub fn kept_factors(&self, tokens: &DeviceRange) -> Result<Option<DeviceTensor>, DeviceError> {
        if self.shared.is_none() || self.compute.factors() == Dtype::F32 {
            return Ok(None);
        }
        let copy = self.compute.memory.take(tokens.len())?;
        self.compute.stream.copy(copy.span()?, span(tokens)?)?;
        Ok(Some(copy))
    }

    /// Received rows as such factors. Rows of another type are returned: they must live until
    /// the stream of transfers is behind what reads them.
    pub fn received(&self, rows: ExpertRows) -> Result<(FactorRows, Option<ExpertRows>), Error> {
        let range = rows.range()?.part(0, u64::from(rows.len()) * self.row_bytes())?;
        Ok(match self.factors(&range)? {
            FactorRows::InPlace(range, _) => (FactorRows::InPlace(range, Some(rows)), None),
            widened => (widened, Some(rows)),
        })
    }

    /// So many tokens, as the shared expert takes them.
    pub fn all<'a>(&self, values: ByteSpan<'a>, tokens: usize) -> DeviceSegments<'a> {
        DeviceSegments { rows: tokens as u32, values, counts: None }
    }

    /// Rows of experts for peers, if there is memory for them.
    pub fn returned<'a>(&self, output: &'a Result<ExpertOutput, Error>) -> Result<Returned<'a>, Error> {
        let to = match output {
            Ok(output) => Some(span(output.range()?)?),
            Err(_) => None,
        };
        Ok(Returned { to, dtype: self.dtype })
    }

    /// Makes ready for a pass with the weights as they are.
    pub fn refresh(&mut self) -> Result<(), DeviceError> {
        self.experts.refresh(&self.compute)?;
        self.shared.as_mut().map_or(Ok(()), |shared| shared.refresh(&self.compute))
    }
}

impl DeviceMoeLayer {
    /// By what tokens are routed.
    pub fn gate(&self) -> &GateConfig {
        self.gate.config()
    }

    /// Place of the choice of experts. It is the device if the layer has no losses on logits and
    /// the gate has none of these: a capacity, noise, Sinkhorn, scores by the root of softplus,
    /// second choices by chance, more than 1,024 experts, more than 64 choices. Otherwise it is the
    /// host. The bits are the same.
    pub fn gate_place(&self) -> Place {
        if self.device_gate { Place::Device(self.stream().device()) } else { Place::Host }
    }

    /// The stream that steps go on.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.placed.compute.stream
    }

    /// Weights of the router, `f32 [hidden, experts]`, to be changed between steps on the
    /// [stream](Self::stream).
    pub fn router(&self) -> &DeviceRange {
        &self.router
    }

    /// Weights of this rank's experts, f32, in the order of
    /// [`GroupedSwiGlu`](crate::layer::GroupedSwiGlu), to be changed likewise.
    ///
    /// With [`Products::CublasBf16`](super::Products::CublasBf16) the next pass makes their copy in
    /// bf16 anew. So does each one in which a clone or a part of this range lives, and the one that
    /// follows. An address alone says nothing to the layer: ask for the range before each change.
    pub fn experts(&self) -> &DeviceRange {
        self.placed.experts.weights().hand_out()
    }

    /// Weights of the expert that all tokens pass, if there is one, likewise.
    pub fn shared(&self) -> Option<&DeviceRange> {
        self.placed.shared.as_ref().map(|shared| shared.weights().hand_out())
    }

    /// Memory for a tensor of the caller's, such as an output; its contents are undefined. Work on
    /// it goes on the layer's [stream](Self::stream), or is ordered with it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Call`].
    pub fn tensor(&self, bytes: u64) -> Result<DeviceTensor, Error> {
        Ok(self.placed.compute.memory.take(bytes)?)
    }

    /// Has the stream write values to the front of a tensor. They may change at once.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] for more than it holds, [`DeviceError::Call`].
    pub fn send<T: bytemuck::NoUninit>(&mut self, to: &DeviceRange, values: &[T]) -> Result<(), Error> {
        Ok(self.staging.send(&self.placed.compute.stream, to, values)?)
    }

    /// What a tensor holds when the stream comes to it: waits for the stream.
    ///
    /// # Errors
    /// [`DeviceError::Call`], also for the failure of something that was enqueued.
    pub fn receive<T: bytemuck::Pod>(&mut self, from: &DeviceRange) -> Result<Vec<T>, Error> {
        Ok(self.staging.receive(&self.placed.compute.stream, from)?)
    }

    /// Blocks until everything in the stream is done, even if the world fails, and returns the
    /// outcome.
    ///
    /// # Errors
    /// As [`ExpertParallel::synchronize`].
    pub fn synchronize(&self) -> Result<(), Error> {
        let world = self.exchange.synchronize();
        self.stream().synchronize()?;
        world
    }

    /// Enters a pass that this rank cannot make, so that the other ranks hear of it and do not
    /// wait, as [`MoeLayer::refuse`](super::super::MoeLayer::refuse) does.
    pub fn refuse(&mut self, call: CallKind, error: Error) -> Error {
        self.refuse_call(call, None, error)
    }

    /// Error of a pass that ends before its first transfer, which the other ranks are refused. A
    /// device that fails can enter no call: that ends the world.
    pub(super) fn refuse_call(&mut self, call: CallKind, handle: Option<&Handle>, error: Error) -> Error {
        match error {
            Error::Device(DeviceError::Call { .. }) => self.world.fail(&[], error),
            error => self.exchange.refuse(call, handle, error),
        }
    }

    /// Enqueues a graph. Unless all ranks were refused alike, an error ends the world, so that no
    /// rank waits for this one.
    pub(super) fn run(
        (pool, stream, overlap): (&StreamPool, &Arc<Stream>, bool),
        graph: Graph<'_, Arc<Stream>>,
        world: &WorldState,
    ) -> Result<(), Error> {
        let enqueued = graph.run(&CudaExecutor::new(pool, stream).overlap(overlap));
        Ok(enqueued.inspect_err(|error| {
            if !refused_alike(error) && world.hub.health().check().is_ok() {
                world.hub.cancel(cause_of(error, world.hub.rank()));
            }
        })?)
    }

    /// Whether a tensor on this device is `[tokens, hidden]`, at a multiple of 16 bytes.
    pub(super) fn check_rows(
        &self,
        what: &'static str,
        tensor: &DeviceRange,
        tokens: u64,
    ) -> Result<(), Error> {
        let PlacedExperts { hidden, dtype, .. } = self.placed;
        if tensor.len() != tokens * self.placed.row_bytes() {
            let (seen, rows) = (tensor.len() as usize / dtype.size(), tokens as usize);
            return Err(PlanError::WrongShape { what, seen, rows, columns: hidden }.into());
        }
        self.check_memory(what, tensor)
    }

    /// Whether a tensor is as long as weights.
    pub(super) fn check_words(
        &self,
        what: &'static str,
        tensor: &DeviceRange,
        weights: &DeviceRange,
    ) -> Result<(), Error> {
        if tensor.len() != weights.len() {
            let (seen, rows) = (tensor.len() as usize / 4, weights.len() as usize / 4);
            return Err(PlanError::WrongShape { what, seen, rows, columns: 1 }.into());
        }
        self.check_memory(what, tensor)
    }

    fn check_memory(&self, what: &'static str, tensor: &DeviceRange) -> Result<(), Error> {
        tensor.check_reach(self.stream().device())?;
        let (value, align) = (tensor.address(), 16);
        if !value.is_multiple_of(align) {
            return Err(DeviceError::Misaligned { what, value, align }.into());
        }
        Ok(())
    }
}

impl std::fmt::Debug for DeviceMoeLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceMoeLayer").field("exchange", &self.exchange).field("plan", &self.plan).finish()
    }
}

/// One forward pass of a [`DeviceMoeLayer`](super::DeviceMoeLayer), kept for its gradients. Several
/// may be alive ([`tapes`](super::DeviceMoeLayerBuilder::tapes)), and go backward in any order, the
/// same on all ranks.
///
/// Rows that are factors of products as they come stay in the receive pool until the tape is
/// consumed or dropped; others are kept widened, in memory of the layer.
#[derive(Debug)]
pub struct DeviceTape {
    pub(super) instance: u64,
    /// The tokens, f32 `[tokens, hidden]`.
    pub(super) x: DeviceTensor,
    /// The same as factors for the shared expert, if there is one and these are not f32.
    pub(super) x_factors: Option<DeviceTensor>,
    pub(super) gated: Gated,
    /// By which the device chose, f32 `[tokens, experts]`. None where the host did.
    pub(super) logits: Option<DeviceTensor>,
    pub(super) chunks: Vec<DeviceChunkTape>,
    /// By the shared expert.
    pub(super) shared: Option<SharedSaved>,
}

/// A chunk that experts have gone through.
#[derive(Debug)]
pub(super) struct DeviceChunkTape {
    pub received: DeviceReceivedChunk,
    pub made: DeviceGroupOutputs,
}

/// Layout and routing weights of the rows of a chunk.
#[derive(Debug)]
pub(super) struct DeviceReceivedChunk {
    pub handle: Handle,
    /// Routing weights of the rows, f32.
    pub weights: DeviceRange,
    /// Rows of each expert, then the same with pads, i64.
    pub counts: DeviceRange,
}

/// Rows that experts took from a chunk, and tensors that they kept for the gradients.
#[derive(Debug)]
pub(super) struct DeviceGroupOutputs {
    pub rows: FactorRows,
    pub saved: RoutedSaved,
}

/// Rows as factors of products: where they lie if they are, else a copy.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "calls allocate nothing")]
pub(super) enum FactorRows {
    /// Received ones hold their memory.
    InPlace(DeviceRange, #[expect(dead_code, reason = "held, not read")] Option<ExpertRows>),
    Widened(DeviceTensor),
}

impl FactorRows {
    pub fn span(&self) -> Result<ByteSpan<'_>, DeviceError> {
        match self {
            FactorRows::InPlace(range, _) => span(range),
            FactorRows::Widened(buffer) => buffer.span(),
        }
    }
}

impl DeviceReceivedChunk {
    /// Rows of these experts, as they take them.
    pub fn segments<'a>(&'a self, rows: &'a FactorRows) -> Result<DeviceSegments<'a>, DeviceError> {
        let counts = GroupSegments {
            table: span(&self.counts)?,
            rows: self.handle.tokens_per_expert(),
            padded: self.handle.padded_tokens_per_expert(),
        };
        Ok(DeviceSegments { rows: self.handle.rows(), values: rows.span()?, counts: Some(counts) })
    }
}

impl DeviceTape {
    /// The gate's decision for this rank's tokens. Its counts balance a bias
    /// ([`update_bias`](crate::gate::update_bias)).
    pub fn decision(&self) -> &Decision {
        &self.gated.decision
    }

    /// The balancing loss of this rank's tokens; 0 if there is none.
    pub fn balance_loss(&self) -> f32 {
        self.gated.balance
    }

    /// The loss on the size of logits; 0 if there is none.
    pub fn z_loss(&self) -> f32 {
        self.gated.z
    }
}

/// Settings of a [`DeviceMoeLayer`]: those of a [`MoeLayerBuilder`], and what only a device has.
/// All ranks must pass the same, except weights, overlap, limit and priority.
#[derive(Debug)]
pub struct DeviceMoeLayerBuilder<'g> {
    settings: MoeLayerBuilder<'g>,
    stream: Arc<Stream>,
    tapes: u32,
    device_heap: Option<u64>,
    max_blocks: Option<u32>,
    priority: Priority,
    products: Products,
}

/// This rank's part of a layer, but for what ranks make together.
struct Prepared<'g> {
    pool: StreamPool,
    exchange: ExpertParallelBuilder<'g>,
    placed: PlacedExperts,
    router: DeviceRange,
    staging: StagingBuffer,
    gate: Gate,
}

impl<'g> DeviceMoeLayerBuilder<'g> {
    pub(in crate::layer) fn new(settings: MoeLayerBuilder<'g>, stream: &Arc<Stream>) -> Self {
        let stream = Arc::clone(stream);
        DeviceMoeLayerBuilder {
            settings,
            stream,
            tapes: 1,
            device_heap: None,
            max_blocks: None,
            priority: Priority::Highest,
            products: Products::default(),
        }
    }

    /// Number of tapes that may be alive at once, besides that of the pass that runs: each has its
    /// dispatches in flight. Default: 1.
    pub fn tapes(mut self, tapes: u32) -> Self {
        self.tapes = tapes;
        self
    }

    /// Bytes of the device's memory in which dispatches receive and experts write. Default: rows
    /// and outputs of two passes of `max_tokens`, cut into chunks, by the formula of
    /// [`ExpertParallelBuilder::device_heap`](crate::ep::ExpertParallelBuilder::device_heap). One
    /// pass may so bring a rank three times its even share. Rows of f32 lie there as long as their
    /// tape, and so do those of bf16 with [`Products::CublasBf16`]: each of the
    /// [`tapes`](Self::tapes) then adds those of a pass.
    pub fn device_heap(mut self, bytes: u64) -> Self {
        self.device_heap = Some(bytes);
        self
    }

    /// Blocks of each kernel, at most: those of the layer, and those of its dispatches and combines
    /// ([`ExpertParallelBuilder::max_blocks`](crate::ep::ExpertParallelBuilder::max_blocks)). So
    /// other work next to them keeps its multiprocessors. No bit depends on it. Default: as many as
    /// the device has at work.
    pub fn max_blocks(mut self, blocks: u32) -> Self {
        self.max_blocks = Some(blocks);
        self
    }

    /// Priority of the layer's own streams. Dispatches and combines of chunks go there, with the
    /// kernels that pack and add up their rows. Default: [`Priority::Highest`], so that they do not
    /// queue behind products of the experts.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Maker of the layer's products. The same on all ranks. Default: [`Products::Own`], a kernel
    /// of ours with the host's bits. Those of cuBLAS are for speed.
    pub fn products(mut self, products: Products) -> Self {
        self.products = products;
        self
    }

    /// Allocates what the layer needs, and has the stream write the weights to the device, which it
    /// waits for if they are large. Collective.
    ///
    /// # Errors
    /// As [`MoeLayerBuilder::build`]; [`LayerError::NotOnDevice`] for experts that are no
    /// [`GroupedSwiGlu`], for groups of experts, for several compute streams, for a deadline, and
    /// for [`Products::CublasBf16`] of rows that are not bf16;
    /// [`DeviceError`](crate::error::DeviceError) where the device lacks something, such as
    /// [`NoCublas`](crate::error::DeviceError::NoCublas).
    pub fn build(mut self) -> Result<DeviceMoeLayer, Error> {
        self.settings.cut();
        let prepared = self.check().and_then(|()| self.prepare());
        let (group, plan) = (self.settings.group, self.settings.plan);
        let settings = [
            ("whether their settings can be used (1: yes)", prepared.is_ok().into()),
            ("chunks", plan.chunks.into()),
            ("tapes", self.tapes.into()),
            ("the digest of the gate's settings and of the losses", self.settings.digest()),
            ("whether there is a shared expert (1: yes)", self.settings.shared.is_some().into()),
            ("the maker of products (0: own, 1 to 3: cuBLAS, in f32, TF32, bf16)", self.products as u64),
        ];
        let told = group.alike(&settings);
        let Prepared { pool, exchange, placed, router, staging, gate } = prepared?;
        told?;
        let exchange = exchange.build()?;
        let (sources, one_each) = self.settings.sources(exchange.expert_map())?;
        Ok(DeviceMoeLayer {
            exchange,
            sources,
            one_each,
            gate,
            losses: self.settings.losses,
            device_gate: self.has_device_gate(),
            router,
            placed,
            staging,
            pool,
            max_tokens: self.settings.max_tokens,
            plan,
            world: Arc::clone(&group.shared),
            instance: next_instance(),
        })
    }

    /// Makes all that can fail before ranks compare settings.
    fn prepare(&self) -> Result<Prepared<'g>, Error> {
        let (settings, context) = (&self.settings, self.stream.context());
        let pool = StreamPool::new(context, 1, 1, self.priority)?;
        let transfers = match pool.transfer(0) {
            Some(stream) if settings.plan.overlap => stream,
            _ => &self.stream,
        };
        let in_flight = settings.plan.chunks.max(1).saturating_mul(self.tapes.saturating_add(1));
        let exchange =
            settings.exchange_builder().on(transfers).max_in_flight(in_flight).priority(self.priority);
        let exchange = exchange.heap_load(self.heap_load());
        let exchange = self.device_heap.into_iter().fold(exchange, ExpertParallelBuilder::device_heap);
        let exchange = self.max_blocks.into_iter().fold(exchange, ExpertParallelBuilder::max_blocks);
        let kernels = LayerKernels::load(context)?.max_blocks(self.max_blocks);
        let exchange_kernels = Kernels::load(context)?.max_blocks(self.max_blocks);
        let compute = Compute::new(&self.stream, (kernels, exchange_kernels), self.products)?;
        let mut staging = StagingBuffer::new(context)?;
        let experts = DeviceSwiGlu::new(&compute, swiglu(settings.experts()?)?, &mut staging)?;
        let shared = match &settings.shared {
            Some(shared) => Some(DeviceSwiGlu::new(&compute, swiglu(&**shared)?, &mut staging)?),
            None => None,
        };
        let router = compute.memory.alone(settings.hidden * settings.gate.experts as usize)?;
        match &settings.router {
            Some(weights) => staging.send(&compute.stream, &router, weights)?,
            None => staging.send(&compute.stream, &router, &vec![0.0_f32; router.len() as usize / 4])?,
        }
        let (hidden, dtype) = (settings.hidden, settings.dtype);
        let placed = PlacedExperts { experts, shared, hidden, dtype, compute };
        Ok(Prepared { pool, exchange, placed, router, staging, gate: Gate::new(settings.gate.clone())? })
    }

    /// Rows and outputs of two passes; all chunks of a pass are alive at its end. Rows that are
    /// factors of products as they come stay there with their tapes.
    fn heap_load(&self) -> HeapLoad {
        let chunks = self.settings.plan.chunks;
        let tapes = if self.settings.dtype == self.products.factors() { self.tapes } else { 0 };
        let landings = chunks.saturating_mul(tapes.saturating_add(2));
        HeapLoad { landings, outputs: chunks.saturating_mul(2) }
    }

    /// Whether a kernel can choose experts: losses need the logits on the host.
    fn has_device_gate(&self) -> bool {
        let Losses { balance, z } = self.settings.losses;
        balance.is_none() && z.is_none() && LayerKernels::gate_lacks(&self.settings.gate).is_none()
    }

    fn check(&self) -> Result<(), Error> {
        let settings = &self.settings;
        settings.check()?;
        swiglu(settings.experts()?)?;
        settings.shared.as_ref().map_or(Ok(()), |shared| swiglu(&**shared).map(drop))?;
        let refuse = |asked: bool, feature| match asked {
            true => Err(LayerError::NotOnDevice { feature }),
            false => Ok(()),
        };
        refuse(settings.plan.groups > 1, "groups of experts")?;
        refuse(settings.plan.streams > 1, "several compute streams")?;
        refuse(settings.plan.deadline.is_some(), "a deadline of its own")?;
        let row = settings.hidden * settings.dtype.size();
        refuse(!row.is_multiple_of(16) || settings.dtype == Dtype::Bytes, "rows of no whole 16 bytes")?;
        if self.products == Products::CublasBf16 {
            refuse(settings.dtype != Dtype::Bf16, "products in bf16 of rows that are not bf16")?;
            let shared = settings.shared.as_ref().map(|shared| swiglu(&**shared)).transpose()?;
            let empty =
                [Some(swiglu(settings.experts()?)?), shared].into_iter().flatten().any(|of| of.ffn == 0);
            refuse(empty, "products in bf16 of experts of width 0")?;
        }
        let own = settings.map.as_ref().map(ExpertMap::slots).unwrap_or(settings.gate.experts);
        Ok(refuse(own < 2, "a single expert")?)
    }
}

/// Experts that kernels are there for.
fn swiglu(experts: &dyn Experts) -> Result<&GroupedSwiGlu, LayerError> {
    experts.as_swiglu().ok_or(LayerError::NotOnDevice { feature: "experts that are not SwiGLU" })
}
