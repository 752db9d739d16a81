//! Building a layer on a device.

use std::sync::Arc;

use super::DeviceMoeLayer;
use super::experts::{Compute, DeviceSwiGlu};
use super::memory::{DeviceMemory, HostStaging};
use super::moe::Placed;
use crate::device::{Kernels, LayerKernels, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, LayerError};
use crate::gate::Gate;
use crate::layer::builder::next_instance;
use crate::layer::{Experts, GroupedSwiGlu, MoeLayerBuilder};
use crate::overlap::StreamPool;
use crate::plan::ExpertMap;

/// Bytes of pinned memory at first; it grows with the largest thing that goes up or down.
const STAGING: usize = 64 << 10;

/// Settings of a [`DeviceMoeLayer`]: those of a [`MoeLayerBuilder`], and what only a device has.
/// All ranks must pass the same, except weights and overlap.
#[derive(Debug)]
pub struct DeviceMoeLayerBuilder<'g> {
    settings: MoeLayerBuilder<'g>,
    stream: Arc<Stream>,
    tapes: u32,
    device_heap: Option<u64>,
    max_blocks: Option<u32>,
}

impl<'g> DeviceMoeLayerBuilder<'g> {
    pub(in crate::layer) fn new(settings: MoeLayerBuilder<'g>, stream: &Arc<Stream>) -> Self {
        let stream = Arc::clone(stream);
        DeviceMoeLayerBuilder { settings, stream, tapes: 1, device_heap: None, max_blocks: None }
    }

    /// Number of tapes that may be alive at once, besides that of the pass that runs: each has its
    /// dispatches in flight. Default: 1.
    pub fn tapes(mut self, tapes: u32) -> Self {
        self.tapes = tapes;
        self
    }

    /// Bytes of the device's memory in which dispatches receive and experts write
    /// ([`ExpertParallelBuilder::device_heap`](crate::ep::ExpertParallelBuilder::device_heap)).
    pub fn device_heap(mut self, bytes: u64) -> Self {
        self.device_heap = Some(bytes);
        self
    }

    /// Blocks of each kernel of the layer's own, at most, so that other work next to them keeps its
    /// multiprocessors. No bit depends on it. Default: as many as the device has at work.
    pub fn max_blocks(mut self, blocks: u32) -> Self {
        self.max_blocks = Some(blocks);
        self
    }

    /// Allocates what the layer needs, and has the stream write the weights to the device.
    /// Collective.
    ///
    /// # Errors
    /// As [`MoeLayerBuilder::build`]; [`LayerError::NotOnDevice`] for experts that are no
    /// [`GroupedSwiGlu`], for groups of experts and for several compute streams;
    /// [`DeviceError`](crate::error::DeviceError) where the device lacks something.
    pub fn build(mut self) -> Result<DeviceMoeLayer, Error> {
        self.settings.cut();
        let checked = self.check();
        let (group, plan) = (self.settings.group, self.settings.plan);
        let settings = [
            ("whether their settings can be used (1: yes)", checked.is_ok().into()),
            ("chunks", plan.chunks.into()),
            ("the digest of the gate's settings and of the losses", self.settings.digest()),
            ("whether there is a shared expert (1: yes)", self.settings.shared.is_some().into()),
        ];
        group.alike(&settings)?;
        checked?;
        let context = self.stream.context();
        let pool = StreamPool::new(context, 1, 1)?;
        let transfers = match pool.transfer(0) {
            Some(stream) if plan.overlap => stream,
            _ => &self.stream,
        };
        let in_flight = plan.chunks.max(1).saturating_mul(self.tapes.saturating_add(1));
        let exchange = self.settings.exchange()?.on(transfers).max_in_flight(in_flight);
        let exchange = match self.device_heap {
            Some(bytes) => exchange.device_heap(bytes),
            None => exchange,
        };
        let mover = exchange.build()?;
        let (sources, one_each) = self.settings.sources(mover.expert_map())?;
        let kernels = LayerKernels::load(context)?;
        let kernels = match self.max_blocks {
            Some(blocks) => kernels.max_blocks(blocks),
            None => kernels,
        };
        let memory = DeviceMemory::new(context);
        let compute = Compute { stream: Arc::clone(&self.stream), kernels, memory };
        let mut staging = HostStaging::new(context, STAGING)?;
        let MoeLayerBuilder { gate, hidden, router, experts, shared, losses, max_tokens, dtype, .. } =
            self.settings;
        let experts = DeviceSwiGlu::new(&compute, swiglu(&*experts)?, &mut staging)?;
        let shared = match shared {
            Some(shared) => Some(DeviceSwiGlu::new(&compute, swiglu(&*shared)?, &mut staging)?),
            None => None,
        };
        let router = router.unwrap_or_else(|| vec![0.0; hidden * gate.experts as usize]);
        let on_device = compute.memory.words(router.len())?;
        staging.send(&compute.stream, on_device.range(), &router)?;
        let ep_kernels = Kernels::load(context)?;
        let placed = Placed { experts, shared, hidden, dtype, compute, ep_kernels };
        Ok(DeviceMoeLayer {
            mover,
            sources,
            one_each,
            gate: Gate::new(gate)?,
            losses,
            router: on_device,
            placed,
            staging,
            pool,
            max_tokens,
            plan,
            world: Arc::clone(&group.shared),
            instance: next_instance(),
        })
    }

    fn check(&self) -> Result<(), Error> {
        let settings = &self.settings;
        settings.check()?;
        swiglu(&*settings.experts)?;
        settings.shared.as_ref().map_or(Ok(()), |shared| swiglu(&**shared).map(drop))?;
        let refuse = |asked: bool, feature| match asked {
            true => Err(LayerError::NotOnDevice { feature }),
            false => Ok(()),
        };
        refuse(settings.plan.groups > 1, "groups of experts")?;
        refuse(settings.plan.streams > 1, "several compute streams")?;
        let row = settings.hidden * settings.dtype.size();
        refuse(!row.is_multiple_of(16) || settings.dtype == Dtype::Bytes, "rows of no whole 16 bytes")?;
        let own = settings.map.as_ref().map(ExpertMap::slots).unwrap_or(settings.gate.experts);
        Ok(refuse(own < 2, "a single expert")?)
    }
}

/// Experts that kernels are there for.
fn swiglu(experts: &dyn Experts) -> Result<&GroupedSwiGlu, LayerError> {
    experts.as_swiglu().ok_or(LayerError::NotOnDevice { feature: "experts that are not SwiGLU" })
}
