//! Sums by node: a relay sums the rows of its node for each token of another node, and returns one
//! row for all of them.
//!
//! ```text
//!   memory of a relay's sums    | rows of local peers, block after block | sums | rows of each sum | their weights |
//!                                 engines pull                             kernel  from the host
//!
//!   source                      rows of the own node, sums of other nodes | sum by ascending node
//! ```
//!
//! The memory is a piece of the pool, taken before this rank's entry: a rank that has none refuses
//! the call. Nothing reads it but this rank's stream and its NIC, until the call is over.

use super::device_pool::Extent;
use super::enqueuer::{ContextState, DeviceCall, Enqueuer, Scratch};
use super::memory::MemoryShape;
use super::session::Session;
use crate::error::{CallKind, Error};
use crate::plan::RelayPlan;
use crate::schedule::SumMemory;

/// Pieces of the memory of a relay's sums.
#[derive(Clone, Copy, Debug)]
struct Pieces {
    memory: SumMemory,
    /// Rows of each sum, and their weights.
    tables: [u64; 2],
    /// Bytes of each of these.
    table_bytes: u64,
    end: u64,
}

impl Pieces {
    /// Of the sums of a relay, from byte `start` of its rank's memory on.
    fn new(start: u64, forward: &RelayPlan, top_k: u32, row_bytes: u64) -> Self {
        let (entries, sums) = (u64::from(forward.entries()), u64::from(forward.partials.count()));
        let behind = |at: u64, bytes: u64| (at + bytes).next_multiple_of(MemoryShape::STEP);
        let table_bytes = sums * u64::from(top_k) * 4;
        let outbox = behind(start, entries * row_bytes);
        let index = behind(outbox, sums * row_bytes);
        let weights = behind(index, table_bytes);
        let memory = SumMemory { outbox, pulled: Some(start) };
        Pieces { memory, tables: [index, weights], table_bytes, end: behind(weights, table_bytes) }
    }
}

impl Session {
    /// Whether relays sum rows that return in a call of this kind.
    pub fn sums_by_node(&self, kind: CallKind) -> bool {
        self.fixed.sizing(kind).partial_bytes.is_some()
    }
}

impl Enqueuer {
    /// Takes memory for the sums of this rank's relay, if it makes any in a return of this kind.
    ///
    /// # Errors
    /// As [`Session::take`].
    pub fn take_node_sums(&mut self, (kind, context): (CallKind, u32)) -> Result<(), Error> {
        let Enqueuer { common, kept, .. } = self;
        if common.sums_by_node(kind) {
            let kept = &mut kept[context as usize];
            let pieces = Pieces::of(common, kept, 0);
            kept.node_sums = Some(common.take(pieces.end)?);
        }
        Ok(())
    }
}

impl Pieces {
    fn of(common: &Session, kept: &ContextState, start: u64) -> Self {
        let spec = &common.fixed.spec;
        Pieces::new(start, &kept.forward, spec.top_k, spec.row_bytes())
    }
}

impl DeviceCall<'_> {
    /// Where this rank's relay sums in this call.
    pub fn sum_memory(&self) -> SumMemory {
        self.node_sums().map_or(SumMemory::default(), |pieces| pieces.memory)
    }

    fn node_sums(&self) -> Option<Pieces> {
        let Enqueuer { common, kept, .. } = &*self.enqueuer;
        let kept = &kept[self.context as usize];
        let start = kept.node_sums.as_ref().filter(|_| common.sums_by_node(self.tag.kind))?;
        Some(Pieces::of(common, kept, Extent::offset(start)))
    }

    /// Whether rows are multiplied with their weights where they are summed.
    pub fn weighs(&self) -> bool {
        self.enqueuer.common.weighs(self.tag.kind)
    }

    /// Collects the tables of the relay's sums.
    pub fn send_node_sums(&mut self) -> Result<(), Error> {
        let (pieces, weighs) = (self.node_sums(), self.weighs());
        let Some(Pieces { tables: [index_at, weights_at], table_bytes, .. }) = pieces else { return Ok(()) };
        let Enqueuer { common, engine, kept, scratch, .. } = &mut *self.enqueuer;
        let (shape, me) = (&common.shape, common.fixed.lanes.rank);
        let Scratch { relay_index, relay_weights, .. } = scratch;
        let forward = &kept[self.context as usize].forward;
        let weights = weighs.then_some(&mut *relay_weights);
        forward.list_pulled(me, common.fixed.spec.top_k, relay_index, weights);
        let [from_index, from_weights] = shape.host_relay_sums();
        common.host.write_words(from_index.0 as usize, bytemuck::cast_slice(relay_index))?;
        common.send(engine, (from_index, (index_at, table_bytes)), table_bytes)?;
        if weighs {
            common.host.write_words(from_weights.0 as usize, bytemuck::cast_slice(relay_weights))?;
            common.send(engine, (from_weights, (weights_at, table_bytes)), table_bytes)?;
        }
        engine.sum_by((index_at, weighs.then_some(weights_at)));
        Ok(())
    }
}
