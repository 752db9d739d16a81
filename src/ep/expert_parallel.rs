//! The object that calls are made on.

use std::sync::Arc;

use super::builder::{DeviceSettings, Instance, Spec};
use super::device::EnqueuedExchange;
use super::handle::{CombineAt, DispatchAt, HandleAt, Unfinished};
use super::host::HostExchange;
use super::rows::{ExpertRows, RowsAt, TokensAt};
use super::tensor::{Choices, Place, Shape, Side, Tensor, TensorMut, wrong_place};
use super::{
    CallExecutor, CombineInput, DeviceHeapReport, ExpertParallelBuilder, Feature, Handle, HeapAllocator,
    LaneUse, PendingCombine, PendingDispatch, TokenBuffer,
};
use crate::device::Stream;
use crate::dtype::{Dtype, Element, Fp8RowShape};
use crate::ep::device::slots::SlotExchange;
use crate::error::{CallError, CallKind, Error};
use crate::memory::Pool;
use crate::plan::ExpertMap;
use crate::rows::Arithmetic;
use crate::world::{Group, WorldState};

/// MoE dispatch and combine over a group of ranks, on the host or on a CUDA stream.
///
/// ```
/// use half::bf16;
/// use sidelane::{Dtype, World, gate::Routing};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut ep = sidelane::ExpertParallel::builder(&world.all()?)
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
///
/// On a device, [`on`](ExpertParallelBuilder::on) names the stream of the calls. They are the same
/// calls, with tensors of the device. Each is enqueued, and its results are ready for the work that
/// the caller enqueues next:
///
/// ```no_run
/// # use std::sync::Arc;
/// use sidelane::device::{Driver, Priority, Stream};
/// use sidelane::ep::{Choices, Tensor, TensorMut};
/// use sidelane::{Dtype, ExpertParallel, World};
/// # fn layer([x, experts, weights, out]: [sidelane::device::DeviceRange; 4]) -> sidelane::Result<()> {
/// let world = World::from_env()?;
/// let stream = Arc::new(Stream::new(&Driver::open()?.context(0)?, Priority::Normal)?);
/// let mut ep = ExpertParallel::builder(&world.all()?)
///     .experts(64).top_k(8).hidden(2048).dtype(Dtype::Bf16).on(&stream).build()?;
/// let choices = Choices::Device { experts: &experts, weights: &weights };
/// let (rows, handle) = ep.dispatch(Tensor::device(&x, Dtype::Bf16), choices)?;
/// let y = handle.output()?;
/// // ... enqueue the experts on `stream`: from rows.range()? to y.range()?, by handle.tokens_per_expert() ...
/// ep.combine_into(y, &handle, TensorMut::device(&out, Dtype::Bf16))?;   // `out` is there for what is enqueued next
/// # Ok(())
/// # }
/// ```
///
/// [`Feature`] is the table of features by place. A missing one is refused by name when the
/// instance is built.
///
/// An instance may be dropped when the host has enqueued its last call. Graphs that hold its calls
/// must not be launched any more. In fixed slots over several nodes, confirm first that the stream
/// is done, by [`synchronize`](Self::synchronize) or [`Stream::is_done`]. Until Sidelane sees that,
/// a thread serves the stream and holds the world. If the process exits then, other ranks see it as
/// lost.
pub struct ExpertParallel {
    at: InstanceAt,
    shared: Arc<WorldState>,
    spec: Spec,
    device: DeviceSettings,
    ranks: (u32, u32),
}

#[derive(Debug)]
enum InstanceAt {
    Host(Box<HostExchange>),
    Enqueued(Box<EnqueuedExchange>),
    Slots { ep: Box<SlotExchange>, stream: Arc<Stream> },
}

impl Drop for ExpertParallel {
    fn drop(&mut self) {
        if let InstanceAt::Slots { ep, stream } = &mut self.at {
            ep.close(stream);
        }
    }
}

impl ExpertParallel {
    /// Starts to describe one.
    pub fn builder(group: &Group) -> ExpertParallelBuilder<'_> {
        ExpertParallelBuilder::new(group)
    }

    pub(super) fn new(
        group: &Group,
        spec: Spec,
        instance: Instance,
        device: DeviceSettings,
    ) -> Result<Self, Error> {
        let at = match instance {
            Instance::Host => InstanceAt::Host(Box::new(HostExchange::new(group, spec.clone())?)),
            Instance::Enqueued(settings) => {
                InstanceAt::Enqueued(Box::new(EnqueuedExchange::new(group, spec.clone(), settings)?))
            }
            Instance::Slots(stream) => {
                let ep = Box::new(SlotExchange::new(group, &spec, stream.context())?);
                InstanceAt::Slots { ep, stream }
            }
        };
        let ranks = (group.rank(), group.size());
        Ok(ExpertParallel { at, shared: Arc::clone(&group.shared), spec, device, ranks })
    }

    /// The settings of this instance for another group: that of the survivors, once
    /// [`World::rebuild`](crate::World::rebuild) has gathered them. `map` says where the experts
    /// live there, of which there are as many as before. If all experts of lost ranks have
    /// replicas, [`ExpertMap::subset`] is such a map. Settings may change until
    /// [`build`](ExpertParallelBuilder::build) makes the instance, which has no mask. Calls on a
    /// device go on the stream of this instance.
    ///
    /// This instance stays as it is, in its failed world, so a rebuild that fails can be tried
    /// again. Drop it then: it holds the memory of that world.
    pub fn rebuilt<'g>(&self, group: &'g Group, map: ExpertMap) -> ExpertParallelBuilder<'g> {
        ExpertParallelBuilder::rebuilt(group, map, (&self.spec, self.stream(), self.device))
    }

    /// This rank's position in the group.
    pub fn rank(&self) -> u32 {
        self.ranks.0
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.ranks.1
    }

    /// Place of its rows.
    pub fn place(&self) -> Place {
        self.stream().map_or(Place::Host, |stream| Place::Device(stream.device()))
    }

    /// Executor of its calls.
    pub fn executor(&self) -> CallExecutor {
        match &self.at {
            InstanceAt::Host(_) => CallExecutor::HostStepper,
            InstanceAt::Enqueued(_) => CallExecutor::Enqueuer,
            InstanceAt::Slots { .. } => CallExecutor::ConstantProgram,
        }
    }

    /// Stream of its calls, on a device.
    pub fn stream(&self) -> Option<&Arc<Stream>> {
        match &self.at {
            InstanceAt::Host(_) => None,
            InstanceAt::Enqueued(ep) => Some(ep.stream()),
            InstanceAt::Slots { stream, .. } => Some(stream),
        }
    }

    /// On a device: enqueues the next calls on another stream of the device. They come behind all
    /// that the stream before has been given by now; what is given to it later must not use rows or
    /// outputs that are given back. In slots the caller orders the streams by events.
    /// [`synchronize`](ExpertParallel::synchronize) then waits for the new stream.
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`](crate::error::DeviceError) for a stream of another device, and
    /// [`DeviceError::OtherContext`](crate::error::DeviceError) for one of another context of the
    /// device, such as that before a reset. [`PlanError::NotAvailable`](crate::error::PlanError)
    /// for other instances.
    pub fn set_stream(&mut self, stream: &Arc<Stream>) -> Result<(), Error> {
        match &mut self.at {
            InstanceAt::Slots { stream: of_calls, .. } => {
                stream.require_context(of_calls.context())?;
                *of_calls = Arc::clone(stream);
                Ok(())
            }
            InstanceAt::Enqueued(ep) => ep.set_stream(stream),
            InstanceAt::Host(_) => Ok(Feature::Streams.require(CallExecutor::HostStepper)?),
        }
    }

    /// Where experts live, and which ranks are active.
    pub fn expert_map(&self) -> &ExpertMap {
        match &self.at {
            InstanceAt::Host(ep) => &ep.spec().map,
            InstanceAt::Enqueued(ep) => ep.expert_map(),
            InstanceAt::Slots { ep, .. } => ep.expert_map(),
        }
    }

    /// Elements of a row.
    pub fn hidden(&self) -> usize {
        self.spec.hidden
    }

    /// Choices per token.
    pub fn top_k(&self) -> u32 {
        self.spec.top_k
    }

    /// How a row is laid out that is dispatched in fp8; nothing where rows are dispatched as they
    /// are.
    pub fn record(&self) -> Option<Fp8RowShape> {
        self.spec.record
    }

    /// Makes records of tokens, `[tokens, hidden]`, for a dispatch in fp8: values in e4m3, each 128
    /// of them with a scale. `records` is overwritten. On the host.
    ///
    /// # Errors
    /// [`CallError::NotKept`] where rows are not dispatched in fp8;
    /// [`PlanError`](crate::error::PlanError) for tensors of another shape, type or place.
    pub fn quantize<'a>(&self, tokens: impl Into<Tensor<'a>>, records: &mut Vec<u8>) -> Result<(), Error> {
        let (shape, tokens) = (self.records()?, tokens.into());
        let (rows, dtype) = tokens.on_host("tokens")?;
        let count = rows.len() / dtype.size() / shape.hidden().max(1);
        records.clear();
        records.resize(count * shape.bytes(), 0);
        self.quantize_into(tokens, records)
    }

    /// As [`ExpertParallel::quantize`], into a tensor of the caller's, `[tokens, record]` in bytes.
    /// On a device the records are there for what is enqueued next; a dispatch there also makes
    /// records itself, of tokens that are none.
    ///
    /// # Errors
    /// As [`ExpertParallel::quantize`]; [`DeviceError`](crate::error::DeviceError).
    pub fn quantize_into<'a, 'o>(
        &self,
        tokens: impl Into<Tensor<'a>>,
        records: impl Into<TensorMut<'o>>,
    ) -> Result<(), Error> {
        let (shape, tokens, records) = (self.records()?, tokens.into(), records.into());
        let dtype = tokens.dtype();
        let arithmetic = Arithmetic::try_from(dtype)?;
        let rows = (tokens.bytes() / dtype.size() as u64).div_ceil(shape.hidden() as u64);
        let plain = Shape { rows, columns: shape.hidden(), dtype };
        let made = Shape { rows, columns: shape.bytes(), dtype: Dtype::Bytes };
        match &self.at {
            InstanceAt::Enqueued(ep) => {
                let tokens = tokens.on_device("tokens", plain, ep.stream().device())?;
                ep.quantize((tokens, dtype), records.on_device("records", made, ep.stream().device())?)
            }
            _ => {
                let loops = &self.host(Feature::Fp8)?.fixed.lanes.rows;
                let ((tokens, seen), (records, bytes)) =
                    (tokens.on_host("tokens")?, records.on_host("records")?);
                plain.check("tokens", tokens.len() as u64, seen)?;
                made.check("records", records.len() as u64, bytes)?;
                Ok(loops.quantize(arithmetic, shape, tokens, records)?)
            }
        }
    }

    /// How records are laid out, where rows are dispatched as such.
    fn records(&self) -> Result<Fp8RowShape, Error> {
        Ok(self.record().ok_or(CallError::NotKept { missing: "a row record (fp8)" })?)
    }

    /// A buffer for rows to be dispatched, which NICs and, on a device, copy engines read in place
    /// where they can. While there is one on a device, the host plans dispatches: it looks whether
    /// they can.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError),
    /// [`PlanError::NotAvailable`](crate::error::PlanError).
    pub fn token_buffer(&self, tokens: u32) -> Result<TokenBuffer, Error> {
        Feature::TokenBuffers.require(self.executor())?;
        let row_bytes = self.spec.sizing(CallKind::Dispatch, None).row_bytes;
        let at = match &self.at {
            InstanceAt::Enqueued(ep) => TokensAt::Enqueued(ep.token_buffer(tokens)?),
            _ => {
                let pool = self.host(Feature::TokenBuffers)?.pool();
                TokensAt::Host(pool.alloc(u64::from(tokens) * row_bytes)?)
            }
        };
        Ok(TokenBuffer { at, tokens, row_bytes })
    }

    /// An allocator over the device heap, for tokens and other tensors of a library that takes an
    /// allocator, as torch does. One at a time serves a device in a process.
    ///
    /// # Errors
    /// [`MemoryError::AllocatorTaken`](crate::error::MemoryError) while another one serves the
    /// device, [`PlanError::NotAvailable`](crate::error::PlanError) on the host and in slots.
    pub fn heap_allocator(&self) -> Result<HeapAllocator, Error> {
        Feature::DeviceHeap.require(self.executor())?;
        match &self.at {
            InstanceAt::Enqueued(ep) => ep.heap_allocator(),
            _ => Err(wrong_place("a heap allocator", Side::Device)),
        }
    }

    /// Size, limit and use of the device heap in bytes, and its growths; none on the host and in
    /// slots.
    pub fn device_heap(&self) -> Option<DeviceHeapReport> {
        match &self.at {
            InstanceAt::Enqueued(ep) => Some(ep.device_heap()),
            _ => None,
        }
    }

    /// The receive pool of this rank's host memory.
    #[doc(hidden)]
    pub fn pool(&self) -> &Arc<Pool> {
        self.shared.heap.pool()
    }

    /// The lanes of this group, and how many ranks each reaches.
    pub fn lanes(&self) -> &[LaneUse] {
        match &self.at {
            InstanceAt::Host(ep) => &ep.space.lane_use,
            InstanceAt::Enqueued(ep) => ep.lanes(),
            InstanceAt::Slots { ep, .. } => ep.lanes(),
        }
    }

    /// Sends every token to the ranks of its experts, and receives the rows of this rank's experts.
    /// Collective.
    ///
    /// `x` is `[tokens, hidden]`, `choices` `[tokens, top_k]`; both may be empty.
    ///
    /// # Errors
    /// On every rank, before a byte moves: [`PlanError`](crate::error::PlanError) where the input
    /// is wrong ([`PeerRefused`](crate::error::CallError) on the others), [`CallError`] where ranks
    /// make different calls, [`MemoryError::OutOfSpace`](crate::error::MemoryError) if a rank
    /// cannot hold its rows. The world stays usable after these.
    /// [`LaneError`](crate::error::LaneError), [`DeviceError`](crate::error::DeviceError) of calls
    /// that the host finishes, and [`Cause`](crate::error::Cause) end it.
    ///
    /// A rank on whose device as many dispatches are alive as there is memory for refuses the call
    /// likewise, by [`CallError::TooManyInFlight`].
    ///
    /// In slots, fixed ones and those of a budget with [`Graphs::Slots`](super::Graphs::Slots), no
    /// host waits for another. So the rank that refuses gets its error at once, and the others'
    /// streams find it in the call: no rank has rows, and sums are zeros. The verdict of the call
    /// says so at each rank ([`Handle::status`]), and so do [`synchronize`](Self::synchronize) and
    /// [`check`](Self::check) until the next call: by [`PeerRefused`](crate::error::CallError) or,
    /// where a rank is over its budget, by [`DeviceError::Fault`](crate::error::DeviceError). An
    /// expert that does not exist is found by streams alone, and refused likewise.
    ///
    /// On a device two refusals are this rank's alone. They come before anything is enqueued:
    ///
    /// - [`PlanError::NotAvailable`](crate::error::PlanError) for any call of exact sizes, or of a
    ///   budget without graphs, on a stream that is being captured: a graph does not know the sizes
    ///   of its launches;
    /// - all refusals in slots of a call that is being captured, which can be captured again.
    pub fn dispatch<'a>(
        &mut self,
        x: impl Into<Tensor<'a>>,
        choices: impl Into<Choices<'a>>,
    ) -> Result<(ExpertRows, Handle), Error> {
        match &mut self.at {
            InstanceAt::Host(ep) => {
                let (x, routing) = (x.into().on_host("tokens"), choices.into().on_host());
                let (rows, handle) = ep.start_dispatch(x, routing, false)?.finish()?;
                Ok((ExpertRows(RowsAt::Host(rows)), Handle(HandleAt::Host(handle))))
            }
            _ => {
                let (x, choices): (Tensor<'_>, Choices<'_>) = (x.into(), choices.into());
                self.start_dispatch(x, choices)?.finish()
            }
        }
    }

    /// First half of [`ExpertParallel::dispatch`]: announces memory and publishes counts, and does
    /// not wait. Until the second half, what this rank does for other nodes is done in a thread of
    /// its own.
    ///
    /// On a device, choices are counted and rows for other ranks are packed; all else is the
    /// second half's, so peers wait for that. It places this rank's own rows. Over
    /// [`Route::Pxn`](crate::topology::Route), and for `x` in memory of the instance (rows,
    /// outputs, a [`TokenBuffer`]), it packs, too. Until then `x` stays as it is, also for what is
    /// enqueued in between. In slots the dispatch is enqueued.
    ///
    /// # Errors
    /// Those that end the world, and the refusals that are this rank's alone
    /// ([`ExpertParallel::dispatch`]). Bad input is reported by the second half, on all ranks.
    pub fn start_dispatch<'a>(
        &'a mut self,
        x: impl Into<Tensor<'a>>,
        choices: impl Into<Choices<'a>>,
    ) -> Result<PendingDispatch<'a>, Error> {
        let (x, choices) = (x.into(), choices.into());
        Ok(PendingDispatch(match &mut self.at {
            InstanceAt::Host(ep) => {
                DispatchAt::Host(ep.start_dispatch(x.on_host("tokens"), choices.on_host(), true)?)
            }
            InstanceAt::Enqueued(ep) => {
                let started = ep.start_dispatch(x, choices)?;
                DispatchAt::Enqueued { started, unfinished: Unfinished::new(&self.shared), ep }
            }
            InstanceAt::Slots { ep, stream } => {
                let started = ep.start_dispatch(stream, x, choices)?;
                DispatchAt::Slots { started, unfinished: Unfinished::new(&self.shared), ep, stream }
            }
        }))
    }

    /// Sends tokens along the layout of an earlier dispatch: no ids, no counts. Collective.
    ///
    /// `x` is `[tokens, hidden]` with the tokens of that dispatch.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`], and [`CallError::ForeignHandle`].
    pub fn dispatch_cached<'a>(
        &mut self,
        x: impl Into<Tensor<'a>>,
        handle: &Handle,
    ) -> Result<ExpertRows, Error> {
        Feature::CachedDispatch.require(self.executor())?;
        let (x, kind, foreign) = (x.into(), CallKind::CachedDispatch, self.foreign(handle));
        Ok(ExpertRows(match (&mut self.at, &handle.0) {
            (InstanceAt::Host(ep), _) => {
                RowsAt::Host(ep.cached((kind, 0), x.on_host("tokens"), handle.on_host())?)
            }
            (InstanceAt::Enqueued(ep), HandleAt::Enqueued(handle)) => {
                RowsAt::Enqueued(ep.cached(kind, x, handle)?)
            }
            (InstanceAt::Enqueued(ep), _) => return Err(ep.refuse(kind, None, foreign)),
            (InstanceAt::Slots { .. }, _) => return Err(foreign),
        }))
    }

    /// The layout of a dispatch, and what goes with its rows; no row moves. Collective.
    ///
    /// Rows follow by [`ExpertParallel::dispatch_cached`], as often as there are tokens for these
    /// choices, `[tokens, top_k]`: the same rows as by [`ExpertParallel::dispatch`], and with the
    /// same bits. Meanwhile the handle says how many rows each expert gets, with which weights; its
    /// report says what moved beside them. Memory for rows is taken by the calls that bring them,
    /// which may find that there is none.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`].
    pub fn prepare<'a>(&mut self, choices: impl Into<Choices<'a>>) -> Result<Handle, Error> {
        let choices = choices.into();
        if let InstanceAt::Enqueued(ep) = &mut self.at {
            return Ok(Handle(HandleAt::Enqueued(ep.prepare(choices)?)));
        }
        let handle = self.host_mut(Feature::CachedDispatch)?.prepare(choices.on_host())?;
        Ok(Handle(HandleAt::Host(handle)))
    }

    /// Brings expert outputs back to their tokens and sums them: `[tokens, hidden]`, for a new
    /// `Vec` on the host. Collective.
    ///
    /// `y` is the buffer of [`Handle::output`], which is used in place, or any slice of rows, which
    /// is copied once.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`], and [`CallError::ForeignHandle`]. After an error that
    /// leaves the world usable, [`Handle::output`] gives the buffer back.
    pub fn combine<'a, E: Element>(
        &mut self,
        y: impl Into<CombineInput<'a>>,
        handle: &Handle,
    ) -> Result<Vec<E>, Error> {
        let mut out = vec![E::zeroed(); handle.tokens() as usize * self.spec.hidden];
        self.combine_into(y, handle, &mut out)?;
        Ok(out)
    }

    /// As [`ExpertParallel::combine`], into a tensor of the caller's. On a device the combine is
    /// enqueued, and `out` is there for what is enqueued next; [`Handle::return_report`] says how
    /// the call went on all ranks.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`]; in slots on a device as [`ExpertParallel::dispatch`].
    pub fn combine_into<'a, 'o>(
        &mut self,
        y: impl Into<CombineInput<'a>>,
        handle: &Handle,
        out: impl Into<TensorMut<'o>>,
    ) -> Result<(), Error> {
        let (y, out, foreign) = (y.into(), out.into(), self.foreign(handle));
        match (&mut self.at, &handle.0) {
            (InstanceAt::Host(ep), _) => {
                ep.combine(y.on_host(), handle.on_host(), out.on_host("combined tokens"))
            }
            (InstanceAt::Enqueued(ep), HandleAt::Enqueued(handle)) => ep.combine(y, handle, out),
            (InstanceAt::Slots { ep, stream }, HandleAt::Slots(handle)) => {
                let started = ep.start_combine(stream, y, handle, Some(&out))?;
                ep.finish_combine(stream, started, handle, out)
            }
            (InstanceAt::Enqueued(ep), _) => Err(ep.refuse(CallKind::Combine, None, foreign)),
            (InstanceAt::Slots { ep, stream }, _) => Err(ep.refuse(stream, CallKind::Combine, foreign)),
        }
    }

    /// First half of [`ExpertParallel::combine`]: offers this rank's rows, and does not wait for
    /// the others'. Until the second half, a thread of the relay's own does this rank's work for
    /// other nodes. On a device the stream marks that rows may be read, and the
    /// second half does the rest.
    ///
    /// # Errors
    /// Those that end the world, and refusals that concern this rank alone. The second half reports
    /// bad input, on all ranks.
    pub fn start_combine<'a, 'b>(
        &'a mut self,
        y: impl Into<CombineInput<'b>>,
        handle: &'a Handle,
    ) -> Result<PendingCombine<'a>, Error> {
        let (y, foreign) = (y.into(), self.foreign(handle));
        Ok(PendingCombine(match (&mut self.at, &handle.0) {
            (InstanceAt::Host(ep), _) => CombineAt::Host(ep.start_combine(y.on_host(), handle.on_host())?),
            (InstanceAt::Enqueued(ep), HandleAt::Enqueued(enqueued)) => {
                let started = ep.start_combine(y, enqueued, None)?;
                CombineAt::Enqueued { started, handle, unfinished: Unfinished::new(&self.shared), ep }
            }
            (InstanceAt::Slots { ep, stream }, HandleAt::Slots(slots)) => {
                let started = ep.start_combine(stream, y, slots, None)?;
                CombineAt::Slots { started, handle, unfinished: Unfinished::new(&self.shared), ep, stream }
            }
            (InstanceAt::Enqueued(ep), _) => return Err(ep.refuse(CallKind::Combine, None, foreign)),
            (InstanceAt::Slots { ep, stream }, _) => {
                return Err(ep.refuse(stream, CallKind::Combine, foreign));
            }
        }))
    }

    /// Fixed slots on a device, instead of a combine: what was received has been read, and nothing
    /// returns. Without a handle, of the last dispatch. Collective. A rank that refused its last
    /// dispatch may make it before it captures the next one.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine_into`]; [`PlanError::NotAvailable`](crate::error::PlanError)
    /// for other instances, whose dispatches need no combine.
    pub fn release(&mut self, handle: Option<&Handle>) -> Result<(), Error> {
        let (executor, foreign) = (self.executor(), handle.map(|handle| self.foreign(handle)));
        match (&mut self.at, handle.map(|handle| &handle.0)) {
            (InstanceAt::Slots { ep, stream }, Some(HandleAt::Slots(handle))) => {
                ep.release(stream, Some(handle))
            }
            (InstanceAt::Slots { ep, stream }, None) => ep.release(stream, None),
            (InstanceAt::Slots { ep, stream }, Some(_)) => {
                foreign.map_or(Ok(()), |foreign| Err(ep.refuse(stream, CallKind::Combine, foreign)))
            }
            _ => Ok(Feature::Release.require(executor)?),
        }
    }

    /// Gradient of [`ExpertParallel::dispatch`]: sums row gradients to their tokens
    /// (`[tokens, hidden]`), in the order of combine; with `row_weight_gradients` (one per received
    /// row or, rank-major, per row and choice) also returns those, `[tokens, top_k]`, zero for
    /// dropped choices. Collective.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`].
    pub fn dispatch_backward<'a, E: Element>(
        &mut self,
        row_gradients: impl Into<CombineInput<'a>>,
        row_weight_gradients: Option<&[f32]>,
        handle: &Handle,
    ) -> Result<(Vec<E>, Option<Vec<f32>>), Error> {
        let tokens = handle.tokens() as usize;
        let mut out = vec![E::zeroed(); tokens * self.spec.hidden];
        let mut weights = row_weight_gradients.map(|_| vec![0.0_f32; tokens * self.spec.top_k as usize]);
        let (of_rows, weights_out) =
            (row_weight_gradients.map(Tensor::from), weights.as_mut().map(TensorMut::from));
        self.dispatch_backward_into(row_gradients, of_rows, handle, &mut out, weights_out)?;
        Ok((out, weights))
    }

    /// As [`ExpertParallel::dispatch_backward`], into tensors of the caller's: `weights` is
    /// `f32 [tokens, top_k]`, if there are `row_weight_gradients`, `f32 [rows]`. On a device the
    /// gradients are there for what is enqueued next.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`].
    pub fn dispatch_backward_into<'a, 'o>(
        &mut self,
        row_gradients: impl Into<CombineInput<'a>>,
        row_weight_gradients: Option<Tensor<'_>>,
        handle: &Handle,
        tokens: impl Into<TensorMut<'o>>,
        weights: Option<TensorMut<'_>>,
    ) -> Result<(), Error> {
        Feature::Gradients.require(self.executor())?;
        let (rows, tokens, foreign) = (row_gradients.into(), tokens.into(), self.foreign(handle));
        match (&mut self.at, &handle.0) {
            (InstanceAt::Host(ep), _) => {
                let of_rows = row_weight_gradients.map(|given| given.numbers("row weight gradients"));
                let weights = weights.map_or(Ok(&mut [][..]), |out| out.numbers("weight gradients"));
                let out = (tokens.on_host("token gradients"), weights);
                ep.dispatch_backward((rows.on_host(), of_rows), handle.on_host(), out)
            }
            (InstanceAt::Enqueued(ep), HandleAt::Enqueued(handle)) => {
                ep.dispatch_backward((rows, row_weight_gradients), handle, (tokens, weights))
            }
            (InstanceAt::Enqueued(ep), _) => Err(ep.refuse(CallKind::DispatchBackward, None, foreign)),
            (InstanceAt::Slots { .. }, _) => Err(foreign),
        }
    }

    /// Gradient of [`ExpertParallel::combine`]: brings token gradients (`[tokens, hidden]`) to the
    /// rows that were summed. If the combine was weighted, rows are multiplied with their weight,
    /// and the weight gradients `<y, g>` return, `[tokens, top_k]`, zero for dropped choices.
    /// Collective.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch_cached`]; [`CallError::NotKept`] if a weighted combine of this
    /// handle has not been made before.
    pub fn combine_backward<'a>(
        &mut self,
        gradients: impl Into<Tensor<'a>>,
        handle: &Handle,
    ) -> Result<(ExpertRows, Option<Vec<f32>>), Error> {
        let choices = handle.tokens() as usize * self.spec.top_k as usize;
        let mut weights = self.spec.weighted.then(|| vec![0.0_f32; choices]);
        let rows = self.combine_backward_into(gradients, handle, weights.as_mut().map(TensorMut::from))?;
        Ok((rows, weights))
    }

    /// As [`ExpertParallel::combine_backward`]; weight gradients of a weighted combine go to a
    /// tensor of the caller's, `f32 [tokens, top_k]`, if there is one. On a device they are there
    /// for what is enqueued next.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine_backward`].
    pub fn combine_backward_into<'a>(
        &mut self,
        gradients: impl Into<Tensor<'a>>,
        handle: &Handle,
        weights: Option<TensorMut<'_>>,
    ) -> Result<ExpertRows, Error> {
        Feature::Gradients.require(self.executor())?;
        let (gradients, kind, foreign) = (gradients.into(), CallKind::CombineBackward, self.foreign(handle));
        if weights.is_some() && !self.spec.weighted {
            let unweighted = CallError::NotKept { missing: "weights: combines are not weighted" };
            return Err(self.refuse(kind, Some(handle), unweighted.into()));
        }
        Ok(ExpertRows(match (&mut self.at, &handle.0) {
            (InstanceAt::Host(ep), _) => {
                let weights = weights.map(|out| out.numbers("weight gradients"));
                RowsAt::Host(ep.combine_backward(gradients.on_host("tokens"), handle.on_host(), weights)?)
            }
            (InstanceAt::Enqueued(ep), HandleAt::Enqueued(handle)) => {
                RowsAt::Enqueued(ep.combine_backward(gradients, handle, weights)?)
            }
            (InstanceAt::Enqueued(ep), _) => return Err(ep.refuse(kind, None, foreign)),
            (InstanceAt::Slots { .. }, _) => return Err(foreign),
        }))
    }

    /// Moves experts to other ranks: the dispatches that follow go by this map. What the ranks hold
    /// of the experts themselves is the caller's to move. Collective; no handle of the old map may
    /// be alive. On a device the caller's thread waits until the stream has done what was enqueued.
    /// The mask of ranks stays ([`ExpertParallel::mask`]).
    ///
    /// # Errors
    /// On every rank, and the old map stays: [`PlanError::BadParameter`](crate::error::PlanError)
    /// if the map is of other ranks or experts, or has not as many slots;
    /// [`CallError::HandlesAlive`]; [`CallError::Disagree`] if ranks bring different maps.
    pub fn set_expert_map(&mut self, map: ExpertMap) -> Result<(), Error> {
        Feature::ExpertMaps.require(self.executor())?;
        // A map of other ranks is refused as such.
        let map = map.with_active(self.active()).unwrap_or(map);
        match &mut self.at {
            InstanceAt::Enqueued(ep) => ep.set_expert_map(Ok(map)),
            _ => self.host_mut(Feature::ExpertMaps)?.set_expert_map(Ok(map)),
        }
    }

    /// Masks ranks, for maintenance or to drain them: a flag for each rank of the group, true for
    /// an active one. Collective, the masked ranks included, which live and make all calls with the
    /// others. Nothing moves, and every receive buffer keeps its shape. No handle of the old mask
    /// may be alive; in slots on a device, no dispatch may wait for its combine. On a device the
    /// caller's thread waits until the stream has done what was enqueued, and graphs that were
    /// captured before go by the new mask.
    ///
    /// In the dispatches that follow, a masked rank sends no rows and receives none: in fixed slots
    /// its slots everywhere are zero. Choices of its experts go to replicas at active ranks, by the
    /// rule of the [map](ExpertMap). Choices without an active replica are dropped
    /// ([`Handle::dropped`], [`Handle::dropped_mask`]), and so are all choices of a masked rank's
    /// tokens. [`Report::dropped_weight`](super::Report::dropped_weight) adds up their weights,
    /// where the host knows them. The sums are those of the choices that are left, to the bit. A
    /// new instance has no mask.
    ///
    /// The loss of a rank ends the world, with a mask or without.
    ///
    /// # Errors
    /// On every rank, and the old mask stays: [`PlanError::BadParameter`](crate::error::PlanError)
    /// if there is not a flag for each rank, or no rank is active; [`CallError::HandlesAlive`];
    /// [`CallError::Disagree`] if ranks bring different masks. In slots on a device, where ranks
    /// agree through the coordinator: [`CallError::OutOfTurn`] and what
    /// [`synchronize`](Self::synchronize) finds; for other ranks' refusals and different masks,
    /// [`CallError::ConfigsDiffer`].
    pub fn mask(&mut self, active: &[bool]) -> Result<(), Error> {
        let map = self.expert_map().with_active(active).map_err(Error::from);
        match &mut self.at {
            InstanceAt::Host(ep) => ep.set_expert_map(map),
            InstanceAt::Enqueued(ep) => ep.set_expert_map(map),
            InstanceAt::Slots { ep, stream } => ep.mask(stream, map),
        }
    }

    /// Per rank of the group: whether it is active ([`ExpertParallel::mask`]).
    pub fn active(&self) -> &[bool] {
        self.expert_map().active()
    }

    /// Enters a call that this rank cannot make, because it has nothing usable to bring, so that
    /// the other ranks hear of it and do not wait. They get
    /// [`PeerRefused`](CallError::PeerRefused), nothing moves anywhere, and the next call works.
    /// `handle` is that of calls along one, if there is any. Returns the error to report here:
    /// `error`, or the one that ended the world meanwhile.
    ///
    /// In slots on a device the other ranks' streams hear of it, and then their hosts
    /// ([`dispatch`](Self::dispatch)). The next call is a dispatch.
    pub fn refuse(&mut self, call: CallKind, handle: Option<&Handle>, error: Error) -> Error {
        match &mut self.at {
            InstanceAt::Host(ep) => ep.refuse(call, handle.and_then(Handle::host), error),
            InstanceAt::Enqueued(ep) => {
                let handle = handle.and_then(|handle| match &handle.0 {
                    HandleAt::Enqueued(handle) => Some(handle),
                    _ => None,
                });
                ep.refuse(call, handle, error)
            }
            InstanceAt::Slots { ep, stream } => ep.refuse(stream, call, error),
        }
    }

    /// Blocks until everything in the stream is done, even if the world fails, and returns the
    /// outcome. Use it at the end of a step or of a test: on a device no other call waits until the
    /// stream is idle. Except in slots, the second half of a dispatch waits until the stream has
    /// reached the call, and so does that of a combine over several nodes. On the host there is
    /// nothing to wait for.
    ///
    /// In fixed slots with words in device memory, a stream of Sidelane's ends the waits of a
    /// failed world. If blocked streams hold all hardware queues, there is none. Then this returns
    /// the cause with the stream still waiting: it keeps Sidelane's memory, and the caller's
    /// tensors must stay.
    ///
    /// # Errors
    /// [`LaneError::Deadline`](crate::error::LaneError) if a live rank is silent for too long,
    /// which ends the world. In fixed slots it names the first peer that has sent nothing, as far
    /// as words can be read: if the device does not answer, those of the host. If these show no
    /// late peer, it names this rank itself. Else as [`check`](ExpertParallel::check).
    pub fn synchronize(&self) -> Result<(), Error> {
        match &self.at {
            InstanceAt::Host(_) => self.check(),
            InstanceAt::Enqueued(ep) => ep.synchronize(),
            InstanceAt::Slots { ep, stream } => ep.synchronize(stream),
        }
    }

    /// Known errors, without waiting.
    ///
    /// # Errors
    /// [`Cause`](crate::error::Cause); in slots on a device
    /// [`DeviceError::Fault`](crate::error::DeviceError), the fault that a kernel has found, and
    /// [`PeerRefused`](CallError::PeerRefused) or
    /// [`PlanError::RefusedHere`](crate::error::PlanError) where the last call was refused. Sums
    /// are zeros then.
    pub fn check(&self) -> Result<(), Error> {
        match &self.at {
            InstanceAt::Slots { ep, .. } => ep.status(),
            _ => Ok(self.shared.hub.health().check()?),
        }
    }

    /// The refusal of a handle that an instance of another place or executor made.
    fn foreign(&self, handle: &Handle) -> Error {
        let expected = match &self.at {
            InstanceAt::Host(_) => None,
            InstanceAt::Enqueued(ep) => Some(ep.instance()),
            InstanceAt::Slots { ep, .. } => Some(ep.instance()),
        };
        match (handle.instance_on_device(), expected) {
            (Some(seen), Some(expected)) => CallError::ForeignHandle { seen, expected }.into(),
            (_, expected) => {
                wrong_place("the handle", if expected.is_some() { Side::Device } else { Side::Host })
            }
        }
    }

    /// The instance, if its calls are laid out on a device.
    #[cfg(test)]
    pub(super) fn enqueued(&mut self) -> Option<&mut EnqueuedExchange> {
        match &mut self.at {
            InstanceAt::Enqueued(ep) => Some(ep),
            _ => None,
        }
    }

    /// The instance, if it is on the host.
    pub(super) fn host(&self, feature: Feature) -> Result<&HostExchange, Error> {
        feature.require(self.executor())?;
        match &self.at {
            InstanceAt::Host(ep) => Ok(ep),
            _ => Err(wrong_place(feature.name(), Side::Host)),
        }
    }

    /// The same, to call.
    fn host_mut(&mut self, feature: Feature) -> Result<&mut HostExchange, Error> {
        feature.require(self.executor())?;
        match &mut self.at {
            InstanceAt::Host(ep) => Ok(ep),
            _ => Err(wrong_place(feature.name(), Side::Host)),
        }
    }

    /// Makes one call, and does this once all ranks have agreed on it: from then on it is not
    /// refused, and what is left of it is to move rows. Not invoked for refused calls, nor for
    /// dispatches by all-gather. The gradient of a weighted combine is two calls, and the first
    /// invokes it: so it is not for that.
    pub(crate) fn on_agreed<R>(
        &mut self,
        agreed: impl FnOnce() + Send + Sync + 'static,
        call: impl FnOnce(&mut Self) -> R,
    ) -> R {
        if let InstanceAt::Host(ep) = &mut self.at {
            ep.space.on_agreed = Some(Box::new(agreed));
        }
        let done = call(self);
        if let InstanceAt::Host(ep) = &mut self.at {
            ep.space.on_agreed = None;
        }
        done
    }
}

impl std::fmt::Debug for ExpertParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertParallel")
            .field("rank", &self.rank())
            .field("executor", &self.executor())
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}
