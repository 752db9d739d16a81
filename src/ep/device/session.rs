//! Session of an instance on a device: what never changes between its calls, and the kernels that
//! need nothing else.
//!
//! Handles share it with the enqueuer. Each dispatch that is alive has a context, by whose
//! [`ContextProgress`] the enqueuer tells the handle how its calls went.
//!
//! **Packing** puts rows in the order of a layout, as they are sent:
//!
//! | brought | sent | kernel |
//! |---|---|---|
//! | rows | rows | `regroup` |
//! | records | records | `regroup` |
//! | rows | records (a dispatch in fp8) | `records_*` |
//!
//! Tokens in the instance's own memory ([`EnqueuedTokens`]) need no packing if all rows for one
//! place are a run of tokens, too.
//!
//! **Own rows**, those for experts of this rank, are not copied: once their places are known, the
//! same kernel takes them from the tokens to where they land, run by run.
//!
//! **Choices.** A rank's host knows how many rank-major rows come, but not their choices: these lie
//! next to the rows. So a kernel behind their landing lays experts and weights apart, and counts
//! the rows of each expert. Where ranks sum a token's rows, the same kernel lays apart which sum
//! each row is part of, and its weight.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::device_pool::{DevicePool, Extent, Progress};
use super::memory::{ByteRange, MemoryShape, StreamFlag};
use crate::bootstrap::wait::{Ended, Polling};
use crate::device::{
    ByteSpan, ChoiceArgs, Context, DeviceRange, Kernels, PermuteArgs, PinnedMemory, RankSumArgs, RecordArgs,
    RunArgs, Stream, Word,
};
use crate::dtype::{Dtype, Fp8RowShape};
use crate::ep::Status;
use crate::ep::state::{EpState, ReceiveMemory};
use crate::error::{CallKind, DeviceError, Error, PlanError};
use crate::exec::{CopyEngineStepper, EnqueueCounts};
use crate::plan::{DispatchLayout, SortedRouting};
use crate::schedule::{CallProperties, Calls, FillContext, Payload};
use crate::world::{NoGpuDirect, Registration};

/// State that handles and the enqueuer share. Copies share all that changes.
#[derive(Clone, Debug)]
pub(super) struct Session {
    /// Tells handles of different exchanges apart, within this process.
    pub instance: u64,
    pub fixed: Arc<EpState>,
    pub shape: MemoryShape,
    /// This rank's memory, as its device reaches it.
    pub memory: DeviceRange,
    /// Memory of the host that both and the device reach.
    pub host: PinnedMemory,
    pub contexts: Arc<[DispatchContext]>,
    /// Handles that are alive.
    pub handles: Arc<AtomicU32>,
    /// Token buffers that are alive: tokens may lie in place.
    pub buffers: Arc<AtomicU32>,
    pub space: Arc<DevicePool>,
    /// Bytes of the pool that handles may yet ask for.
    pub owed: Arc<AtomicU64>,
    /// The most bytes that were asked for and not there, since the pool could grow last.
    pub missed: Arc<AtomicU64>,
    /// How far the stream has come.
    pub progress: Arc<Progress>,
    /// Why rows that cross go by memory of the host, if they do.
    pub no_gpu_direct: Option<NoGpuDirect>,
    /// How NICs know the device's memory, if they do.
    pub registration: Option<Registration>,
    /// Calls that are enqueued.
    pub served: Arc<AtomicU64>,
}

impl Session {
    /// A flag, as the host sees it.
    pub fn flag(&self, context: u32, flag: StreamFlag) -> Result<&AtomicU64, DeviceError> {
        self.host.word(self.shape.flag(context, flag) as usize)
    }

    /// A flag, as streams see it.
    pub fn word(&self, context: u32, flag: StreamFlag) -> Result<Word<'_, u32>, DeviceError> {
        self.host.range().word(self.shape.flag(context, flag))
    }

    /// Enqueues that a call along a context goes well so far. Kernels of the call that are enqueued
    /// behind it report their faults, and only a refusal overwrites these.
    pub fn clear_status(&self, stream: &Stream, context: u32) -> Result<(), DeviceError> {
        stream.write(self.word(context, StreamFlag::Status)?, Status::OK.0)
    }

    /// A piece of the device's memory.
    pub fn piece(&self, (offset, len): ByteRange) -> Result<DeviceRange, DeviceError> {
        self.memory.part(offset, len)
    }

    /// The same, for one call of the driver.
    pub fn span(&self, (offset, len): ByteRange) -> Result<ByteSpan<'_>, DeviceError> {
        self.memory.span(offset, len)
    }

    /// A piece of the host's memory, as the device sees it.
    pub fn host_piece(&self, (offset, len): ByteRange) -> Result<DeviceRange, DeviceError> {
        self.host.range().part(offset, len)
    }

    /// Collects a copy of the first `len` bytes of a piece of the host's memory to one of the
    /// device's.
    pub fn send(
        &self,
        engine: &mut CopyEngineStepper,
        (from, to): (ByteRange, ByteRange),
        len: u64,
    ) -> Result<(), Error> {
        let (from, to) = (self.host_piece(from)?, self.piece(to)?);
        Ok(engine.copy(to.span(0, len)?, from.span(0, len)?)?)
    }

    /// Enqueues that `rows` rows that landed at `base` in a call of this kind are put into visible
    /// order, where engines relay.
    pub fn regroup(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        kind: CallKind,
        (context, base, rows): (u32, u64, u32),
    ) -> Result<(), Error> {
        let (landing, row_bytes) = (self.shape.landing(kind, rows), self.shape.row_bytes(kind));
        if rows == 0 {
            return Ok(());
        }
        let (bytes, (index, end)) = (u64::from(rows) * row_bytes, landing.arrivals());
        let from = self.piece((base + landing.bytes(), bytes))?;
        let (out, index) = (self.piece((base, bytes))?, self.piece((base + index, end - index))?);
        Ok(kernels.regroup(
            stream,
            &PermuteArgs {
                row_bytes,
                sources: rows,
                rows,
                from: from.span(0, from.len())?,
                index: index.span(0, index.len())?,
                out: out.span(0, out.len())?,
                runs: None,
                status: self.word(context, StreamFlag::Status)?,
            },
        )?)
    }

    /// Context of all operands by which rows go out in a call of this kind, whose
    /// metadata lands at these places.
    pub fn rows_setting<'a>(&'a self, calls: Calls, kind: CallKind, metadata: &'a [u64]) -> FillContext<'a> {
        let metadata = self.fixed.enqueues.then_some(metadata);
        FillContext { metadata, ..self.fixed.agreement(calls, kind).setting }
    }

    /// Gives back what of an extent a call of this kind along a layout does not need. What is
    /// staged behind the rows is this rank's as long as the extent that is returned.
    pub fn trim(&self, kind: CallKind, extent: &mut Extent, layout: &DispatchLayout) -> Option<Extent> {
        let (chunk, staged) = (self.shape.landing(kind, layout.landed), u64::from(layout.staged));
        let (kept, used) = match (self.shape.arrives(), self.fixed.gpu_direct()) {
            (true, true) => (chunk.arrivals().1, chunk.staging() + staged * self.shape.row_bytes(kind)),
            (true, false) => (chunk.arrivals().1, 0),
            (false, _) => (chunk.bytes(), 0),
        };
        extent.trim(kept.max(used));
        (used > kept).then(|| extent.split(kept))
    }

    /// Counts a call that has been enqueued in full.
    pub fn count_served(&self) {
        // Relaxed: as in `running`.
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of the call that runs, among those that are enqueued.
    pub fn running(&self) -> u64 {
        // Relaxed: the caller's thread counts, and asks.
        self.served.load(Ordering::Relaxed) + 1
    }

    /// Frees what streams and all peers have read by now. Whether nothing is left to wait for.
    pub fn reclaim(&self) -> bool {
        let settled = self.space.settle();
        let Ok((call, all)) = self.progress.seen() else { return settled };
        call.into_iter().for_each(|call| self.space.reach(call));
        all && settled
    }

    /// Bytes by which the pool must grow to have `bytes` for rows that land; and to have memory for
    /// the output of these, for all that handles may ask for, and for what was asked for and not
    /// there, as well.
    pub fn lacks(&self, bytes: u64, rows: u32) -> [u64; 2] {
        // Relaxed: estimates, which handles of other threads may change meanwhile.
        let owed = [self.owed.load(Ordering::Relaxed), self.missed.swap(0, Ordering::Relaxed)];
        let behind = owed.into_iter().fold(self.shape.bytes_behind(rows), u64::saturating_add);
        [bytes, bytes.saturating_add(behind)].map(|bytes| self.space.lack(bytes))
    }

    /// A piece of the pool. If there is none, and the stream has yet to read what was given back,
    /// waits until it has.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError), the cause of a failed world,
    /// [`PlanError::Interrupted`].
    pub fn take(&self, bytes: u64) -> Result<Extent, Error> {
        self.take_within(bytes, MemoryShape::STEP, None)
    }

    /// The same at an address that is a multiple of `align`, with a wait of at most `patience`.
    ///
    /// # Errors
    /// As [`Session::take`]; out of space where the wait takes longer, too.
    pub fn take_within(&self, bytes: u64, align: u64, patience: Option<Duration>) -> Result<Extent, Error> {
        self.find(bytes, align, patience).inspect_err(|error| {
            // The next growth makes room, unless the limit does not allow it.
            if matches!(error, Error::Memory(_)) && bytes <= self.shape.pool_limit() {
                self.missed.fetch_max(bytes, Ordering::Relaxed);
            }
        })
    }

    /// The same in a call whose ranks hear of a lack: it is nothing that another call need make up
    /// for.
    ///
    /// # Errors
    /// As [`Session::take`].
    pub fn take_in_call(&self, bytes: u64) -> Result<Extent, Error> {
        self.find(bytes, MemoryShape::STEP, None)
    }

    fn find(&self, bytes: u64, align: u64, patience: Option<Duration>) -> Result<Extent, Error> {
        let health = self.fixed.shared.hub.health();
        let mut polling = patience.map_or(Polling::new(health), |most| Polling::within(health, most));
        loop {
            let all = self.reclaim();
            let free = match self.space.take(bytes, (align, self.memory.address())) {
                Ok(extent) => return Ok(extent),
                Err(free) => free,
            };
            let total = self.space.total();
            let lacks = || ReceiveMemory::device_heap(total).lacks(self.fixed.lanes.rank, bytes, free);
            if all || bytes > total {
                return Err(lacks());
            }
            polling.turn().map_err(|why| match why {
                Ended::Failed(cause) => Error::from(cause),
                Ended::Late => lacks(),
                Ended::Asked => PlanError::Interrupted.into(),
            })?;
        }
    }

    /// Writes what follows from the expert map: the bin of each expert and its number at its rank,
    /// the partial sum of each bin and its place in the order of the sum. Waits for the stream.
    pub fn write_map(
        &self,
        context: &Arc<Context>,
        stream: &Stream,
        EpState { spec, bins, lanes, .. }: &EpState,
    ) -> Result<(), Error> {
        let (shape, map) = (&self.shape, &spec.map);
        let bin = |slot| spec.layout.bin_of(map, slot);
        let local = |slot| slot - map.slots_of(map.rank_of(slot)).start;
        // An expert without a bin has no row.
        let of_slots = |of: &dyn Fn(u32) -> u32| -> Vec<u32> {
            (0..map.experts()).map(|expert| map.slot_for(lanes.rank, expert).map_or(u32::MAX, of)).collect()
        };
        let partials: Vec<u32> = bins.in_order().iter().map(|&bin| bins.partial_of(bin)).collect();
        let mut places = vec![0; partials.len()];
        for (place, &bin) in (0..).zip(bins.in_order()) {
            places[bin as usize] = place;
        }
        let own = bins.of(lanes.rank);
        let own_in_order = bins.in_order().iter().filter(|&bin| own.contains(bin)).map(|bin| bin - own.start);
        let mut own_experts: Vec<u32> = own_in_order.collect();
        own_experts.resize((shape.own_experts().1 / 4) as usize, 0);
        let tables = [
            (of_slots(&bin), shape.map()),
            (of_slots(&local), shape.locals()),
            (partials, shape.groups()),
            (places, shape.places_in_sums()),
            (own_experts, shape.own_experts()),
        ];
        let source = PinnedMemory::new(context, tables.iter().map(|(_, (_, len))| *len as usize).sum())?;
        let mut from = 0;
        for (words, (to, len)) in &tables {
            let (to, len) = (*to, *len);
            source.write_words(from, words)?;
            stream.copy(self.memory.span(to, len)?, source.range().span(from as u64, len)?)?;
            from += len as usize;
        }
        Ok(stream.synchronize()?)
    }

    /// Where rows of local experts are counted: each number twice, without and with pads;
    /// rank-major once.
    pub fn counts(&self, context: u32) -> ByteRange {
        let spec = &self.fixed.spec;
        let experts = spec.map.slots_of(self.fixed.lanes.rank).len() as u64;
        let numbers = u64::from(spec.layout.numbers_per_expert());
        (self.shape.counts(context).0, experts * numbers * 8)
    }

    /// Enqueues that what came with `rows` rows of a context is laid apart, where a row stands for
    /// several choices or is part of a sum.
    pub fn lay_choices_apart(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        (context, rows): (u32, u32),
    ) -> Result<(), Error> {
        let (spec, pairs) = (&self.fixed.spec, self.pairs());
        if pairs == 0 {
            return Ok(());
        }
        let [experts, weights] = self.shape.row_choices(context);
        let n_experts = spec.map.slots_of(self.fixed.lanes.rank).len() as u32;
        let args = ChoiceArgs {
            rows,
            top_k: pairs,
            // Sums are not counted.
            n_experts: if spec.metadata().experts(spec.top_k) == 0 { 0 } else { n_experts },
            metadata: self.span(self.shape.metadata(context))?,
            experts: self.span(experts)?,
            weights: self.span(weights)?,
            counts: self.span(self.counts(context))?,
        };
        Ok(kernels.choices(stream, &args)?)
    }

    /// Pairs of words that came with each row and are laid apart.
    pub fn pairs(&self) -> u32 {
        self.fixed.spec.metadata().pairs(self.fixed.spec.top_k)
    }

    /// Whether the rows that return in a call of this kind are sums by rank.
    pub fn returns_sums(&self, kind: CallKind) -> bool {
        self.fixed.sizing(kind).rank_sums
    }

    /// Whether rows are multiplied with their weights where a call of this kind sums them.
    pub fn weighs(&self, kind: CallKind) -> bool {
        self.fixed.spec.weighted && CallProperties::of(kind).weighs
    }

    /// Enqueues that this rank sums each token's `rows`, which landed along the layout of a
    /// context, in a return of this kind: at most `count` sums, in a piece of the pool.
    pub fn sum_by_rank(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        (kind, context): (CallKind, u32),
        (rows, n_rows): (&DeviceRange, u32),
        count: u32,
    ) -> Result<Extent, Error> {
        let (spec, [numbers, weights]) = (&self.fixed.spec, self.shape.row_choices(context));
        let bytes = u64::from(count) * self.shape.row_bytes(kind);
        let extent = self.take(bytes)?;
        let weighted = self.weighs(kind);
        let args = RankSumArgs {
            sums: count,
            columns: spec.hidden as u32,
            dtype: spec.dtype,
            n_rows,
            rows: rows.span(0, rows.len())?,
            numbers: self.span(numbers)?,
            n_experts: spec.map.slots_of(self.fixed.lanes.rank).len() as u32,
            counts: self.span(self.counts(context))?,
            order: self.span(self.shape.own_experts())?,
            weights: weighted.then(|| self.span(weights)).transpose()?,
            out: self.span((extent.offset(), bytes))?,
        };
        kernels.rank_sums(stream, &args).map_err(|error| self.fixed.fail(error.into()))?;
        Ok(extent)
    }

    /// Enqueues that `count` tokens of this type, which a call of this kind brings, are packed in
    /// the order of a context. Where all rows stay at this rank, there is nothing to pack.
    pub fn pack(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        call: (CallKind, u32),
        tokens: (u32, &DeviceRange, Dtype),
    ) -> Result<(), Error> {
        if !self.has_peers() {
            return Ok(());
        }
        let packed = self.span(self.shape.staging())?;
        self.gather(stream, kernels, call, tokens, (tokens.0 * self.fixed.spec.top_k, packed, None))
    }

    /// Whether rows may go to other ranks.
    pub fn has_peers(&self) -> bool {
        self.fixed.lanes.ranks() > 1
    }

    /// Enqueues that tokens that a call of this kind brings become rows in `out`, in the order of a
    /// context, or as runs of that order name them.
    fn gather(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        (kind, context): (CallKind, u32),
        (sources, x, dtype): (u32, &DeviceRange, Dtype),
        (rows, out, runs): (u32, ByteSpan<'_>, Option<RunArgs<'_>>),
    ) -> Result<(), Error> {
        let (from, index) = (x.span(0, x.len())?, self.span(self.shape.order(context))?);
        let status = self.word(context, StreamFlag::Status)?;
        let enqueued = match self.records(kind, dtype) {
            Some(record) => {
                let (hidden, index) = (record.hidden() as u32, Some(index));
                let records = RecordArgs { hidden, dtype, sources, rows, from, index, out, runs, status };
                kernels.records(stream, &records)
            }
            None => {
                let row_bytes = self.shape.row_bytes(kind);
                let permute = PermuteArgs { row_bytes, sources, rows, from, index, out, runs, status };
                kernels.regroup(stream, &permute)
            }
        };
        Ok(enqueued?)
    }

    /// Enqueues that own rows go from tokens that a call of this kind brings to where they land:
    /// among `places` rows from byte `base` of this rank's memory on. They are `rows` rows, pads
    /// counted, in `count` runs that [`Session::send_own_runs`] has left with the context.
    pub fn place_own_rows(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        call: (CallKind, u32),
        tokens: (u32, &DeviceRange, Dtype),
        (rows, count, base, places): (u32, u32, u64, u32),
    ) -> Result<(), Error> {
        let out = self.span((base, u64::from(places) * self.shape.row_bytes(call.0)))?;
        let entries = tokens.0 * self.fixed.spec.top_k;
        let runs = RunArgs { runs: self.span(self.shape.own_runs(call.1))?, count, entries, places };
        self.gather(stream, kernels, call, tokens, (rows, out, Some(runs)))
    }

    /// Enqueues that the runs of own rows go to a context, where later calls along its layout find
    /// them.
    pub fn send_own_runs(&self, stream: &Stream, context: u32, words: &[u32]) -> Result<(), Error> {
        let ((from, _), (to, _)) = (self.shape.host_own_runs(), self.shape.own_runs(context));
        let len = size_of_val(words) as u64;
        self.host.write_words(from as usize, words)?;
        Ok(stream.copy(self.span((to, len))?, self.host.range().span(from, len)?)?)
    }

    /// Whether tokens of this type are sent as they are in a call of this kind.
    pub fn sends_as_they_are(&self, kind: CallKind, dtype: Dtype) -> bool {
        self.records(kind, dtype).is_none()
    }

    /// The kernel that does that.
    pub fn packs(&self, kind: CallKind, dtype: Dtype) -> &'static str {
        let records = self.records(kind, dtype).and_then(|_| Kernels::records_name(dtype).ok());
        records.unwrap_or("regroup")
    }

    /// The shape of the records that packing makes of tokens of this type, if it does.
    fn records(&self, kind: CallKind, dtype: Dtype) -> Option<Fp8RowShape> {
        let tokens = CallProperties::of(kind).payload == Payload::Tokens;
        self.fixed.spec.record.filter(|_| tokens && dtype != Dtype::Bytes)
    }

    /// Memory for so many tokens, as a dispatch sends them.
    ///
    /// # Errors
    /// As [`Session::take`].
    pub fn token_buffer(&self, tokens: u32) -> Result<EnqueuedTokens, Error> {
        let bytes = u64::from(tokens) * self.shape.row_bytes(CallKind::Dispatch);
        let extent = self.take(bytes)?;
        let range = self.piece((extent.offset(), bytes))?;
        Ok(EnqueuedTokens { range, _extent: extent, _alive: LiveHandle::new(&self.buffers) })
    }

    /// Where in this rank's memory tokens of this type lie that a call of this kind may send as
    /// they are, if they do.
    pub fn lie_here(&self, kind: CallKind, (x, dtype): (&DeviceRange, Dtype)) -> Option<u64> {
        let offset = x.address().checked_sub(self.memory.address())?;
        let inside = offset.checked_add(x.len()).is_some_and(|end| end <= self.memory.len());
        (inside && self.sends_as_they_are(kind, dtype)).then_some(offset)
    }

    /// Whether these tokens of a dispatch are packed in the second half: where engines relay, the
    /// caller's thread knows only then in which order; and whether they need be packed, where
    /// engines can read them.
    pub fn packs_when_placed(&self, x: (&DeviceRange, Dtype)) -> bool {
        self.shape.arrives() || self.lie_here(CallKind::Dispatch, x).is_some()
    }

    /// Writes the metadata of rows where these lie packed, from these rows of bins on. Where
    /// engines relay, rows for other nodes have theirs in headers.
    pub fn rewrite_metadata(&self, starts: &[u32], sorted: &SortedRouting) -> Result<(), Error> {
        let (fixed, (at, _)) = (&self.fixed, self.shape.host_metadata());
        let bytes = fixed.sizing(CallKind::Dispatch).metadata_bytes();
        let packed = |&rank: &u32| fixed.paths().same_node(rank) || !fixed.arrives();
        for rank in (0..fixed.lanes.ranks()).filter(packed) {
            for bin in fixed.bins.of(rank) {
                let to = at + u64::from(starts[bin as usize]) * bytes;
                self.host.write_words(to as usize, sorted.metadata_of(bin..bin + 1))?;
            }
        }
        Ok(())
    }
}

/// One context: memory and flags of a dispatch that is alive, and of the returns that follow it.
#[derive(Debug, Default)]
pub(super) struct DispatchContext {
    told: Mutex<ContextProgress>,
}

/// How its last calls went.
#[derive(Debug, Default)]
pub(super) struct ContextProgress {
    /// Returns that are enqueued, counted from 1.
    pub returns: u64,
    pub placement: PlacementInfo,
    /// Why the last dispatch was refused.
    pub refused: Option<Error>,
    /// Why the last return was refused.
    pub combine_refused: Option<Error>,
    /// Where rows of the last dispatch land.
    pub extent: Option<Extent>,
    /// Work that the last dispatch enqueued on the stream of copies.
    pub dispatched: EnqueueCounts,
    /// Work that the last return enqueued on it.
    pub combined: EnqueueCounts,
}

/// The placement of a dispatch, as its caller sees it.
#[derive(Clone, Debug, Default)]
pub(super) struct PlacementInfo {
    /// The number of the call that made it.
    pub number: u64,
    pub rows: u32,
    /// Whether tokens became rows: for other ranks, unless they went as they lay, and for this one.
    pub gathered: [bool; 2],
    pub tokens_per_expert: Vec<i64>,
    pub padded_per_expert: Vec<i64>,
    pub dropped: Vec<bool>,
    pub dropped_weight: f64,
    pub required: Vec<u32>,
    /// Rows stay at this rank.
    pub has_own: bool,
}

impl DispatchContext {
    /// Says something.
    pub fn tell(&self, say: impl FnOnce(&mut ContextProgress)) {
        say(&mut self.told());
    }

    pub fn told(&self) -> MutexGuard<'_, ContextProgress> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handle that is alive, which follows the map of its dispatch; or a token buffer.
#[derive(Debug)]
pub(super) struct LiveHandle(Arc<AtomicU32>);

impl LiveHandle {
    /// One more of these.
    pub fn new(count: &Arc<AtomicU32>) -> Self {
        // Relaxed: only the number matters. Memory of a handle has claims of its own.
        count.fetch_add(1, Ordering::Relaxed);
        LiveHandle(Arc::clone(count))
    }
}

impl Drop for LiveHandle {
    fn drop(&mut self) {
        // Relaxed: as in `new`.
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Tokens in memory of the device that NICs reach.
#[derive(Debug)]
pub(in crate::ep) struct EnqueuedTokens {
    range: DeviceRange,
    _extent: Extent,
    _alive: LiveHandle,
}

impl EnqueuedTokens {
    /// The rows.
    pub fn range(&self) -> &DeviceRange {
        &self.range
    }
}
