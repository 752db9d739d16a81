//! An instance on a device with exact sizes or a budget: the calls that its caller makes. It checks
//! their input, gives each a context, and drives its program; all work is in that
//! ([`caller_stream`](super::caller_stream), [`enqueuer`](super::enqueuer)).
//!
//! ```text
//!   start_dispatch    check, a context | first half of the program
//!   finish_dispatch   second half | rows, handle
//!   combine, ..       check | both halves
//! ```
//!
//! A call in flight owns its state: [`EnqueuedDispatch`], [`EnqueuedCombine`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::REFUSED;
use super::device_pool::{DeviceHeapReport, Extent};
use super::enqueued_results::{EnqueuedDispatch, EnqueuedHandle, EnqueuedOutput, EnqueuedRows, Lease};
use super::enqueuer::{DeviceCall, Enqueuer};
use super::heap_allocator::HeapAllocator;
use super::memory::StreamFlag;
use super::row_transport::RowTransport;
use super::session::{EnqueuedTokens, Session};
use super::watchdog::WaitBreaker;
use crate::bootstrap::wait;
use crate::device::{DeviceRange, Kernels, RecordArgs, Stream};
use crate::dtype::Dtype;
use crate::ep::builder::Spec;
use crate::ep::rows::OutputAt;
use crate::ep::tensor::{Chosen, Shape, Side, Tensor, TensorMut, Tokens, wrong_place};
use crate::ep::{CallExecutor, Choices, CombineInput, ExpertOutput, Feature, LaneUse};
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::plan::ExpertMap;
use crate::rows::Arithmetic;
use crate::schedule::call_program::{CallMachine, RankPrograms};
use crate::schedule::{CallProperties, Class};
use crate::world::SymmetricRange;

/// An [`ExpertParallel`](crate::ExpertParallel) whose calls are laid out one by one: see the
/// [module](super).
///
/// Calls may be in flight when it is dropped.
pub(in crate::ep) struct EnqueuedExchange {
    pub(super) programs: RankPrograms,
    pub(super) stream: Arc<Stream>,
    pub(super) kernels: Arc<Kernels>,
    pub(super) enqueuer: Box<Enqueuer>,
    /// Of each context, and of calls without any. One that no result has is free, and the next
    /// dispatch fills it.
    leases: Vec<Arc<Lease>>,
    /// Per context: returns started.
    returns: Vec<u64>,
    /// All dispatches.
    dispatches: u64,
    lanes: Arc<[LaneUse]>,
    _guards: Vec<WaitBreaker>,
    /// Other nodes write to it as long as this lives.
    _passage: RowTransport,
    _control: SymmetricRange,
}

/// A return between its halves.
#[derive(Debug)]
pub(super) struct Returning {
    machine: CallMachine,
    kind: CallKind,
    /// All ranks must choose alike.
    options: u32,
    context: u32,
    tokens: u32,
    /// Where what returns begins, unless this rank refuses the call.
    base: Option<u64>,
    /// Sums by rank, if these return.
    _sums: Option<Extent>,
    /// Why this rank refuses the call.
    own: Option<Error>,
}

/// A combine between its halves.
#[derive(Debug)]
pub(in crate::ep) struct EnqueuedCombine {
    call: Returning,
    output: Option<EnqueuedOutput>,
}

/// Choices of a call that places rows and, if they go along, the tokens with their type.
type RowsInput<'a> = (Chosen<'a>, Option<(&'a DeviceRange, Dtype)>);

/// How long streams of a failed world are waited for when the exchange goes.
const DRAIN: Duration = Duration::from_secs(10);

/// Parts of an exchange.
pub(super) struct Parts {
    pub programs: RankPrograms,
    pub stream: Arc<Stream>,
    pub kernels: Arc<Kernels>,
    pub enqueuer: Box<Enqueuer>,
    pub guards: Vec<WaitBreaker>,
    pub passage: RowTransport,
    pub control: SymmetricRange,
}

impl EnqueuedExchange {
    /// Of these parts.
    pub(super) fn of(parts: Parts) -> Self {
        let Parts { programs, stream, kernels, enqueuer, guards, passage, control } = parts;
        let contexts = enqueuer.common.shape.word_sets();
        let lanes = LaneUse::of_devices(&enqueuer.common.fixed.lanes).into();
        let lease = |context| Arc::new(Lease::new(&enqueuer.common, context, &lanes));
        EnqueuedExchange {
            programs,
            stream,
            kernels,
            leases: (0..contexts).map(lease).collect(),
            returns: vec![0; contexts as usize],
            enqueuer,
            dispatches: 0,
            lanes,
            _guards: guards,
            _passage: passage,
            _control: control,
        }
    }

    /// The values that only another expert map changes.
    pub(super) fn common(&self) -> &Arc<Session> {
        &self.enqueuer.common
    }

    /// The stream of its calls.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Enqueues the next calls on another stream of the device, behind all that the one before has
    /// been given. Calls then go on as if on one stream: what shares memory with them stays in
    /// order.
    ///
    /// # Errors
    /// As [`ExpertParallel::set_stream`](crate::ExpertParallel::set_stream).
    pub fn set_stream(&mut self, stream: &Arc<Stream>) -> Result<(), Error> {
        stream.require_context(self.stream.context())?;
        // An event of a stream that is captured would not be one of this stream's.
        if stream.is_capturing()? || self.stream.is_capturing()? {
            return Ok(Feature::Capture.require(CallExecutor::Enqueuer)?);
        }
        self.enqueuer.caller.follow(stream)?;
        self.stream = Arc::clone(stream);
        Ok(())
    }

    /// Its number among instances on devices.
    pub fn instance(&self) -> u64 {
        self.common().instance
    }

    /// The lanes of the group.
    pub fn lanes(&self) -> &[LaneUse] {
        &self.lanes
    }

    /// Shape of a tensor of so many tokens.
    pub fn tokens_shape(&self, tokens: u32) -> Shape {
        let Spec { hidden, dtype, .. } = self.common().fixed.spec;
        Shape { rows: tokens.into(), columns: hidden, dtype }
    }

    /// Enqueues that every token goes to the ranks of its experts, and that the rows of this rank's
    /// experts come. Collective. What is enqueued afterwards finds the rows.
    ///
    /// # Errors
    /// [`DeviceError`](crate::error::DeviceError) ends the world. Bad input is reported by
    /// [`EnqueuedDispatch::finish`], on all ranks, and so is [`CallError::TooManyInFlight`], if as
    /// many dispatches are alive as there are contexts.
    pub fn start_dispatch(&mut self, x: Tensor<'_>, choices: Choices<'_>) -> Result<EnqueuedDispatch, Error> {
        let tokens = Tokens::check(&self.common().fixed.spec, self.stream.device(), x, choices);
        self.begin_placing(
            CallKind::Dispatch,
            tokens.map(|tokens| (tokens.chosen(), Some((tokens.x, tokens.dtype)))),
        )
    }

    /// The layout of a dispatch, whose tokens come later.
    ///
    /// # Errors
    /// As [`ExpertParallel::prepare`](crate::ExpertParallel::prepare).
    pub fn prepare(&mut self, choices: Choices<'_>) -> Result<EnqueuedHandle, Error> {
        let chosen = Chosen::check(&self.common().fixed.spec, self.stream.device(), choices);
        let mut started = self.begin_placing(CallKind::Prepare, chosen.map(|chosen| (chosen, None)))?;
        self.serve(&mut started)?;
        started.prepared()
    }

    /// Waits until all ranks have said how many rows they have: not for the rows. Work on them can
    /// be enqueued then.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`](crate::ExpertParallel::dispatch).
    pub fn finish_dispatch(
        &mut self,
        mut started: EnqueuedDispatch,
    ) -> Result<(EnqueuedRows, EnqueuedHandle), Error> {
        self.serve(&mut started)?;
        started.finish()
    }

    /// Second half of a call that places rows.
    fn serve(&mut self, started: &mut EnqueuedDispatch) -> Result<(), Error> {
        let lease = &started.lease;
        let tokens = if started.refused.is_some() { REFUSED } else { lease.tokens };
        let call = ((started.kind, lease.context, lease.planner), (tokens, started.x.take()));
        let served = self.enqueuer.dispatch(&self.programs, started.machine, call.0, call.1);
        served.map_err(|error| self.common().fixed.fail(error))?;
        self.common().count_served();
        Ok(())
    }

    /// Sizes that stay on the device are refused: rows have no place before their number is known.
    /// The call is made first, for the other ranks.
    ///
    /// # Errors
    /// As [`EnqueuedExchange::finish_dispatch`]; [`PlanError::NotAvailable`].
    pub fn finish_dispatch_async(
        &mut self,
        started: EnqueuedDispatch,
    ) -> Result<(EnqueuedRows, EnqueuedHandle), Error> {
        self.finish_dispatch(started)?;
        Feature::Capture.require(CallExecutor::Enqueuer)?;
        Err(PlanError::RefusedHere.into())
    }

    /// First half of a call of this kind that places rows, of choices and, if they go along, their
    /// tokens.
    fn begin_placing(
        &mut self,
        kind: CallKind,
        brought: Result<RowsInput<'_>, Error>,
    ) -> Result<EnqueuedDispatch, Error> {
        self.common().fixed.shared.hub.health().check()?;
        self.refuse_capture()?;
        let common = &self.enqueuer.common;
        let contexts = common.shape.contexts();
        let free = (0..contexts).find(|&context| Arc::get_mut(&mut self.leases[context as usize]).is_some());
        // Without a context the call is entered all the same: the other ranks do not wait.
        let (context, brought) = match free {
            Some(context) => (context, brought),
            None => {
                let full = brought.and(Err(CallError::TooManyInFlight { max: contexts }.into()));
                (common.shape.no_context(), full)
            }
        };
        let (brought, refused) =
            brought.map_or_else(|error| (None, Some(error)), |brought| (Some(brought), None));
        let chosen = brought.map(|(chosen, _)| chosen);
        let count = chosen.map_or(0, |chosen| chosen.tokens);
        self.dispatches += 1;
        let tokens = brought.and_then(|(_, x)| x);
        let packs = common.packs(kind, tokens.map_or(Dtype::Bytes, |(_, dtype)| dtype));
        let planner = common.planner(tokens.is_some_and(|tokens| common.lie_here(kind, tokens).is_some()));
        let lease = &mut self.leases[context as usize];
        Arc::make_mut(lease).fill(common, self.dispatches, (count, planner, packs));
        let lease = Arc::clone(lease);
        let x = tokens.filter(|_| count > 0).map(|(x, dtype)| (x.clone(), dtype));
        let call = DeviceCall::new(&mut self.enqueuer, &self.programs, kind, context);
        let mut call = DeviceCall { planner, chosen, tokens: count, x, ..call };
        let machine = call.begin()?;
        let x = call.x;
        Ok(EnqueuedDispatch { lease, kind, refused, machine, x })
    }

    /// Enqueues that expert outputs come back to their tokens and are summed into `out`.
    /// Collective.
    ///
    /// # Errors
    /// [`DeviceError`](crate::error::DeviceError) ends the world. A refusal of this rank's input,
    /// which the other ranks hear of.
    pub fn combine(
        &mut self,
        y: CombineInput<'_>,
        handle: &EnqueuedHandle,
        out: TensorMut<'_>,
    ) -> Result<(), Error> {
        let out = out.on_device("combined tokens", self.tokens_shape(handle.tokens()), self.stream.device());
        let started = self.start_combine(y, handle, out.as_ref().err().cloned())?;
        // A sum that is refused leaves zeros, where there is room for them.
        self.finish_combine(started, handle, out.ok())
    }

    /// First half: offers outputs, unless something `unfit` refuses the call.
    pub fn start_combine(
        &mut self,
        y: CombineInput<'_>,
        handle: &EnqueuedHandle,
        unfit: Option<Error>,
    ) -> Result<EnqueuedCombine, Error> {
        self.refuse_capture()?;
        if let Err(foreign) = self.own(handle) {
            return Err(self.refuse(CallKind::Combine, None, foreign));
        }
        let summed = Arithmetic::try_from(self.common().fixed.spec.dtype).map_err(Error::from);
        let output = summed.and_then(|_| self.output(y, handle));
        let call = self.offer((CallKind::Combine, 0), handle, output.as_ref(), unfit)?;
        Ok(EnqueuedCombine { call, output: output.ok() })
    }

    /// First half of a return of this kind and these options, unless something `unfit` refuses it.
    /// Its caller has the output for as long as something needs it behind the call.
    pub(super) fn offer(
        &mut self,
        (kind, options): (CallKind, u32),
        handle: &EnqueuedHandle,
        output: Result<&EnqueuedOutput, &Error>,
        unfit: Option<Error>,
    ) -> Result<Returning, Error> {
        let (context, tokens, refused) = (handle.context(), handle.tokens(), output.err().cloned().or(unfit));
        let outputs = output.ok().filter(|_| refused.is_none()).map(|output| output.outputs(kind));
        let call = DeviceCall::new(&mut self.enqueuer, &self.programs, kind, context);
        let mut call = DeviceCall { outputs, refused, ..call };
        let machine = call.begin()?;
        let DeviceCall { base, sums: _sums, refused: own, .. } = call;
        let returns = &mut self.returns[context as usize];
        *returns += 1;
        handle.returns(*returns, kind, own.clone());
        Ok(Returning { machine, kind, options, context, tokens, base, _sums, own })
    }

    /// Second half of a combine: the sums of the rows that came back.
    ///
    /// # Errors
    /// Why this rank refused the call, or the refusal of another rank.
    pub fn finish_combine(
        &mut self,
        started: EnqueuedCombine,
        handle: &EnqueuedHandle,
        out: Option<&DeviceRange>,
    ) -> Result<(), Error> {
        let EnqueuedCombine { call, output } = started;
        self.finish_return(call, out)?;
        if let Some(output) = output.filter(|_| self.common().fixed.spec.weighted) {
            handle.keep(output);
        }
        Ok(())
    }

    /// Second half of a return: what came back goes to `out`.
    ///
    /// # Errors
    /// As [`EnqueuedExchange::finish_combine`].
    pub(super) fn finish_return(
        &mut self,
        mut call: Returning,
        out: Option<&DeviceRange>,
    ) -> Result<(), Error> {
        let own = call.own.take();
        let refused = self.serve_return(call, out).map_err(|error| self.common().fixed.fail(error))?;
        match (refused, own) {
            (None | Some(Error::Plan(PlanError::RefusedHere)), Some(own)) => Err(own),
            (refused, _) => refused.map_or(Ok(()), Err),
        }
    }

    fn serve_return(&mut self, call: Returning, out: Option<&DeviceRange>) -> Result<Option<Error>, Error> {
        let Returning { machine, kind, options, context, tokens, base, .. } = call;
        let (call, offered, sums) = ((kind, context), (base, options), (tokens, out));
        let refused = self.enqueuer.ret(&self.programs, machine, call, offered, sums)?;
        self.common().count_served();
        Ok(refused)
    }

    /// Calls are not captured: a graph would replay them with the words of this call. A query that
    /// fails reports earlier work of the device: then the call cannot be entered.
    pub(super) fn refuse_capture(&self) -> Result<(), Error> {
        match self.stream.is_capturing().map_err(|error| self.common().fixed.fail(error.into()))? {
            true => Ok(Feature::Capture.require(CallExecutor::Enqueuer)?),
            false => Ok(()),
        }
    }

    /// The output that a caller brings, or one that its rows are copied to.
    pub(super) fn output(
        &self,
        y: CombineInput<'_>,
        handle: &EnqueuedHandle,
    ) -> Result<EnqueuedOutput, Error> {
        let tensor = match y {
            CombineInput::Output(ExpertOutput(OutputAt::Enqueued(output))) => {
                let (seen, expected) = (output.lease.call, handle.call());
                return match Arc::ptr_eq(&output.lease, handle.lease()) {
                    true => Ok(output),
                    false => Err(CallError::WrongOutput { seen, expected }.into()),
                };
            }
            CombineInput::Output(ExpertOutput(OutputAt::Slots(output))) => {
                let (seen, expected) = (output.instance(), self.instance());
                return Err(CallError::ForeignHandle { seen, expected }.into());
            }
            CombineInput::Output(_) => return Err(wrong_place("expert outputs", Side::Device)),
            CombineInput::Elsewhere(tensor) => tensor,
        };
        let output = handle.output()?;
        let rows = Shape { rows: output.len().into(), ..self.tokens_shape(0) };
        let from = tensor.on_device("expert outputs", rows, self.stream.device())?;
        let len = from.len();
        self.stream.copy(output.rows().span(0, len)?, from.span(0, len)?)?;
        handle.count_copied(len);
        Ok(output)
    }

    /// Where experts live.
    pub fn expert_map(&self) -> &ExpertMap {
        &self.common().fixed.spec.map
    }

    /// Adopts another expert map, if all ranks bring the same and no handle is alive.
    ///
    /// # Errors
    /// As [`ExpertParallel::set_expert_map`](crate::ExpertParallel::set_expert_map).
    pub fn set_expert_map(&mut self, map: Result<ExpertMap, Error>) -> Result<(), Error> {
        self.remap(CallKind::ExpertMap, map)
    }

    fn remap(&mut self, kind: CallKind, map: Result<ExpertMap, Error>) -> Result<(), Error> {
        self.refuse_capture()?;
        self.common().fixed.shared.hub.health().check()?;
        let map = map.and_then(|map| self.check_map(&map).map(|()| map));
        let (map, refused) = map.map_or_else(|error| (None, Some(error)), |map| (Some(map), None));
        let context = self.common().shape.no_context();
        let mut call = DeviceCall::new(&mut self.enqueuer, &self.programs, kind, context);
        let machine = call.begin()?;
        let agreed = self.enqueuer.remap(&self.programs, machine, kind, (map, refused));
        let refusal = agreed.map_err(|error| self.common().fixed.fail(error))?;
        self.common().count_served();
        // Contexts that no result has keep nothing of the map before.
        for lease in self.leases.iter_mut().filter_map(Arc::get_mut) {
            lease.common.clone_from(&self.enqueuer.common);
        }
        refusal.map_or(Ok(()), Err)
    }

    fn check_map(&self, map: &ExpertMap) -> Result<(), Error> {
        self.common().fixed.check_map(map)?;
        // Relaxed: a handle that another thread drops at the same time may count or not.
        match self.common().handles.load(Ordering::Relaxed) as usize {
            0 => Ok(()),
            count => Err(CallError::HandlesAlive { count }.into()),
        }
    }

    /// Memory for so many tokens, as a dispatch sends them.
    ///
    /// # Errors
    /// As [`Session::take`].
    pub fn token_buffer(&self, tokens: u32) -> Result<EnqueuedTokens, Error> {
        self.common().token_buffer(tokens)
    }

    /// Size, limit and use of its device heap.
    pub fn device_heap(&self) -> DeviceHeapReport {
        let limit = self.common().shape.pool_limit();
        self.common().space.report(if self.enqueuer.growth.is_some() { limit } else { 0 })
    }

    /// An allocator over its device heap.
    ///
    /// # Errors
    /// [`MemoryError::AllocatorTaken`](crate::error::MemoryError).
    pub fn heap_allocator(&self) -> Result<HeapAllocator, Error> {
        HeapAllocator::serve(self.common(), self.stream.context())
    }

    /// Enqueues that tokens of this type become records.
    ///
    /// # Errors
    /// As [`ExpertParallel::quantize_into`](crate::ExpertParallel::quantize_into).
    pub fn quantize(
        &self,
        (tokens, dtype): (&DeviceRange, Dtype),
        records: &DeviceRange,
    ) -> Result<(), Error> {
        let (common, spec) = (self.common(), &self.common().fixed.spec);
        let rows = tokens.len() / (spec.hidden * dtype.size()) as u64;
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        // Without an index there is no fault to report.
        let status = common.word(common.shape.no_context(), StreamFlag::Status)?;
        let args = RecordArgs {
            hidden: spec.hidden as u32,
            dtype,
            sources: rows,
            rows,
            from: tokens.span(0, tokens.len())?,
            index: None,
            out: records.span(0, records.len())?,
            runs: None,
            status,
        };
        Ok(self.kernels.records(&self.stream, &args)?)
    }

    /// Takes part in a call that this rank cannot make: the other ranks are told, as of bad input,
    /// and do not wait.
    pub fn refuse(&mut self, call: CallKind, handle: Option<&EnqueuedHandle>, error: Error) -> Error {
        if let Err(captured) = self.refuse_capture() {
            return captured;
        }
        let handle = handle.filter(|handle| handle.instance() == self.instance());
        let refused = match (CallProperties::of(call).class, handle) {
            (Class::Return, Some(handle)) => self
                .own(handle)
                .and_then(|()| self.offer((call, 0), handle, Err(&error), None))
                .and_then(|started| self.finish_return(started, None)),
            (Class::Return, None) => self.refuse_without_context(call),
            (Class::Dispatch, _) => {
                let started = self.begin_placing(call, Err(error.clone()));
                started.and_then(|mut started| {
                    self.serve(&mut started)?;
                    started.placed().map(drop)
                })
            }
            (Class::Cached, handle) => {
                let context = handle.map_or(self.common().shape.no_context(), EnqueuedHandle::context);
                self.along((call, context), 0, Err(error.clone())).map(drop)
            }
            (Class::Remap, _) => self.remap(call, Err(error.clone())),
        };
        refused.err().unwrap_or(error)
    }

    /// Enters a return for which this rank has no layout, to refuse it.
    fn refuse_without_context(&mut self, kind: CallKind) -> Result<(), Error> {
        self.common().fixed.shared.hub.health().check()?;
        let context = self.common().shape.no_context();
        let mut call = DeviceCall::new(&mut self.enqueuer, &self.programs, kind, context);
        let machine = call.begin()?;
        let (base, _sums, own) = (None, None, None);
        let call = Returning { machine, kind, options: 0, context, tokens: 0, base, _sums, own };
        self.serve_return(call, None).map_err(|error| self.common().fixed.fail(error))?;
        Ok(())
    }

    /// Waits until the stream is done; waits of a failed world end by themselves.
    ///
    /// # Errors
    /// The cause of a failed world, [`PlanError::Interrupted`].
    pub fn synchronize(&self) -> Result<(), Error> {
        let mut polling = wait::Polling::new(self.common().fixed.shared.hub.health());
        while !self.stream.is_done()? {
            polling.rest().map_err(|_| PlanError::Interrupted)?;
        }
        Ok(self.common().fixed.shared.hub.health().check()?)
    }

    /// Whether a handle is one of this exchange.
    pub(super) fn own(&self, handle: &EnqueuedHandle) -> Result<(), Error> {
        self.common().fixed.shared.hub.health().check()?;
        let (seen, expected) = (handle.instance(), self.instance());
        if seen != expected {
            return Err(CallError::ForeignHandle { seen, expected }.into());
        }
        Ok(())
    }

    /// Enqueues that rows go along the layout of a handle, and that they come. Collective.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch_cached`](crate::ExpertParallel::dispatch_cached).
    pub fn cached(
        &mut self,
        kind: CallKind,
        x: Tensor<'_>,
        handle: &EnqueuedHandle,
    ) -> Result<EnqueuedRows, Error> {
        self.refuse_capture()?;
        if let Err(foreign) = self.own(handle) {
            return Err(self.refuse(kind, None, foreign));
        }
        let dtype = x.dtype();
        let shape = Shape::brought(&self.common().fixed.spec, kind, handle.tokens(), dtype);
        let x = x.on_device("tokens", shape, self.stream.device()).map(|x| (x, dtype));
        let extent = self.along((kind, handle.context()), handle.tokens(), x)?;
        handle.owe_output();
        EnqueuedRows::new(handle.lease(), (kind, handle.rows()), extent)
    }

    /// Makes a call of this kind along the layout of a context: where rows land.
    fn along(
        &mut self,
        (kind, context): (CallKind, u32),
        tokens: u32,
        x: Result<(&DeviceRange, Dtype), Error>,
    ) -> Result<Extent, Error> {
        self.common().fixed.shared.hub.health().check()?;
        let (x, refused) = x.map_or_else(|error| (None, Some(error)), |x| (Some(x), None));
        let x = x.filter(|_| tokens > 0).map(|(x, dtype)| (x.clone(), dtype));
        let call = DeviceCall::new(&mut self.enqueuer, &self.programs, kind, context);
        let mut call = DeviceCall { tokens, x, ..call };
        let machine = call.begin()?;
        let x = call.x;
        let landed = self.enqueuer.cached(&self.programs, machine, (kind, context), (tokens, x, refused));
        self.common().count_served();
        landed.map_err(|error| self.common().fixed.fail(error))?
    }
}

impl Drop for EnqueuedExchange {
    fn drop(&mut self) {
        if self.common().fixed.shared.hub.health().check().is_err() {
            self.enqueuer.engine.await_queues(DRAIN);
        }
        // The guard ends waits as long as it lives.
        let since = Instant::now();
        while self.common().fixed.shared.hub.health().check().is_err()
            && self.stream.is_done() == Ok(false)
            && since.elapsed() < DRAIN
        {
            wait::nap(Duration::from_millis(1));
        }
    }
}

impl std::fmt::Debug for EnqueuedExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnqueuedExchange").field("spec", &self.common().fixed.spec).finish_non_exhaustive()
    }
}
