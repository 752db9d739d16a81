//! The object that calls are made on, and what it keeps from call to call.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;

use super::builder::Spec;
use super::gather::Gather;
use super::handle::Inner;
use super::meeting::{Meeting, Numbers};
use super::proxy::{HostRelay, Seat};
use super::{ExpertParallelBuilder, Handle, LaneUse, TokenBuffer};
use crate::error::{CallKind, Error, MemoryError, PlanError};
use crate::exec::Host;
use crate::lane::{Lanes, Part, Port, Window};
use crate::memory::{Extent, Licence, Pool};
use crate::plan::{
    Bins, Chunk, Crossing, ExpertMap, Frame, Layout, Order, Sizes, Sizing, Sorted, Spans, Strategy,
};
use crate::rows::Stores;
use crate::schedule::{
    Caller, CallerTables, Calls, Control, DispatchSkeleton, Flag, ReturnSkeleton, Setting, WindowId,
};
use crate::topology::{Paths, Route};
use crate::world::{Group, Shared, SymmetricRange};

/// Handles whose memory is kept for the next dispatches.
const SPARE_HANDLES: usize = 64;

/// MoE dispatch and combine over a group of ranks.
///
/// ```
/// use half::bf16;
/// use sidelane::{Dtype, World, gate::Routing};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut ep = sidelane::ExpertParallel::builder(&world.all()?)?
///             .experts(4).top_k(2).hidden(8).dtype(Dtype::Bf16).build()?;
///         let x = vec![bf16::ONE; 3 * 8];                                   // 3 tokens of 8 elements
///         let routing = Routing::new(2, vec![0, 3, 1, 2, 3, 0], vec![0.5; 6])?;
///         let (rows, handle) = ep.dispatch(&x, &routing)?;                  // rows of this rank's two experts
///         let mut y = handle.output()?;
///         y.rows_mut::<bf16>()?.copy_from_slice(rows.rows::<bf16>()?);      // experts that change nothing
///         let out = ep.combine::<bf16>(y, &handle)?;
///         assert_eq!(out, vec![bf16::from_f32(2.0); 3 * 8]);                // each token came back from 2 experts
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
pub struct ExpertParallel {
    pub(super) fixed: Arc<Fixed>,
    pub(super) skeletons: Arc<Skeletons>,
    pub(super) host: Host,
    /// Does this rank's part for other nodes; there is none where there is only one.
    pub(super) relay: Option<Seat>,
    pub(super) tables: CallerTables,
    pub(super) sorted: Sorted,
    pub(super) crossing: Crossing,
    pub(super) spans: Spans,
    pub(super) numbers: Numbers,
    /// The lanes, and how many ranks each reaches.
    pub(super) lane_use: Vec<LaneUse>,
    /// Scratch for weight gradients.
    pub(super) products: Vec<f32>,
    pub(super) calls: Calls,
    pub(super) licence: Arc<dyn Licence>,
    /// Tells handles of different instances apart, within this process.
    pub(super) instance: u64,
    pub(super) spare: Arc<ArrayQueue<Inner>>,
    /// How rows go out, if not by exchange.
    pub(super) gather: Option<Box<Gather>>,
}

/// What is the same in every call, for the caller and for its relay.
#[derive(Debug)]
pub(super) struct Fixed {
    pub shared: Arc<Shared>,
    pub lanes: Arc<Lanes>,
    pub port: Arc<Port>,
    pub control: Control,
    pub spec: Spec,
    pub bins: Bins,
    pub chunks: u8,
    pub room: Room,
    /// The window in which what crosses lands.
    pub far: WindowId,
    /// Rows that cross lie in memory of devices.
    pub on_devices: bool,
}

/// Where rows are that come from other nodes, or go there.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ground<'w> {
    /// In the pools of the heaps; or in memory of devices of one node.
    Near,
    /// In memory of devices that no rail reaches: they cross to its twin.
    Twin(&'w Window),
    /// In memory of devices, as rails reach it; and the planner's desk, where engines relay.
    Devices(&'w Window, Option<&'w Window>),
}

/// The memory in which rows land, as errors speak of it. It is equally large everywhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub total: u64,
    pub space: &'static str,
    pub setting: &'static str,
}

impl Room {
    /// That a rank has no room for `asked` bytes, but for `free`.
    pub fn lacks(self, rank: u32, asked: u64, free: u64) -> Error {
        let Room { total, space, setting } = self;
        MemoryError::OutOfSpace { rank, asked, free, total, space, setting }.into()
    }
}

/// In how many parts a block goes to its relay: enough that the relay is busy while the rest is under way.
const CHUNKS: u8 = 4;

/// The programs of this rank.
#[derive(Debug)]
pub(super) struct Skeletons {
    pub dispatch: DispatchSkeleton,
    pub ret: ReturnSkeleton,
}

impl Fixed {
    /// What an owner of this spec needs, and its control window. Collective.
    pub fn new(
        group: &Group,
        spec: Spec,
        room: Room,
        ground: Ground<'_>,
    ) -> Result<(Self, SymmetricRange), Error> {
        let lanes = group.lanes(spec.route)?;
        let paths = lanes.paths();
        let max_entries = u64::from(spec.max_tokens) * u64::from(spec.entries_of_token());
        let bins = Bins::of_layout(spec.layout, &spec.map, spec.order, &lanes.nodes);
        let control =
            Control::new(&paths, &bins, max_entries, spec.sizing(CallKind::Dispatch, None).note_bytes());
        let range = group.take_symmetric(control.bytes())?;
        let (pool, twin, far) = match ground {
            Ground::Near => (pool_window(group), None, WindowId::POOL),
            Ground::Twin(twin) => (pool_window(group), Some(twin), WindowId::TWIN),
            Ground::Devices(pool, desk) => (pool.clone(), desk, WindowId::POOL),
        };
        let on_devices = !matches!(ground, Ground::Near);
        let mut windows = vec![pool, range.window()];
        windows.extend(twin.cloned());
        let port = Arc::new(Port::new(Arc::clone(&lanes), windows, WindowId::CONTROL));
        let shared = Arc::clone(&group.shared);
        Ok((Fixed { shared, lanes, port, control, spec, bins, chunks: CHUNKS, room, far, on_devices }, range))
    }

    /// This rank among its nodes.
    pub fn paths(&self) -> Paths<'_> {
        self.lanes.paths()
    }

    /// What the placement of every call has in common.
    pub fn frame(&self) -> Frame<'_> {
        Frame {
            bins: &self.bins,
            paths: self.paths(),
            align: self.spec.align,
            chunks: self.chunks,
            sizing: self.sizing(CallKind::Dispatch),
            mode: self.spec.mode,
        }
    }

    /// Sizes of what moves in a call of this kind.
    pub fn sizing(&self, kind: CallKind) -> Sizing {
        self.spec.sizing(kind, self.partial_bytes())
    }

    /// Whether engines hand rows on: each rank then has [`Arrivals`](crate::plan::Arrivals) behind its rows.
    pub fn arrives(&self) -> bool {
        self.on_devices && self.spec.route == Route::Pxn
    }

    /// Whether rows cross from device to device.
    pub fn straight(&self) -> bool {
        self.on_devices && self.far == WindowId::POOL
    }

    /// What lands if so many rows do. Where memory is that of a device and there is a budget, notes lie behind all of it.
    pub fn landing(&self, rows: u32) -> Chunk {
        let fixed = self.spec.mode.budget().filter(|_| self.on_devices);
        self.sizing(CallKind::Dispatch).landing(fixed.unwrap_or(rows))
    }

    /// Bytes in which `rows` rows can land with all that must lie behind them: `staged` rows to be handed on, or arrivals.
    pub fn extent_bytes(&self, kind: CallKind, rows: u32, staged: u32) -> u64 {
        let sizing = self.sizing(kind);
        if !self.arrives() {
            return sizing.extent_bytes(rows, staged);
        }
        self.landing(rows).staging().saturating_add(u64::from(staged) * sizing.row_bytes)
    }

    /// What this rank receives at most: as many rows as there are slots (of these `sizes`) or a budget; else, if every token of
    /// every rank chooses as many of its experts as it can. And what it hands on, if all cross that can.
    pub fn most_bytes(&self, kind: CallKind, sizes: &Sizes) -> u64 {
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

    /// Bytes of a partial sum, where relays sum: they do where they serve more than themselves.
    pub fn partial_bytes(&self) -> Option<u64> {
        let (spec, paths) = (&self.spec, self.paths());
        let sums = spec.order != Order::Expert && paths.route() == Route::Pxn && paths.rails();
        sums.then(|| (spec.hidden * spec.wire.size()) as u64)
    }

    /// What everybody says on entering the running call, of this kind.
    pub fn meeting(&self, calls: Calls, kind: CallKind) -> Meeting<'_> {
        let setting = Setting {
            paths: self.paths(),
            control: &self.control,
            sizing: self.sizing(kind),
            chunks: self.chunks,
            parity: calls.parity(),
            far: self.far,
        };
        Meeting { fixed: self, setting, calls }
    }

    /// Writes the headers of this rank's blocks.
    pub fn describe_blocks(&self, calls: Calls, layout: &Layout, sorted: &Sorted) -> Result<(), Error> {
        let Fixed { port, control, bins, .. } = self;
        let paths = self.paths();
        for ((nth, relay), block) in (0..).zip(paths.relays()).zip(&layout.blocks) {
            let at = control.header_out(nth, calls.parity());
            port.write(WindowId::CONTROL, at, &[block.rows, block.entries(), block.first])?;
            port.write(WindowId::CONTROL, at + Control::LANDED, &block.landed)?;
            port.write(WindowId::CONTROL, at + control.segments(), &block.segments)?;
            if paths.route() == Route::Pxn {
                port.write(WindowId::CONTROL, at + control.index(), &block.index)?;
                let mut to = at + control.notes(block.entries());
                for bins in paths.served_by(relay).iter().map(|&rank| bins.of(rank)) {
                    let notes = sorted.notes_of(bins);
                    port.write(WindowId::CONTROL, to, notes)?;
                    to += size_of_val(notes) as u64;
                }
            }
        }
        Ok(())
    }

    /// An error amid a call ends the world.
    pub fn fail(&self, error: Error) -> Error {
        self.shared.fail(&self.lanes.world_ranks, error)
    }
}

impl ExpertParallel {
    /// Starts to describe one.
    ///
    /// # Errors
    /// [`PlanError`] if the group is empty.
    pub fn builder(group: &Group) -> Result<ExpertParallelBuilder<'_>, PlanError> {
        ExpertParallelBuilder::new(group)
    }

    pub(super) fn new(group: &Group, spec: Spec) -> Result<Self, Error> {
        let gather = match spec.strategy {
            Strategy::Exchange => None,
            Strategy::Gather => Some(Box::new(Gather::new(group, &spec)?)),
        };
        let total = group.shared.heap.pool().total();
        let room = Room { total, space: "pool", setting: "SIDELANE_HEAP" };
        let (fixed, range) = Fixed::new(group, spec, room, Ground::Near)?;
        let fixed = Arc::new(fixed);
        let paths = fixed.paths();
        let caller = Caller::new(paths, CHUNKS);
        let skeletons = Skeletons { dispatch: caller.dispatch(), ret: caller.ret() };
        let readers = paths.locals().collect();
        let tables = CallerTables::new(paths, CHUNKS);
        let rails = paths.rails();
        let licence = Arc::new(Readers { port: Arc::clone(&fixed.port), readers, _range: range });
        static INSTANCES: AtomicU64 = AtomicU64::new(0);
        let host = Host::new(fixed.spec.dtype, group.shared.recorder.clone());
        Ok(ExpertParallel {
            host,
            relay: rails.then(|| Self::seat(&fixed)),
            tables,
            sorted: Sorted::default(),
            crossing: Crossing::default(),
            spans: Spans::default(),
            numbers: Numbers::new(&fixed),
            lane_use: LaneUse::of(&fixed.lanes),
            products: Vec::new(),
            calls: Calls::new(group.shared.hub.epoch()),
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            spare: Arc::new(ArrayQueue::new(SPARE_HANDLES)),
            skeletons: Arc::new(skeletons),
            licence,
            gather,
            fixed,
        })
    }

    pub(super) fn seat(fixed: &Arc<Fixed>) -> Seat {
        let host = Host::new(fixed.spec.dtype, fixed.shared.recorder.clone());
        Seat::new(HostRelay::new(fixed, host))
    }

    /// This rank's position in the group.
    pub fn rank(&self) -> u32 {
        self.fixed.lanes.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.fixed.lanes.ranks()
    }

    /// Where experts live.
    pub fn expert_map(&self) -> &ExpertMap {
        &self.fixed.spec.map
    }

    /// Elements of a row.
    pub fn hidden(&self) -> usize {
        self.fixed.spec.hidden
    }

    /// Choices per token.
    pub fn top_k(&self) -> u32 {
        self.fixed.spec.top_k
    }

    /// A buffer for rows to be dispatched, which network cards read in place.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError).
    pub fn token_buffer(&self, tokens: u32) -> Result<TokenBuffer, Error> {
        let row_bytes = self.spec().sizing(CallKind::Dispatch, None).row_bytes;
        let extent = self.pool().take(u64::from(tokens) * row_bytes)?;
        Ok(TokenBuffer { extent, tokens, row_bytes })
    }

    /// The pool rows are received in.
    pub fn pool(&self) -> &Arc<Pool> {
        self.fixed.shared.heap.pool()
    }

    /// The lanes of this group, and how many ranks each reaches.
    pub fn lanes(&self) -> &[LaneUse] {
        &self.lane_use
    }

    pub(super) fn spec(&self) -> &Spec {
        &self.fixed.spec
    }

    pub(super) fn fail(&self, error: Error) -> Error {
        self.fixed.fail(error)
    }

    /// How to store what this rank, and each of its neighbours, writes in a call.
    pub(super) fn stores(&self, bytes: u64) -> Stores {
        let neighbours = self.fixed.paths().locals().count() as u64 + 1;
        Stores::of(bytes * neighbours, self.fixed.shared.options.config.cache)
    }

    /// Memory of an old handle, or new memory.
    pub(super) fn spare_handle(&self) -> Inner {
        self.spare.pop().unwrap_or_default()
    }

    pub(super) fn handle_of(&self, inner: Inner) -> Handle {
        Handle::new(inner, Arc::clone(self.pool()), Arc::clone(&self.spare))
    }

    /// Gives a chunk that peers were offered in the running call back to the pool, once they have read it.
    pub(super) fn retire(&self, chunk: Extent) {
        self.pool().retire(chunk, &self.licence, self.calls.value());
    }
}

impl std::fmt::Debug for ExpertParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertParallel").field("rank", &self.rank()).field("spec", self.spec()).finish()
    }
}

/// The pools of all members as a window: each from its start to the end of its heap.
fn pool_window(group: &Group) -> Window {
    let heap = &group.shared.heap;
    let (offset, len) = (heap.pool().start(), heap.pool().total());
    let parts = group.ranks().iter().map(|&member| Part { member, region: 0, offset, len }).collect();
    Window { mapped: Arc::clone(heap.mapped()), parts, of_devices: false }
}

/// The words by which this rank's neighbours say that they have read what it offered.
struct Readers {
    port: Arc<Port>,
    readers: Vec<u32>,
    /// The control window outlives the instance until the last licence has come.
    _range: SymmetricRange,
}

impl Licence for Readers {
    fn granted(&self, value: u64) -> bool {
        self.readers
            .iter()
            .all(|&reader| self.port.flag(reader, Flag::Read).is_ok_and(|flag| flag.value() >= value))
    }
}
