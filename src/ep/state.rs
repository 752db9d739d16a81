//! State that stays the same from call to call: settings, lanes and windows, and values derived
//! from them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::call_agreement::CallAgreement;
use crate::ep::builder::Spec;
use crate::error::{CallKind, Error, MemoryError, PlanError};
use crate::lane::{Lanes, MappedWindow, Port, WindowPart};
use crate::memory::Pool;
use crate::plan::{
    Bins, Block, DispatchLayout, ExpertMap, PlanContext, ReceiveSizes, RowBuffer, RowSizes, SortedRouting,
};
use crate::rows::Stores;
use crate::schedule::{CallProperties, Calls, ControlLayout, FillContext, Payload, WindowId};
use crate::topology::{Paths, Route};
use crate::world::{Group, SymmetricRange, WorldState};

/// State that is the same in every call, for the caller and for its relay.
#[derive(Clone, Debug)]
pub(in crate::ep) struct EpState {
    pub shared: Arc<WorldState>,
    pub lanes: Arc<Lanes>,
    pub port: Arc<Port>,
    pub control: ControlLayout,
    pub spec: Spec,
    pub bins: Bins,
    pub chunks: u8,
    pub room: ReceiveMemory,
    /// The window in which what crosses lands.
    pub far: WindowId,
    /// Rows that cross lie in memory of devices.
    pub on_devices: bool,
    /// Callers' threads enqueue on devices: metadata lands in memory of its handle and not behind
    /// the rows, and weights return as rows do.
    pub enqueues: bool,
}

/// Where rows are that come from other nodes, or go there.
#[derive(Clone, Copy, Debug)]
pub(in crate::ep) enum RowMemory<'w> {
    /// In the pools of the heaps; or in memory of devices of one node.
    Near,
    /// In memory of devices that no NIC reaches: rows cross by its host staging.
    HostStaging(&'w MappedWindow),
    /// In memory of devices, as the lane reaches it; and the enqueuer's scratch, where engines
    /// relay.
    Devices(&'w MappedWindow, Option<&'w MappedWindow>),
}

/// The memory in which rows land, as errors speak of it. It is equally large everywhere.
#[derive(Clone, Debug)]
pub(in crate::ep) struct ReceiveMemory {
    /// Its size, which may grow.
    pub total: Arc<AtomicU64>,
    pub space: &'static str,
    pub setting: &'static str,
}

impl ReceiveMemory {
    /// The pool of this rank's heap.
    pub fn pool(total: u64) -> Self {
        ReceiveMemory { total: Arc::new(total.into()), space: "pool", setting: "SIDELANE_HEAP" }
    }

    /// A device heap.
    pub fn device_heap(total: u64) -> Self {
        ReceiveMemory { total: Arc::new(total.into()), space: "device heap", setting: "device_heap" }
    }

    /// That a rank has no room for `asked` bytes, but for `free`.
    pub fn lacks(&self, rank: u32, asked: u64, free: u64) -> Error {
        let ReceiveMemory { total, space, setting } = self;
        // Relaxed: a figure of the message.
        let (total, space, setting) = (total.load(Ordering::Relaxed), *space, *setting);
        MemoryError::OutOfSpace { rank, asked, free, total, space, setting }.into()
    }
}

impl EpState {
    /// State for an owner of this spec, with its control window. Collective.
    pub fn new(
        group: &Group,
        spec: Spec,
        room: ReceiveMemory,
        ground: RowMemory<'_>,
    ) -> Result<(Self, SymmetricRange), Error> {
        let lanes = group.lanes(spec.route)?;
        let paths = lanes.paths();
        let max_entries = u64::from(spec.max_tokens) * u64::from(spec.entries_of_token());
        let bins = Bins::of_layout(spec.layout, &spec.map, spec.sum_order, &lanes.nodes);
        let control = ControlLayout::new(
            &paths,
            &bins,
            max_entries,
            spec.sizing(CallKind::Dispatch, None).metadata_bytes(),
        )
        .with_rank_sums(spec.rank_sums);
        let range = group.take_symmetric(control.bytes())?;
        let (pool, host_staging, far) = match ground {
            RowMemory::Near => (pool_window(group), None, WindowId::POOL),
            RowMemory::HostStaging(host_staging) => {
                (pool_window(group), Some(host_staging), WindowId::HOST_STAGING)
            }
            RowMemory::Devices(pool, enqueuer_scratch) => (pool.clone(), enqueuer_scratch, WindowId::POOL),
        };
        let on_devices = !matches!(ground, RowMemory::Near);
        let chunks = match on_devices {
            true => Block::chunks_for_engines(
                u64::from(spec.max_tokens) * spec.sizing(CallKind::Dispatch, None).row_bytes,
            ),
            false => Block::CHUNKS,
        };
        let mut windows = vec![pool, range.window()];
        windows.extend(host_staging.cloned());
        let port = Arc::new(Port::new(Arc::clone(&lanes), windows, WindowId::CONTROL));
        let shared = Arc::clone(&group.shared);
        let fixed = EpState {
            shared,
            lanes,
            port,
            control,
            spec,
            bins,
            chunks,
            room,
            far,
            on_devices,
            enqueues: false,
        };
        Ok((fixed, range))
    }

    /// This rank among its nodes.
    pub fn paths(&self) -> Paths<'_> {
        self.lanes.paths()
    }

    /// Parameters that the placement of every call shares.
    pub fn frame(&self) -> PlanContext<'_> {
        PlanContext {
            bins: &self.bins,
            paths: self.paths(),
            align: self.spec.align,
            chunks: self.chunks,
            sizing: self.sizing(CallKind::Dispatch),
            mode: self.spec.mode,
        }
    }

    /// Sizes of what moves in a call of this kind. Where callers' threads enqueue, weights return
    /// as rows do.
    pub fn sizing(&self, kind: CallKind) -> RowSizes {
        let sizing = self.spec.sizing(kind, self.partial_bytes());
        match self.enqueues && CallProperties::of(kind).payload == Payload::Weights {
            true => sizing.of_weights(),
            false => sizing,
        }
    }

    /// Whether engines relay rows: each rank then has
    /// [`RelayPermutation`](crate::plan::RelayPermutation) behind its rows.
    pub fn arrives(&self) -> bool {
        self.on_devices && self.spec.route == Route::Pxn
    }

    /// Whether rows cross from device to device.
    pub fn gpu_direct(&self) -> bool {
        self.on_devices && self.far == WindowId::POOL
    }

    /// Memory of so many rows that landed in a call of this kind.
    pub fn landing(&self, kind: CallKind, rows: u32) -> RowBuffer {
        let landing = self.sizing(kind).landing(rows);
        if self.enqueues { landing.without_metadata() } else { landing }
    }

    /// Bytes in which `rows` rows can land with all memory behind them: `staged` rows to relay, or
    /// arrivals. Where metadata has memory of its own and nothing else lands, that.
    pub fn extent_bytes(&self, kind: CallKind, rows: u32, staged: u32) -> u64 {
        let sizing = self.sizing(kind);
        match (self.enqueues, self.arrives()) {
            (true, _) if sizing.row_bytes == 0 => u64::from(rows) * sizing.metadata_bytes(),
            (_, true) => {
                self.landing(kind, rows).staging().saturating_add(u64::from(staged) * sizing.row_bytes)
            }
            (true, false) => self.landing(kind, rows).bytes(),
            (false, false) => sizing.extent_bytes(rows, staged),
        }
    }

    /// The most that this rank can receive: as many rows as there are slots (of these `sizes`) or a
    /// budget; otherwise the rows if every token of every rank chooses as many of its experts as it
    /// can. With the most that it can relay.
    pub fn most_bytes(&self, kind: CallKind, sizes: &ReceiveSizes) -> u64 {
        let (spec, paths, rank) = (&self.spec, self.paths(), self.lanes.rank);
        if spec.mode.slots().is_some() {
            return self.extent_bytes(kind, sizes.rows[rank as usize], sizes.staged_at(rank));
        }
        let bins = self.bins.of(rank).len() as u32;
        let (ranks, tokens) = (self.lanes.ranks(), spec.max_tokens);
        let rows = ranks.saturating_mul(tokens).saturating_mul(spec.rows_of_token(bins));
        let rows = rows.saturating_add(bins.saturating_mul(spec.align - 1));
        let rows = rows.min(spec.mode.budget().unwrap_or(u32::MAX));
        let blocks = if spec.route == Route::Pxn { paths.sources().count() as u32 } else { 0 };
        self.extent_bytes(kind, rows, blocks.saturating_mul(tokens))
    }

    /// Bytes of a partial sum, where relays sum: they do where they serve more than themselves. On
    /// devices, only where that [pays](Spec::gains_by_node_sums).
    pub fn partial_bytes(&self) -> Option<u64> {
        let (spec, paths) = (&self.spec, self.paths());
        let relays = paths.route() == Route::Pxn && paths.is_multi_node() && !self.on_devices;
        let sums = (spec.sum_order.has_partials() && relays) || spec.node_sums;
        sums.then(|| (spec.hidden * spec.partial_dtype.size()) as u64)
    }

    /// The entries of all ranks into the running call, of this kind.
    pub fn agreement(&self, calls: Calls, kind: CallKind) -> CallAgreement<'_> {
        let setting = FillContext {
            paths: self.paths(),
            control: &self.control,
            sizing: self.sizing(kind),
            chunks: self.chunks,
            parity: calls.parity(),
            far: self.far,
            metadata: None,
        };
        CallAgreement { fixed: self, setting, calls, said: &[] }
    }

    /// Writes the headers of this rank's blocks.
    pub fn describe_blocks(
        &self,
        calls: Calls,
        layout: &DispatchLayout,
        sorted: &SortedRouting,
    ) -> Result<(), Error> {
        let EpState { port, control, bins, .. } = self;
        let paths = self.paths();
        for ((nth, relay), block) in (0..).zip(paths.relays()).zip(&layout.blocks) {
            let at = control.header_out(nth, calls.parity());
            port.write(WindowId::CONTROL, at, &[block.rows, block.entries(), block.first])?;
            port.write(WindowId::CONTROL, at + ControlLayout::LANDED, &block.landed)?;
            if self.spec.rank_sums {
                port.write(WindowId::CONTROL, at + control.rank_sums(), &block.rank_sums)?;
            }
            port.write(WindowId::CONTROL, at + control.segments(), &block.segments)?;
            if paths.route() == Route::Pxn {
                port.write(WindowId::CONTROL, at + control.index(), &block.index)?;
                let mut to = at + control.metadata(block.entries());
                for bins in paths.served_by(relay).iter().map(|&rank| bins.of(rank)) {
                    let metadata = sorted.metadata_of(bins);
                    port.write(WindowId::CONTROL, to, metadata)?;
                    to += size_of_val(metadata) as u64;
                }
            }
        }
        Ok(())
    }

    /// Whether another expert map may take the place of this one.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for one of other ranks or experts, or with more or fewer slots.
    pub fn check_map(&self, map: &ExpertMap) -> Result<(), PlanError> {
        let old = &self.spec.map;
        let pairs = [
            ("ranks of the expert map", map.ranks(), old.ranks(), "the size of the group"),
            ("experts of the expert map", map.experts(), old.experts(), "as many as before"),
            ("slots of the expert map", map.slots(), old.slots(), "as many as before"),
        ];
        for (parameter, seen, before, expected) in pairs {
            if seen != before {
                return Err(PlanError::BadParameter { parameter, seen: seen.into(), expected });
            }
        }
        Ok(())
    }

    /// The state with another expert map.
    pub fn with_map(&self, map: ExpertMap) -> EpState {
        let mut fixed = EpState::clone(self);
        fixed.spec.map = Arc::new(map);
        fixed.bins =
            Bins::of_layout(fixed.spec.layout, &fixed.spec.map, fixed.spec.sum_order, &fixed.lanes.nodes);
        fixed
    }

    /// An error amid a call ends the world.
    pub fn fail(&self, error: Error) -> Error {
        self.shared.fail(&self.lanes.world_ranks, error)
    }

    /// How to store what this rank, and each of its local peers, writes in a call.
    pub fn stores(&self, bytes: u64) -> Stores {
        let members = self.paths().local_peers().count() as u64 + 1;
        Stores::of(bytes * members, self.shared.options.config.cache)
    }

    /// The pool that rows are received in.
    pub fn pool(&self) -> &Arc<Pool> {
        self.shared.heap.pool()
    }
}

/// The pools of all members as a window: each from its start to the end of its heap.
fn pool_window(group: &Group) -> MappedWindow {
    let heap = &group.shared.heap;
    let (offset, len) = (heap.pool().start(), heap.pool().total());
    let parts = group.ranks().iter().map(|&member| WindowPart { member, region: 0, offset, len }).collect();
    MappedWindow { mapped: Arc::clone(heap.mapped()), parts, of_devices: false }
}
