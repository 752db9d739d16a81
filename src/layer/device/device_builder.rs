//! Building a layer on a device.

use std::sync::Arc;

use super::DeviceMoeLayer;
use super::device_experts::DeviceSwiGlu;
use super::device_memory::HostStaging;
use super::device_moe::Placed;
use super::expert_products::{Compute, Products};
use crate::device::{DeviceRange, Kernels, LayerKernels, Priority, Stream};
use crate::dtype::Dtype;
use crate::ep::{ExpertParallelBuilder, HeapLoad};
use crate::error::{Error, LayerError};
use crate::gate::Gate;
use crate::layer::builder::next_instance;
use crate::layer::router_step::Losses;
use crate::layer::{Experts, GroupedSwiGlu, MoeLayerBuilder};
use crate::overlap::StreamPool;
use crate::plan::ExpertMap;

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
    placed: Placed,
    router: DeviceRange,
    staging: HostStaging,
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
        let mover = exchange.build()?;
        let (sources, one_each) = self.settings.sources(mover.expert_map())?;
        Ok(DeviceMoeLayer {
            mover,
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
        let exchange = settings.exchange().on(transfers).max_in_flight(in_flight).priority(self.priority);
        let exchange = exchange.heap_load(self.heap_load());
        let exchange = self.device_heap.into_iter().fold(exchange, ExpertParallelBuilder::device_heap);
        let exchange = self.max_blocks.into_iter().fold(exchange, ExpertParallelBuilder::max_blocks);
        let kernels = LayerKernels::load(context)?.max_blocks(self.max_blocks);
        let exchange_kernels = Kernels::load(context)?.max_blocks(self.max_blocks);
        let compute = Compute::new(&self.stream, (kernels, exchange_kernels), self.products)?;
        let mut staging = HostStaging::new(context)?;
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
        let placed = Placed { experts, shared, hidden, dtype, compute };
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
