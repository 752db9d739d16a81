//! Settings of an [`ExpertParallel`] as data, for measurements and checks alike.

use sidelane::device::Priority;
use sidelane::dtype::{Dtype, Fp8RowShape};
use sidelane::ep::{ExpertParallelBuilder, Graphs};
use sidelane::error::PlanError;
use sidelane::rows::{Arithmetic, RowKernels, Simd};
use sidelane::{ExpertParallel, Group};
use sidelane_verify::reference::{Case, Real};

/// Settings that decide results, as the naive reference takes them, and the others.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Settings that decide results.
    pub case: Case,
    /// Element type of rows that come back.
    pub dtype: Dtype,
    /// The most tokens of a rank.
    pub max_tokens: u32,
    /// Whether rows are dispatched as records of fp8.
    pub fp8: bool,
    /// What CUDA graphs hold.
    pub graphs: Graphs,
    /// Settings of devices alone.
    pub device: OfDevice,
}

/// Settings that instances on a device have, where they are not the default.
#[derive(Clone, Copy, Debug, Default)]
pub struct OfDevice {
    /// Dispatches in flight.
    pub max_in_flight: Option<u32>,
    /// Bytes of the device heap.
    pub device_heap: Option<u64>,
    /// Priority of copies.
    pub priority: Option<Priority>,
    /// Blocks of each kernel.
    pub max_blocks: Option<u32>,
}

impl Settings {
    /// The builder with them, still without a place.
    pub fn builder<'g>(&self, group: &'g Group) -> ExpertParallelBuilder<'g> {
        let case = &self.case;
        let builder = ExpertParallel::builder(group).expert_map(case.map.clone()).top_k(case.top_k);
        let builder = builder.hidden(case.hidden).dtype(self.dtype).max_tokens(self.max_tokens);
        let builder = builder.layout(case.layout).mode(case.mode).align(case.align).route(case.route);
        let builder = builder.sum_order(case.order).partial_dtype(case.wire).weighted(case.weighted);
        let builder = builder.coalesce_relays(case.spans).strategy(case.strategy);
        let builder = builder.fp8(self.fp8).graphs(self.graphs);
        let OfDevice { max_in_flight, device_heap, priority, max_blocks } = self.device;
        let builder = max_in_flight.into_iter().fold(builder, ExpertParallelBuilder::max_in_flight);
        let builder = device_heap.into_iter().fold(builder, ExpertParallelBuilder::device_heap);
        let builder = priority.into_iter().fold(builder, ExpertParallelBuilder::priority);
        max_blocks.into_iter().fold(builder, ExpertParallelBuilder::max_blocks)
    }

    /// Type of dispatched rows, and bytes of one.
    pub fn sent_shape(&self) -> (Dtype, usize) {
        match self.fp8 {
            true => (Dtype::Bytes, Fp8RowShape::new(self.case.hidden as u32).bytes()),
            false => (self.dtype, self.case.hidden * self.dtype.size()),
        }
    }

    /// Rows as they are dispatched: in fp8 records, by the plain loops whatever the library takes.
    pub fn sent<E: Real>(&self, x: &[E]) -> Result<Vec<u8>, PlanError> {
        let bytes: &[u8] = bytemuck::cast_slice(x);
        if !self.fp8 {
            return Ok(bytes.to_vec());
        }
        let shape = Fp8RowShape::new(self.case.hidden as u32);
        let mut records = vec![0; x.len() / shape.hidden() * shape.bytes()];
        let loops = RowKernels::new(Simd::named("portable").unwrap_or_else(|_| Simd::best()));
        loops.quantize(Arithmetic::try_from(E::DTYPE)?, shape, bytes, &mut records)?;
        Ok(records)
    }
}
