//! Memory and counters that the calls of one instance use again, one after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;

use super::handle::{HostHandle, Inner};
use super::offload::{HostRelay, RelayRunner};
use crate::ep::agreement::GroupCounts;
use crate::ep::fixed::{CHUNKS, EpState};
use crate::ep::relay::RelayTask;
use crate::ep::report::LaneUse;
use crate::exec::HostStepper;
use crate::lane::Port;
use crate::memory::{Extent, Pool, ReleaseCheck};
use crate::plan::{InterNodeRows, RelayPlan, RelaySorter, SortedRouting};
use crate::rows::Stores;
use crate::schedule::{CallerTables, Calls, Flag};
use crate::world::SymmetricRange;

/// Handles whose memory is kept for the next dispatches.
const SPARE_HANDLES: usize = 64;

/// Called once all ranks have agreed on a call.
pub(in crate::ep) type OnAgreed = Box<dyn FnOnce() + Send + Sync>;

/// Memory that the calls of one instance use again.
pub(in crate::ep) struct Workspace {
    pub host: HostStepper,
    /// Does this rank's part for other nodes; there is none where there is only one.
    pub relay: Option<RelayRunner>,
    pub tables: CallerTables,
    pub sorted: SortedRouting,
    pub crossing: InterNodeRows,
    pub spans: RelaySorter,
    pub numbers: GroupCounts,
    /// The lanes, and how many ranks each reaches.
    pub lane_use: Arc<[LaneUse]>,
    /// Weight gradients.
    pub products: Vec<f32>,
    pub calls: Calls,
    pub licence: Arc<dyn ReleaseCheck>,
    /// Number that distinguishes handles of different instances within this process.
    pub instance: u64,
    pub spare: Arc<ArrayQueue<Inner>>,
    /// Hears that the running call is agreed on.
    pub on_agreed: Option<OnAgreed>,
}

impl Workspace {
    pub fn new(fixed: &Arc<EpState>, range: SymmetricRange) -> Self {
        static INSTANCES: AtomicU64 = AtomicU64::new(0);
        let paths = fixed.paths();
        let readers = paths.local_peers().collect();
        Workspace {
            host: HostStepper::new(fixed.spec.dtype, fixed.shared.recorder.clone()),
            relay: paths.rails().then(|| Self::runner(fixed)),
            tables: CallerTables::new(paths, CHUNKS),
            sorted: SortedRouting::default(),
            crossing: InterNodeRows::default(),
            spans: RelaySorter::default(),
            numbers: GroupCounts::new(fixed),
            lane_use: LaneUse::of(&fixed.lanes).into(),
            products: Vec::new(),
            calls: Calls::new(fixed.shared.hub.epoch()),
            licence: Arc::new(Readers { port: Arc::clone(&fixed.port), readers, _range: range }),
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            spare: Arc::new(ArrayQueue::new(SPARE_HANDLES)),
            on_agreed: None,
        }
    }

    fn runner(fixed: &Arc<EpState>) -> RelayRunner {
        let host = HostStepper::new(fixed.spec.dtype, fixed.shared.recorder.clone());
        RelayRunner::new(HostRelay::new(fixed, host))
    }

    /// Goes on with other fixed state.
    pub fn adopt(&mut self, fixed: &Arc<EpState>) {
        self.numbers = GroupCounts::new(fixed);
        self.relay = self.relay.is_some().then(|| Self::runner(fixed));
    }

    /// Waits until an offloaded relay has finished; what it brings back.
    pub fn join_relay(&mut self) -> Option<(RelayTask, Arc<RelayPlan>)> {
        self.relay.as_mut()?.join()
    }

    /// Memory of an old handle, or new memory.
    pub fn spare_handle(&self) -> Inner {
        self.spare.pop().unwrap_or_default()
    }

    pub fn handle_of(&self, inner: Inner, pool: &Arc<Pool>) -> HostHandle {
        HostHandle::new(inner, Arc::clone(pool), Arc::clone(&self.spare), Arc::clone(&self.lane_use))
    }

    /// Gives a chunk that peers were offered in the running call back to the pool, once they have
    /// read it.
    pub fn retire(&self, chunk: Extent, pool: &Pool) {
        pool.retire(chunk, &self.licence, self.calls.value());
    }
}

impl EpState {
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

/// The words by which local peers say that they have read what this rank offered.
struct Readers {
    port: Arc<Port>,
    readers: Vec<u32>,
    /// The control window outlives the instance until its last readers have finished.
    _range: SymmetricRange,
}

impl ReleaseCheck for Readers {
    fn is_released(&self, value: u64) -> bool {
        self.readers
            .iter()
            .all(|&reader| self.port.flag(reader, Flag::Read).is_ok_and(|flag| flag.value() >= value))
    }
}
