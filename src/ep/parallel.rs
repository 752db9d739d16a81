//! The object that calls are made on, and what it keeps from call to call.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;

use super::builder::Spec;
use super::call::Agreed;
use super::fixed::{CHUNKS, Fixed, Ground, Room};
use super::gather::Gather;
use super::handle::Inner;
use super::meeting::Numbers;
use super::proxy::{HostRelay, Seat};
use super::{ExpertParallelBuilder, Handle, LaneUse, TokenBuffer};
use crate::error::{CallKind, Error, PlanError};
use crate::exec::Host;
use crate::lane::Port;
use crate::memory::{Extent, Licence, Pool};
use crate::plan::{Crossing, ExpertMap, Sorted, Spans, Strategy};
use crate::rows::Stores;
use crate::schedule::{Caller, CallerTables, Calls, DispatchSkeleton, Flag, ReturnSkeleton};
use crate::world::{Group, SymmetricRange};

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
    /// Who hears that the running call is agreed on.
    pub(super) agreed: Option<Agreed>,
}

/// The programs of this rank.
#[derive(Debug)]
pub(super) struct Skeletons {
    pub dispatch: DispatchSkeleton,
    pub ret: ReturnSkeleton,
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
            agreed: None,
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
