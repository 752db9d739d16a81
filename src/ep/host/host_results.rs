//! Results of calls on the host: rows and outputs in the receive pool, and the layout of a
//! dispatch.
//!
//! ```text
//!   pool   | HostRows: rows, words behind them |   | HostOutput: rows, one f32 each |
//!                        |                             ^
//!   HostHandle: layout, metadata, kept output ---------+   tables go to the next dispatch when it is dropped
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_queue::ArrayQueue;
use crossbeam_utils::atomic::AtomicCell;

use super::call::Chunk;
use crate::dtype::{Dtype, Element, Fp8RowShape, PartialDtype};
use crate::ep::RowIndex;
use crate::ep::builder::Spec;
use crate::ep::report::{LaneUse, Report};
use crate::ep::row_metadata::{ReceivedMetadata, Strided};
use crate::ep::state::EpState;
use crate::error::{CallError, Error, MemoryError};
use crate::exec::TransferCounts;
use crate::memory::{Extent, Pool, ReleaseCheck};
use crate::plan::{DispatchLayout, RelayPlan, RowBuffer, Traffic};
use crate::schedule::SumOperands;

/// Received rows of an instance on the host.
#[derive(Debug)]
pub(in crate::ep) struct HostRows {
    pub extent: Extent,
    pub rows: u32,
    pub row_bytes: u64,
    pub record: Option<Fp8RowShape>,
    pub index: Option<Arc<RowIndex>>,
}

impl HostRows {
    pub fn rows<E: Element>(&self) -> Result<&[E], MemoryError> {
        self.extent.slice(0, elements::<E>(self.rows, self.row_bytes))
    }

    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], MemoryError> {
        self.extent.slice_mut(0, elements::<E>(self.rows, self.row_bytes))
    }

    /// The e4m3 values of rows that came as records, `[rows, hidden]`. `None` if they came as they
    /// are.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`](crate::ep::ExpertRows::rows).
    pub fn payload(&self) -> Result<Option<Strided<'_, u8>>, MemoryError> {
        let Some(shape) = self.record else { return Ok(None) };
        let (rows, columns) = (self.rows as usize, shape.hidden());
        let all = self.extent.slice::<u8>(0, rows * shape.bytes())?;
        Ok(Some(Strided::new(all, (rows, columns), shape.bytes())))
    }

    /// Their scales, `[rows, hidden / 128]`: a value is its code times the scale of its block.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`](crate::ep::ExpertRows::rows).
    pub fn scales(&self) -> Result<Option<Strided<'_, f32>>, MemoryError> {
        let Some(shape) = self.record else { return Ok(None) };
        let (rows, columns, stride) = (self.rows as usize, shape.scales(), shape.bytes() / 4);
        let all = self.extent.slice::<f32>(0, rows * stride)?;
        let all = all.get(shape.scales_offset() / 4..).unwrap_or_default();
        Ok(Some(Strided::new(all, (rows, columns), stride)))
    }
}

/// Output buffer of an instance on the host. It lies where peers can read it.
#[derive(Debug)]
pub(in crate::ep) struct HostOutput {
    pub extent: Extent,
    pub chunk: RowBuffer,
    pub number: u64,
    pub instance: u64,
}

impl HostOutput {
    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], MemoryError> {
        self.extent.slice_mut(0, elements::<E>(self.chunk.rows, self.chunk.row_bytes))
    }

    pub fn weights_mut(&mut self) -> Result<&mut [f32], MemoryError> {
        self.extent.slice_mut(self.chunk.metadata_at(), self.chunk.metadata as usize)
    }
}

/// Rows that a rank brings into a return.
#[derive(Debug)]
pub(in crate::ep) enum HostInput<'a> {
    /// The buffer of a handle, which is used in place.
    Output(HostOutput),
    /// The output of a weighted combine, which the handle keeps.
    Kept,
    /// Rows elsewhere, which are copied into a buffer first.
    Elsewhere { bytes: &'a [u8], dtype: Dtype },
}

/// Elements of so many rows.
pub(in crate::ep) fn elements<E: Element>(rows: u32, row_bytes: u64) -> usize {
    (u64::from(rows) * row_bytes) as usize / size_of::<E>()
}

/// Checks a tensor of the caller's: `rows` rows of so many elements of this type.
pub(in crate::ep) fn check_tensor(
    what: &'static str,
    (bytes, dtype): (&[u8], Dtype),
    rows: u32,
    (columns, expected): (usize, Dtype),
) -> Result<(), Error> {
    let shape = crate::ep::tensor::Shape { rows: rows.into(), columns, dtype: expected };
    shape.check(what, bytes.len() as u64, dtype)
}

/// Contents of a handle. Later dispatches reuse its tables.
#[derive(Debug, Default)]
pub(in crate::ep) struct Inner {
    pub layout: DispatchLayout,
    /// This rank's plan as a relay. Empty with a single node.
    pub forward: Option<Arc<RelayPlan>>,
    /// Metadata of the received rows.
    pub received: ReceivedMetadata,
    /// Which choices were dropped, and their weight.
    pub dropped: Vec<bool>,
    pub dropped_weight: f64,
    /// Rows that each rank needed.
    pub required: Vec<u32>,
    /// Memory that this rank offers in a return.
    pub offer: RowBuffer,
    /// Routing weights `[tokens, top_k]`; empty unless combines are weighted.
    pub weights: Vec<f32>,
    pub row_bytes: u64,
    pub partial_dtype: PartialDtype,
    pub instance: u64,
    /// The number of the call that made it.
    pub number: u64,
    pub moves: DispatchMoves,
    /// The buffer of a call that was refused: it goes back to the caller.
    pub refused: SharedOption<Extent>,
    /// Bytes copied because rows lay elsewhere.
    pub copied: AtomicCell<u64>,
    /// Counts of the last return.
    pub returned: AtomicCell<TransferCounts>,
    /// The output that the gradient of a weighted combine needs.
    pub kept: SharedOption<RetainedBuffer>,
}

/// Counts of a dispatch, and those of its plan.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::ep) struct DispatchMoves {
    pub moved: TransferCounts,
    pub relayed: TransferCounts,
    pub traffic: Traffic,
}

/// Value that one call stores for the next call on a handle. Locked, because threads share handles.
#[derive(Debug)]
pub(in crate::ep) struct SharedOption<T>(Mutex<Option<T>>);

impl<T> Default for SharedOption<T> {
    fn default() -> Self {
        SharedOption(Mutex::new(None))
    }
}

impl<T> SharedOption<T> {
    /// The value, to use where it is.
    pub fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes it, if there is anything.
    pub fn take(&self) -> Option<T> {
        self.lock().take()
    }

    /// Leaves it.
    pub fn put(&self, value: T) {
        self.lock().replace(value);
    }
}

/// A chunk that outlives the call in which peers were offered it.
pub(in crate::ep) struct RetainedBuffer {
    pub extent: Extent,
    pub release: Arc<dyn ReleaseCheck>,
    /// The call that offered it last.
    pub value: u64,
}

impl std::fmt::Debug for RetainedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RetainedBuffer").field("extent", &self.extent).field("value", &self.value).finish()
    }
}

impl Inner {
    /// The terms of this placement, with chunks at `bases`; multiplied with the routing weights if
    /// `weighted`.
    pub fn sum<'a>(&'a self, bases: &'a [u64], weighted: bool) -> SumOperands<'a> {
        let weights = if weighted { &self.weights[..] } else { &[] };
        SumOperands { wire: self.partial_dtype, weights, ..SumOperands::of_layout(&self.layout, bases) }
    }

    /// Whether a buffer is one of this handle's.
    pub fn owns(&self, output: &HostOutput) -> bool {
        output.instance == self.instance && output.number == self.number
    }

    /// Stores the caller's buffer of a call that is refused, for the next
    /// [`HostHandle::output`].
    pub fn give_back(&self, rows: HostInput<'_>) {
        if let HostInput::Output(output) = rows
            && self.owns(&output)
        {
            self.refused.put(output.extent);
        }
    }

    /// The same of a chunk that was to be offered.
    pub fn give_back_chunk(&self, chunk: Chunk) {
        if let Chunk::Output(extent) = chunk {
            self.refused.put(extent);
        }
    }

    /// The output of a weighted combine.
    ///
    /// # Errors
    /// [`CallError::NotKept`] where there was none.
    pub fn kept_output<R>(&self, with: impl FnOnce(&mut RetainedBuffer) -> R) -> Result<R, CallError> {
        let missing = "the output of a weighted combine";
        self.kept.lock().as_mut().map(with).ok_or(CallError::NotKept { missing })
    }

    /// Makes this layout that of a handle: of which instance, and by which of its calls.
    pub fn name(&mut self, spec: &Spec, (instance, number): (u64, u64)) {
        (self.partial_dtype, self.row_bytes) = (spec.partial_dtype, spec.row_bytes());
        (self.instance, self.number) = (instance, number);
        self.copied.store(0);
        self.returned.store(TransferCounts::default());
    }

    /// Reads the metadata that came with the rows, and keeps the routing weights where combines are
    /// weighted.
    pub fn receive(&mut self, fixed: &EpState, words: &[u32], weights: &[f32]) {
        let spec = &fixed.spec;
        self.weights.clear();
        if spec.weighted {
            self.weights.extend_from_slice(weights);
        }
        let experts = spec.map.slots_of(fixed.lanes.rank).len();
        self.received.fill(spec.metadata(), &self.layout, experts, words);
    }

    /// Size of this rank's chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.offer.bytes()
    }
}

/// The placement of one dispatch on the host.
#[derive(Debug)]
pub(in crate::ep) struct HostHandle {
    inner: Inner,
    pool: Arc<Pool>,
    spare: Arc<ArrayQueue<Inner>>,
    lanes: Arc<[LaneUse]>,
}

impl HostHandle {
    pub fn new(inner: Inner, pool: Arc<Pool>, spare: Arc<ArrayQueue<Inner>>, lanes: Arc<[LaneUse]>) -> Self {
        HostHandle { inner, pool, spare, lanes }
    }

    pub fn inner(&self) -> &Inner {
        &self.inner
    }

    /// Tokens dispatched by this rank.
    pub fn tokens(&self) -> u32 {
        self.inner.layout.tokens
    }

    /// How the bytes of the dispatch went.
    pub fn report(&self) -> Report {
        let DispatchMoves { moved, relayed, traffic } = self.inner.moves;
        let dropped_weight = self.inner.dropped_weight;
        Report { lanes: self.lanes.to_vec(), moved, relayed, traffic, dropped_weight, ..Report::default() }
    }

    /// How those of the last return went.
    pub fn return_report(&self) -> Report {
        Report { lanes: self.lanes.to_vec(), moved: self.inner.returned.load(), ..Report::default() }
    }

    /// An output buffer: that of the last call that was refused, or a new one.
    pub fn output(&self) -> Result<HostOutput, Error> {
        let inner = self.inner();
        let extent = match inner.refused.take() {
            Some(extent) => extent,
            None => self.pool.alloc(inner.chunk_bytes())?,
        };
        let (chunk, number, instance) = (inner.offer, inner.number, inner.instance);
        Ok(HostOutput { extent, chunk, number, instance })
    }
}

impl Drop for HostHandle {
    fn drop(&mut self) {
        let inner = std::mem::take(&mut self.inner);
        drop(inner.refused.take());
        if let Some(RetainedBuffer { extent, release, value }) = inner.kept.take() {
            self.pool.retire(extent, &release, value);
        }
        // A full queue means that enough memory is kept for later.
        let _ = self.spare.push(inner);
    }
}
