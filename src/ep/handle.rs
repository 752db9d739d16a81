//! The layout of one dispatch, kept for everything that follows it.

use std::sync::{Arc, Mutex, PoisonError};

use crossbeam::atomic::AtomicCell;
use crossbeam::queue::ArrayQueue;

use super::builder::Spec;
use super::fixed::Fixed;
use super::notes::Received;
use super::{Contribution, ExpertOutput, RowIndex};
use crate::dtype::Wire;
use crate::error::Error;
use crate::exec::Moved;
use crate::lane::{Lanes, Reach};
use crate::memory::{Extent, Licence, Pool};
use crate::plan::{Chunk, Forward, Layout, Traffic};
use crate::schedule::Sum;

/// What a handle holds. Its tables are used again by later dispatches.
#[derive(Debug, Default)]
pub(super) struct Inner {
    pub layout: Layout,
    /// What this rank relays. Nothing where there is only one node.
    pub forward: Option<Arc<Forward>>,
    /// What came with the rows.
    pub received: Received,
    /// Which choices had no room.
    pub dropped: Vec<bool>,
    /// Rows that each rank needed.
    pub required: Vec<u32>,
    /// What this rank offers in a return.
    pub offer: Chunk,
    /// Routing weights `[tokens, top_k]`; empty unless combines are weighted.
    pub weights: Vec<f32>,
    pub row_bytes: u64,
    pub wire: Wire,
    pub instance: u64,
    /// The number of the call that made it.
    pub number: u64,
    pub report: Report,
    /// The buffer of a call that was refused: it goes back to the caller.
    pub refused: Left<Extent>,
    /// Bytes copied because rows lay elsewhere.
    pub copied: AtomicCell<u64>,
    /// What the last return moved.
    pub returned: AtomicCell<Moved>,
    /// The output that the gradient of a weighted combine needs.
    pub kept: Left<Kept>,
}

/// What a call along a handle leaves to the next one: handles are shared.
#[derive(Debug)]
pub(super) struct Left<T>(Mutex<Option<T>>);

impl<T> Default for Left<T> {
    fn default() -> Self {
        Left(Mutex::new(None))
    }
}

impl<T> Left<T> {
    /// Takes it, if there is anything.
    pub fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Leaves it.
    pub fn put(&self, value: T) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(value);
    }
}

/// A chunk that outlives the call in which peers were offered it.
pub(super) struct Kept {
    pub extent: Extent,
    pub licence: Arc<dyn Licence>,
    /// The call that offered it last.
    pub value: u64,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("extent", &self.extent).field("value", &self.value).finish()
    }
}

impl Inner {
    /// The terms of this placement, with chunks at `bases`; multiplied with the routing weights if `weighted`.
    pub fn sum<'a>(&'a self, bases: &'a [u64], weighted: bool) -> Sum<'a> {
        let layout = &self.layout;
        let (terms, starts, choices) = layout.summands();
        let (fetched, places) = layout.fetches();
        Sum {
            terms,
            starts,
            choices,
            groups: &layout.groups,
            group_starts: &layout.group_starts,
            wire: self.wire,
            held_by: &layout.held_by,
            bases,
            chunks: &layout.chunks,
            weights: if weighted { &self.weights } else { &[] },
            fetched,
            places,
        }
    }

    /// Takes the buffer that belongs to this handle into its keeping, so that whatever refuses a call loses nothing;
    /// [`Handle::output`] gives it out again. Anything else is returned.
    pub fn keep_safe<'a>(&self, y: Contribution<'a>) -> Option<Contribution<'a>> {
        match y {
            Contribution::Output(output)
                if output.instance == self.instance && output.number == self.number =>
            {
                self.refused.put(output.extent);
                None
            }
            other => Some(other),
        }
    }

    /// Keeps the chunk of a call that was refused for the caller, unless it is a copy.
    pub fn give_back(&self, chunk: Extent, copied: bool) {
        if !copied {
            self.refused.put(chunk);
        }
    }

    /// Makes this layout that of a handle: of which instance, and by which of its calls.
    pub fn name(&mut self, spec: &Spec, (instance, number): (u64, u64)) {
        (self.wire, self.row_bytes) = (spec.wire, spec.row_bytes());
        (self.instance, self.number) = (instance, number);
        self.copied.store(0);
        self.returned.store(Moved::default());
    }

    /// Reads the metadata that came with the rows, and keeps the routing weights where combines are weighted.
    pub fn receive(&mut self, fixed: &Fixed, words: &[u32], weights: &[f32]) {
        let spec = &fixed.spec;
        self.weights.clear();
        if spec.weighted {
            self.weights.extend_from_slice(weights);
        }
        let experts = spec.map.slots_of(fixed.lanes.rank).len();
        self.received.fill(spec.notes(), &self.layout, experts, words);
    }

    /// Size of this rank's chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.offer.bytes()
    }
}

/// How the bytes of a dispatch went, as planned and as moved. No GPU kernel runs on the host lanes, so `kernels` is empty
/// there.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Report {
    /// Per lane: how many ranks are reached over it.
    pub lanes: Vec<LaneUse>,
    /// What this rank moved.
    pub moved: Moved,
    /// What of that it handed on for others.
    pub relayed: Moved,
    /// What it was to move, and what would come home: the plan's own count.
    pub traffic: Traffic,
    /// GPU kernels that ran between packed and landed.
    pub kernels: Vec<&'static str>,
}

/// A lane and how many ranks it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LaneUse {
    /// `own`, `shm`, `loop`, or `relay`: of ranks that are reached through others.
    pub lane: &'static str,
    /// Ranks.
    pub ranks: u32,
}

impl LaneUse {
    /// The lanes in use, in the order in which ranks first need them.
    pub(super) fn of(lanes: &Lanes) -> Vec<LaneUse> {
        let mut uses: Vec<LaneUse> = Vec::new();
        for lane in lanes.reach.iter().map(Reach::name) {
            match uses.iter_mut().find(|used| used.lane == lane) {
                Some(used) => used.ranks += 1,
                None => uses.push(LaneUse { lane, ranks: 1 }),
            }
        }
        uses
    }
}

/// The placement of one dispatch. Combine, cached dispatch and the gradients follow it; several may be alive.
#[derive(Debug)]
pub struct Handle {
    inner: Inner,
    pool: Arc<Pool>,
    spare: Arc<ArrayQueue<Inner>>,
}

impl Handle {
    pub(super) fn new(inner: Inner, pool: Arc<Pool>, spare: Arc<ArrayQueue<Inner>>) -> Self {
        Handle { inner, pool, spare }
    }

    pub(super) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// Rows of each local expert; rank-major, rows that chose it.
    pub fn tokens_per_expert(&self) -> &[i64] {
        &self.inner().received.tokens_per_expert
    }

    /// Rows of each local expert, pads and unused slots counted: the segments of the row buffer. Rank-major there is one
    /// segment, the whole.
    pub fn padded_tokens_per_expert(&self) -> &[i64] {
        &self.inner().layout.padded_per_bin
    }

    /// Routing weight of each received row, `[rows]`; 0 for pad rows. Rank-major, of each row and choice,
    /// `[rows, top_k]`; 0 where another rank has the choice.
    pub fn row_weights(&self) -> &[f32] {
        &self.inner().received.weights
    }

    /// Rank-major: the local expert of each row and choice, `[rows, top_k]`; -1 where there is none. Empty otherwise.
    pub fn row_experts(&self) -> &[i32] {
        &self.inner().received.experts
    }

    /// Where rows lie if not in visible order, as [`ExpertRows::index`](super::ExpertRows::index): of the rows of every call
    /// along this handle, and of what goes with them.
    pub fn index(&self) -> Option<&RowIndex> {
        self.inner().received.index.as_deref()
    }

    /// Which of this rank's choices, `[tokens, top_k]`, were dropped for want of room: they count as -1.
    pub fn dropped(&self) -> &[bool] {
        &self.inner().dropped
    }

    /// Rows that each rank needed, pads counted: more than its budget if rows were dropped; in fixed slots, all there are.
    /// The same at every rank.
    pub fn required_rows(&self) -> &[u32] {
        &self.inner().required
    }

    /// Rows received, pads counted.
    pub fn rows(&self) -> u32 {
        self.inner().layout.landed
    }

    /// Tokens dispatched by this rank.
    pub fn tokens(&self) -> u32 {
        self.inner().layout.tokens
    }

    /// A buffer of the received rows' shape that combine takes without a copy: experts write into it. Its contents are
    /// undefined. After a combine that was refused, this is the buffer of that combine, as it was.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError).
    pub fn output(&self) -> Result<ExpertOutput, Error> {
        let inner = self.inner();
        let extent = match inner.refused.take() {
            Some(extent) => extent,
            None => self.pool.take(inner.chunk_bytes())?,
        };
        Ok(ExpertOutput::new(extent, inner.offer, inner.number, inner.instance))
    }

    /// Bytes that combines and gradients along this handle have copied, because their rows did not lie in the buffer of
    /// [`Handle::output`].
    pub fn copied_bytes(&self) -> u64 {
        self.inner().copied.load()
    }

    /// What this rank moved in the last combine, or the last gradient that brought rows home, along this handle: what it
    /// brought home to other nodes, and what it read. Nothing before the first.
    pub fn returned(&self) -> Moved {
        self.inner().returned.load()
    }

    /// How the bytes of the dispatch went: [`Report::traffic`] as planned, [`Report::moved`] as counted while they moved.
    /// They agree to the byte:
    ///
    /// ```text
    ///   moved.rail_bytes    =   put.rail * row_bytes
    ///   moved.local_bytes   =   (put.own + put.local + handed_on + regrouped) * row_bytes
    ///   relayed.rows        =   handed_on                     relayed.copies   =   copies
    /// ```
    pub fn report(&self) -> &Report {
        &self.inner().report
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let inner = std::mem::take(&mut self.inner);
        drop(inner.refused.take());
        if let Some(Kept { extent, licence, value }) = inner.kept.take() {
            self.pool.retire(extent, &licence, value);
        }
        // A full queue means that enough memory is kept for later.
        let _ = self.spare.push(inner);
    }
}
