//! Results of the enqueuer's calls: rows, placement, outputs, and how each call went.
//!
//! ```text
//!   EnqueuedDispatch --finish--> EnqueuedRows, EnqueuedHandle --output--> EnqueuedOutput
//!                     all share one Lease: the context is free when the last of them is gone
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device_pool::{Extent, Owed};
use super::dispatch_planner::Planner;
use super::enqueuer::Outputs;
use super::memory::StreamFlag;
use super::session::{ContextProgress, LiveHandle, PlacementInfo, Session};
use crate::device::{DeviceRange, Kernels};
use crate::dtype::Dtype;
use crate::ep::report::{CallKernels, NO_KERNELS};
use crate::ep::{CallExecutor, LaneUse, Report, Status};
use crate::error::{CallKind, Error, PlanError};
use crate::exec::EnqueueCounts;
use crate::plan::RowBuffer;
use crate::schedule::call_program::CallMachine;
use crate::schedule::{CallProperties, Payload};

/// A context, as long as anything of its dispatch is alive: rows, handle and outputs share it. They
/// may outlive the instance, so it owns what they use of that. The instance has one for each
/// context, and lends it again when no result shares it any more.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    pub common: Arc<Session>,
    pub context: u32,
    /// Which dispatch of the exchange it is.
    pub call: u64,
    pub tokens: u32,
    pub planner: Planner,
    /// The kernel that packs its rows.
    pub packs: &'static str,
    pub lanes: Arc<[LaneUse]>,
}

impl Lease {
    /// That of a context, for a dispatch to fill.
    pub fn new(common: &Arc<Session>, context: u32, lanes: &Arc<[LaneUse]>) -> Self {
        let (common, lanes, planner) = (Arc::clone(common), Arc::clone(lanes), Planner::default());
        Lease { common, context, call: 0, tokens: 0, planner, packs: "", lanes }
    }

    /// Makes it that of a dispatch.
    pub fn fill(
        &mut self,
        common: &Arc<Session>,
        call: u64,
        (tokens, planner, packs): (u32, Planner, &'static str),
    ) {
        self.common.clone_from(common);
        (self.call, self.tokens, self.planner, self.packs) = (call, tokens, planner, packs);
    }

    /// How the last calls of its context went.
    ///
    /// # Errors
    /// The cause of a failed world.
    fn told(&self) -> Result<MutexGuard<'_, ContextProgress>, Error> {
        self.common.fixed.shared.hub.health().check()?;
        Ok(self.common.contexts[self.context as usize].told())
    }

    /// A report of what was enqueued.
    fn report(&self, enqueued: EnqueueCounts, kernels: CallKernels) -> Report {
        let (host_staged, registration) = (self.common.no_gpu_direct, self.common.registration);
        let kernels = kernels.into_iter().flatten().collect();
        let (lanes, executor) = (self.lanes.to_vec(), CallExecutor::Enqueuer);
        let max_blocks = self.common.fixed.spec.max_blocks;
        let handle_bytes = self.common.shape.context_bytes();
        let report = Report { executor, lanes, enqueued, kernels, max_blocks, ..Report::default() };
        Report { handle_bytes, host_staged, registration, ..report }
    }

    /// The status word of the context, as devices read it.
    fn status_word(&self) -> Result<DeviceRange, Error> {
        Ok(self.common.host_piece((self.common.shape.flag(self.context, StreamFlag::Status), 4))?)
    }
}

/// A dispatch that is enqueued.
#[derive(Debug)]
pub(in crate::ep) struct EnqueuedDispatch {
    pub(super) lease: Arc<Lease>,
    pub(super) kind: CallKind,
    /// Error of this rank's input.
    pub(super) refused: Option<Error>,
    /// Where the call is.
    pub(super) machine: CallMachine,
    /// Tokens that are packed in the second half.
    pub(super) x: Option<(DeviceRange, Dtype)>,
}

impl EnqueuedDispatch {
    /// Rows and placement of a call that is served.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`](crate::ExpertParallel::dispatch). After those that leave the
    /// world usable the stream goes on with no rows, and the status word says why.
    pub(super) fn finish(self) -> Result<(EnqueuedRows, EnqueuedHandle), Error> {
        let (placement, extent) = self.placed()?;
        let extent = extent.ok_or(PlanError::RefusedHere)?;
        let rows = EnqueuedRows::new(&self.lease, (self.kind, placement.rows), extent)?;
        let handle = EnqueuedHandle::new(self.lease, placement);
        handle.owe_output();
        Ok((rows, handle))
    }

    /// The layout alone: no rows came.
    ///
    /// # Errors
    /// As [`EnqueuedDispatch::finish`].
    pub(super) fn prepared(self) -> Result<EnqueuedHandle, Error> {
        let (placement, _) = self.placed()?;
        Ok(EnqueuedHandle::new(self.lease, placement))
    }

    /// How the call went: the placement, and where rows land.
    ///
    /// # Errors
    /// As [`EnqueuedDispatch::finish`].
    pub(super) fn placed(&self) -> Result<(PlacementInfo, Option<Extent>), Error> {
        let mut told = self.lease.told()?;
        match (told.refused.take(), &self.refused) {
            (Some(Error::Plan(PlanError::RefusedHere)), Some(own)) => Err(own.clone()),
            (Some(error), _) => Err(error),
            (None, _) => Ok((std::mem::take(&mut told.placement), told.extent.take())),
        }
    }
}

/// Rows that were received, `[rows, hidden]`: (local expert, source rank, token). They are there
/// for what is enqueued on the exchange's stream after the dispatch. Their memory is given back
/// when this is dropped, to calls enqueued later.
#[derive(Debug)]
pub(in crate::ep) struct EnqueuedRows {
    memory: DeviceRange,
    weights: DeviceRange,
    /// Rank-major: the local expert of each row and choice.
    experts: Option<DeviceRange>,
    counts: DeviceRange,
    landing: RowBuffer,
    /// Where engines relay: rows as they arrived, and which is which.
    arrived: Option<(DeviceRange, DeviceRange)>,
    _extent: Extent,
    _lease: Arc<Lease>,
}

impl EnqueuedRows {
    /// Rows that a call of this kind brings along a layout, where this extent lies.
    pub(super) fn new(
        lease: &Arc<Lease>,
        (kind, landed): (CallKind, u32),
        extent: Extent,
    ) -> Result<Self, Error> {
        let (common, context) = (&lease.common, lease.context);
        let shape = &common.shape;
        let landing = shape.landing(kind, landed);
        let base = extent.offset();
        let (metadata, top_k) = (common.fixed.spec.metadata(), common.fixed.spec.top_k);
        let [experts, apart] = shape.row_choices(context);
        let words = |per_row: u32| u64::from(landed) * u64::from(per_row) * 4;
        let weights = match common.pairs() {
            0 => (shape.metadata(context).0, words(1)),
            pairs => (apart.0, words(pairs)),
        };
        let (memory, weights) = (common.piece((base, landing.bytes()))?, common.piece(weights)?);
        let named = metadata.experts(top_k);
        let experts = (named > 0).then(|| common.piece((experts.0, words(named)))).transpose()?;
        let arrived = match shape.arrives() {
            true => {
                let (at, (index, end)) = (landing.bytes(), landing.arrivals());
                Some((common.piece((base + at, index - at))?, common.piece((base + index, end - index))?))
            }
            false => None,
        };
        let counts = common.piece(common.counts(context))?;
        let lease = Arc::clone(lease);
        Ok(EnqueuedRows {
            memory,
            weights,
            experts,
            counts,
            landing,
            arrived,
            _extent: extent,
            _lease: lease,
        })
    }

    /// Number of rows.
    pub fn len(&self) -> u32 {
        self.landing.rows
    }

    /// The rows, `[rows, hidden]`, or records of them.
    ///
    /// # Errors
    /// None in practice: they lie inside their memory.
    pub fn rows(&self) -> Result<DeviceRange, Error> {
        Ok(self.memory.part(0, u64::from(self.landing.rows) * self.landing.row_bytes)?)
    }

    /// Rank-major: the local expert of each row and choice, `i32 [rows, top_k]`; -1 where there is
    /// none.
    pub fn experts(&self) -> Option<&DeviceRange> {
        self.experts.as_ref()
    }

    /// The routing weight of each row, `f32 [rows]`, or rank-major of each row and choice; 0 for
    /// pad rows.
    ///
    /// # Errors
    /// None in practice: they lie inside their memory.
    pub fn weights(&self) -> Result<DeviceRange, Error> {
        Ok(self.weights.clone())
    }

    /// Where engines relay: rows as they arrived, and for each visible row which of them it is,
    /// `i32 [rows]`, -1 of pads. A grouped matrix product that takes an index can read them as they
    /// are; [`EnqueuedRows::rows`] are made of them.
    pub fn index(&self) -> Option<(&DeviceRange, &DeviceRange)> {
        self.arrived.as_ref().map(|(rows, index)| (rows, index))
    }

    /// Rows of each local expert, then the same with pads: `i64 [2, local experts]`. Rank-major,
    /// rows that chose each.
    pub fn counts(&self) -> &DeviceRange {
        &self.counts
    }
}

/// The placement of one dispatch. Combines follow it.
#[derive(Debug)]
pub(in crate::ep) struct EnqueuedHandle {
    lease: Arc<Lease>,
    placement: PlacementInfo,
    copied: AtomicU64,
    /// The last return.
    last: Mutex<Option<LastReturn>>,
    /// The output of a weighted combine, which its gradient needs.
    kept: Mutex<Option<EnqueuedOutput>>,
    /// Bytes that it may yet ask of the pool.
    owed: Owed,
    _alive: LiveHandle,
}

impl Drop for EnqueuedHandle {
    /// The context gets its lists back, and the next dispatch fills them again.
    fn drop(&mut self) {
        let placement = std::mem::take(&mut self.placement);
        self.lease.common.contexts[self.lease.context as usize].tell(|told| told.placement = placement);
    }
}

/// The return that answers for a handle.
#[derive(Clone, Debug)]
struct LastReturn {
    /// Which return of the context it is.
    nth: u64,
    kind: CallKind,
    /// Why this rank refused it.
    refused: Option<Error>,
}

impl EnqueuedHandle {
    pub(super) fn new(lease: Arc<Lease>, placement: PlacementInfo) -> Self {
        let (copied, alive) = (AtomicU64::new(0), LiveHandle::new(&lease.common.handles));
        let (last, kept) = Default::default();
        let owed = Owed::new(&lease.common.owed);
        EnqueuedHandle { lease, placement, copied, last, kept, owed, _alive: alive }
    }

    /// Rows have landed along it, for which it may ask for an output.
    pub(super) fn owe_output(&self) {
        self.owed.set(self.lease.common.shape.bytes_behind(self.placement.rows));
    }

    /// Keeps the output of a weighted combine.
    pub(super) fn keep(&self, output: EnqueuedOutput) {
        self.kept().replace(output);
    }

    /// The output that is kept.
    pub(super) fn kept(&self) -> MutexGuard<'_, Option<EnqueuedOutput>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of its instance.
    pub fn instance(&self) -> u64 {
        self.lease.common.instance
    }

    pub(super) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    pub(super) fn context(&self) -> u32 {
        self.lease.context
    }

    pub(super) fn call(&self) -> u64 {
        self.lease.call
    }

    /// That this return was enqueued.
    pub(super) fn returns(&self, nth: u64, kind: CallKind, refused: Option<Error>) {
        self.owed.set(0);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(LastReturn { nth, kind, refused });
    }

    pub(super) fn count_copied(&self, bytes: u64) {
        // Relaxed: a figure of the report, which guards nothing.
        self.copied.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes of rows that did not lie in an output buffer.
    pub fn copied_bytes(&self) -> u64 {
        // Relaxed: as above.
        self.copied.load(Ordering::Relaxed)
    }

    /// Rows of each local expert.
    pub fn tokens_per_expert(&self) -> &[i64] {
        &self.placement.tokens_per_expert
    }

    /// The same, pads counted: the segments of the rows.
    pub fn padded_tokens_per_expert(&self) -> &[i64] {
        &self.placement.padded_per_expert
    }

    /// Which of this rank's choices, `[tokens, top_k]`, were dropped.
    pub fn dropped(&self) -> &[bool] {
        &self.placement.dropped
    }

    /// Rows that each rank needed, pads counted; the same at every rank.
    pub fn required_rows(&self) -> &[u32] {
        &self.placement.required
    }

    /// Rows received, pads counted.
    pub fn rows(&self) -> u32 {
        self.placement.rows
    }

    /// Tokens dispatched by this rank.
    pub fn tokens(&self) -> u32 {
        self.lease.tokens
    }

    /// A buffer of the rows' shape where peers can read it: experts write into it. Its contents are
    /// undefined.
    ///
    /// # Errors
    /// As [`Session::take`].
    pub fn output(&self) -> Result<EnqueuedOutput, Error> {
        let common = &self.lease.common;
        let shape = &common.shape;
        let offer = shape.offer(self.placement.rows);
        let extent = common.take(offer.bytes())?;
        self.owed.settle(offer.bytes());
        let base = extent.offset();
        let rows = common.piece((base, u64::from(offer.rows) * offer.row_bytes))?;
        let (len, lease) = (offer.rows, Arc::clone(&self.lease));
        Ok(EnqueuedOutput { rows, len, base, _extent: extent, lease })
    }

    /// How the last call of this dispatch or its combines ended at this rank: a [`Status`] of 32
    /// bits, for kernels. It is written before the stream goes on.
    ///
    /// # Errors
    /// None in practice.
    pub fn status(&self) -> Result<DeviceRange, Error> {
        self.lease.status_word()
    }

    /// The same, for the host; what it says is sure once the stream has come by.
    pub fn status_now(&self) -> Status {
        let word = self.lease.common.flag(self.lease.context, StreamFlag::Status);
        // Acquire: the device writes the status behind the rows that it judges.
        Status(word.map_or(0, |word| word.load(std::sync::atomic::Ordering::Acquire) as u32))
    }

    /// How the bytes of the dispatch went.
    pub fn report(&self) -> Result<Report, Error> {
        let enqueued = self.lease.told()?.dispatched;
        let Lease { common, planner, packs, .. } = &*self.lease;
        let arrives = common.shape.arrives();
        let [plan, place] = match arrives {
            true => [None; 2],
            false => planner.kernels(self.placement.has_own),
        };
        let [for_peers, own] = self.placement.gathered.map(|gathered| gathered.then_some(*packs));
        let (regroup, apart) = (arrives.then_some("regroup"), (common.pairs() > 0).then_some("choices"));
        let kernels = [plan, place, for_peers, own, regroup, apart];
        let dropped_weight = self.placement.dropped_weight;
        Ok(Report { dropped_weight, ..self.lease.report(enqueued, kernels) })
    }

    /// How the last return went; nothing if it has yet to be finished.
    pub fn return_report(&self) -> Result<Report, Error> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let told = self.lease.told()?;
        let Some(LastReturn { kind, refused, .. }) = last.filter(|last| told.returns >= last.nth) else {
            return Ok(self.lease.report(EnqueueCounts::default(), NO_KERNELS));
        };
        let enqueued = match (&told.combine_refused, refused) {
            (Some(Error::Plan(PlanError::RefusedHere)), Some(own)) => return Err(own),
            (Some(error), _) => return Err(error.clone()),
            (None, _) => told.combined,
        };
        let spec = &self.lease.common.fixed.spec;
        let (partial, sum) = match CallProperties::of(kind).payload {
            Payload::Weights => (None, "fetch_weights"),
            _ => {
                let partial = spec.rank_sums.then(|| Kernels::rank_sums_name(spec.dtype)).transpose()?;
                (partial, Kernels::sum_choices_name(spec.dtype)?)
            }
        };
        // That of this rank's relay, which runs for each source and chunk, then its own.
        let relayed = (enqueued.relay_sums > 0).then_some(partial.unwrap_or(sum));
        Ok(self.lease.report(enqueued, [relayed, partial, Some(sum), None, None, None]))
    }
}

/// Output of the experts.
#[derive(Debug)]
pub(in crate::ep) struct EnqueuedOutput {
    rows: DeviceRange,
    len: u32,
    base: u64,
    _extent: Extent,
    pub(super) lease: Arc<Lease>,
}

impl EnqueuedOutput {
    /// The number of its instance.
    pub fn instance(&self) -> u64 {
        self.lease.common.instance
    }

    /// Number of rows.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// The rows, `[rows, hidden]`, to write to. What pad rows hold is never read.
    pub fn rows(&self) -> &DeviceRange {
        &self.rows
    }

    /// Gradients of row weights, `f32 [rows]`, to write to.
    ///
    /// # Errors
    /// None in practice: they lie inside their memory.
    pub fn weights(&self) -> Result<DeviceRange, Error> {
        let offer = self.offer();
        Ok(self.lease.common.piece((self.base + offer.metadata_at(), offer.metadata * 4))?)
    }

    /// Memory that peers may read.
    fn offer(&self) -> RowBuffer {
        self.lease.common.shape.offer(self.len)
    }

    /// What returns in a call of this kind.
    pub(super) fn outputs(&self, kind: CallKind) -> Outputs<'_> {
        let weights = CallProperties::of(kind).payload == Payload::Weights;
        let behind = if weights { self.offer().metadata_at() } else { 0 };
        Outputs { rows: &self.rows, len: self.len, base: self.base + behind }
    }
}
