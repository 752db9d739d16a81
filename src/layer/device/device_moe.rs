//! The object that steps are made on.

use std::ops::Range;
use std::sync::Arc;

use super::chunk_rows::DeviceSegments;
use super::device_experts::{DeviceSwiGlu, Returned};
use super::device_memory::{DeviceTensor, HostStaging, span};
use super::device_tape::FactorRows;
use super::expert_products::Compute;
use crate::device::{ByteSpan, DeviceRange, Stream};
use crate::dtype::Dtype;
use crate::ep::{ExpertOutput, ExpertParallel, ExpertRows, Handle, Place, RowCollective, RowPartition};
use crate::error::{CallKind, DeviceError, Error, PlanError};
use crate::gate::{Gate, GateConfig};
use crate::layer::moe::{Plan, cause_of, refused_alike};
use crate::layer::router_step::Losses;
use crate::overlap::{CudaExecutor, Graph, StreamPool};
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
    pub(super) mover: ExpertParallel,
    /// Gathers each rank's row counts for every expert in every chunk.
    pub(super) sources: RowCollective,
    pub(super) one_each: RowPartition,
    pub(super) gate: Gate,
    pub(super) losses: Losses,
    /// Whether the device chooses experts.
    pub(super) device_gate: bool,
    pub(super) router: DeviceRange,
    pub(super) placed: Placed,
    pub(super) staging: HostStaging,
    pub(super) pool: StreamPool,
    pub(super) max_tokens: u32,
    pub(super) plan: Plan,
    pub(super) world: Arc<WorldState>,
    /// Distinguishes tapes of different layers within this process.
    pub(super) instance: u64,
}

/// What nodes compute with.
#[derive(Debug)]
pub(super) struct Placed {
    pub experts: DeviceSwiGlu,
    pub shared: Option<DeviceSwiGlu>,
    pub hidden: usize,
    pub dtype: Dtype,
    pub compute: Compute,
}

impl Placed {
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
        let world = self.mover.synchronize();
        self.stream().synchronize()?;
        world
    }

    /// Error of a pass that ends before its first transfer, which the other ranks are refused. A
    /// device that fails can enter no call: that ends the world.
    pub(super) fn refuse(&mut self, call: CallKind, handle: Option<&Handle>, error: Error) -> Error {
        match error {
            Error::Device(DeviceError::Call { .. }) => self.world.fail(&[], error),
            error => self.mover.refuse(call, handle, error),
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
        let Placed { hidden, dtype, .. } = self.placed;
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
        f.debug_struct("DeviceMoeLayer").field("mover", &self.mover).field("plan", &self.plan).finish()
    }
}
