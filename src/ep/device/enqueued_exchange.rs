//! An instance on a device with exact sizes or a budget: the calls that its caller makes, and the
//! work that they put on the caller's stream.
//!
//! ```text
//!   start_dispatch    check | plan, flag, pack                       enqueuer: first half
//!   finish_dispatch   enqueuer: second half, own rows | choices apart  rows, handle
//!   combine, ..       check | flag | enqueuer: both halves | sum
//! ```
//!
//! A call in flight owns its state: [`EnqueuedDispatch`], [`EnqueuedCombine`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::REFUSED;
use super::device_pool::{DeviceHeapReport, Extent};
use super::dispatch_planner::Planner;
use super::enqueued_results::{EnqueuedDispatch, EnqueuedHandle, EnqueuedOutput, EnqueuedRows, Lease};
use super::enqueuer::Enqueuer;
use super::heap_allocator::HeapAllocator;
use super::memory::{MemoryShape, StreamFlag};
use super::row_transport::RowTransport;
use super::session::{EnqueuedTokens, Session};
use super::watchdog::WaitBreaker;
use crate::bootstrap::wait;
use crate::device::{DeviceRange, FetchWeights, Kernels, OwnRows, RecordArgs, Stream, SumChoices};
use crate::dtype::{Dtype, PartialDtype};
use crate::ep::builder::Spec;
use crate::ep::rows::OutputAt;
use crate::ep::tensor::{Chosen, Shape, Side, Tensor, TensorMut, Tokens, wrong_place};
use crate::ep::{CallExecutor, Choices, CombineInput, ExpertOutput, Feature, LaneUse};
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::plan::ExpertMap;
use crate::schedule::call_program::{CallMachine, RankPrograms};
use crate::schedule::{CallProperties, Class, Payload};
use crate::world::SymmetricRange;

/// An [`ExpertParallel`](crate::ExpertParallel) whose calls are laid out one by one: see the
/// [module](super).
///
/// Calls may be under way when it is dropped.
pub(in crate::ep) struct EnqueuedExchange {
    pub(super) common: Arc<Session>,
    pub(super) programs: RankPrograms,
    pub(super) stream: Arc<Stream>,
    pub(super) kernels: Arc<Kernels>,
    pub(super) enqueuer: Box<Enqueuer>,
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
    /// Where what returns begins, in steps.
    steps: u32,
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
type Brought<'a> = (Chosen<'a>, Option<(&'a DeviceRange, Dtype)>);

/// How long streams of a dead world are waited for when the exchange goes.
const DRAIN: Duration = Duration::from_secs(10);

/// Parts of an exchange.
pub(super) struct Parts {
    pub common: Arc<Session>,
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
        let Parts { common, programs, stream, kernels, enqueuer, guards, passage, control } = parts;
        let returns = vec![0; common.shape.word_sets() as usize];
        let lanes = LaneUse::of_devices(&common.fixed.lanes).into();
        EnqueuedExchange {
            common,
            programs,
            stream,
            kernels,
            enqueuer,
            returns,
            dispatches: 0,
            lanes,
            _guards: guards,
            _passage: passage,
            _control: control,
        }
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
        self.enqueuer.follow(stream)?;
        self.stream = Arc::clone(stream);
        Ok(())
    }

    /// Its number among instances on devices.
    pub fn instance(&self) -> u64 {
        self.common.instance
    }

    /// The lanes of the group.
    pub fn lanes(&self) -> &[LaneUse] {
        &self.lanes
    }

    /// Shape of a tensor of so many tokens.
    pub fn tokens_shape(&self, tokens: u32) -> Shape {
        let Spec { hidden, dtype, .. } = self.common.fixed.spec;
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
        let tokens = Tokens::check(&self.common.fixed.spec, self.stream.device(), x, choices);
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
        let chosen = Chosen::check(&self.common.fixed.spec, self.stream.device(), choices);
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
        started.finish(&self.stream, &self.kernels)
    }

    /// Second half of a call that places rows.
    fn serve(&mut self, started: &mut EnqueuedDispatch) -> Result<(), Error> {
        let (common, lease) = (&self.common, &started.lease);
        let tokens = if started.refused.is_some() { REFUSED } else { lease.tokens };
        let call = ((started.kind, lease.context, lease.planner), (tokens, started.x.take()));
        let served = self.enqueuer.dispatch(&self.programs, started.machine, call.0, call.1);
        served.map_err(|error| common.fixed.fail(error))?;
        common.served.fetch_add(1, Ordering::Relaxed);
        if let Some(rows) = self.enqueuer.landed(lease.context) {
            let chosen = common.lay_choices_apart(&self.stream, &self.kernels, (lease.context, rows));
            chosen.map_err(|error| common.fixed.fail(error))?;
        }
        Ok(())
    }

    /// Sizes that stay on the device are refused: rows have no place before their number is known.
    /// The call is made first, for the other ranks.
    ///
    /// # Errors
    /// As [`EnqueuedExchange::finish_dispatch`]; [`PlanError::NotAvailable`].
    pub fn unfinished_dispatch(
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
        brought: Result<Brought<'_>, Error>,
    ) -> Result<EnqueuedDispatch, Error> {
        self.common.fixed.shared.hub.health().check()?;
        self.refuse_capture()?;
        let common = Arc::clone(&self.common);
        let contexts = common.shape.contexts();
        let free = (0..contexts).find(|&context| common.contexts[context as usize].take());
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
        let count = brought.map_or(0, |(chosen, _)| chosen.tokens);
        self.dispatches += 1;
        let (call, lanes) = (self.dispatches, Arc::clone(&self.lanes));
        let tokens = brought.and_then(|(_, x)| x);
        let packs = common.packs(kind, tokens.map_or(Dtype::Bytes, |(_, dtype)| dtype));
        let planner = common.planner(tokens.is_some_and(|tokens| common.lie_here(kind, tokens).is_some()));
        let lease = Arc::new(Lease { common, context, call, tokens: count, planner, packs, lanes });
        self.common.space.count();
        self.enqueue_dispatch((context, planner), brought).map_err(|error| self.common.fixed.fail(error))?;
        let machine = self.start(kind, context)?;
        let x = brought.filter(|(chosen, _)| chosen.tokens > 0).and_then(|(_, x)| x);
        let x = x.map(|(x, dtype)| (x.clone(), dtype));
        Ok(EnqueuedDispatch { lease, kind, refused, machine, x })
    }

    /// Drives a call to its half.
    fn start(&mut self, kind: CallKind, context: u32) -> Result<CallMachine, Error> {
        self.enqueuer.start(&self.programs, kind, context).map_err(|error| self.common.fixed.fail(error))
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
        let output = Kernels::sum_choices_names(self.common.fixed.spec.dtype)
            .map_err(Error::from)
            .and_then(|_| self.output(y, handle));
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
        let (context, mut refused) = (handle.context(), output.err().cloned().or(unfit));
        let (mut steps, mut sums) = (REFUSED, None);
        match output {
            Ok(output) if refused.is_none() && self.common.returns_sums(kind) => {
                match self.sum_by_rank((kind, context), output) {
                    Ok(extent) => {
                        steps = (extent.offset() / MemoryShape::STEP) as u32;
                        sums = Some(extent);
                    }
                    Err(error) => refused = Some(error),
                }
            }
            Ok(output) if refused.is_none() => match self.enqueuer.take_node_sums((kind, context)) {
                Ok(()) => steps = output.steps(kind),
                Err(error) => refused = Some(error),
            },
            _ => {}
        }
        let returns = &mut self.returns[context as usize];
        *returns += 1;
        let nth = *returns;
        // No earlier call may use memory that is given back from now on.
        self.common.space.count();
        let machine = self.enqueue_return(kind, context, steps)?;
        handle.returns(nth, kind, refused.clone());
        let tokens = handle.tokens();
        Ok(Returning { machine, kind, options, context, tokens, steps, _sums: sums, own: refused })
    }

    /// Enqueues the sums of each token's rows at this rank.
    fn sum_by_rank(&self, call: (CallKind, u32), output: &EnqueuedOutput) -> Result<Extent, Error> {
        let count = self.enqueuer.kept[call.1 as usize].layout.received();
        let rows = (output.rows(), output.len());
        self.common.sum_by_rank(&self.stream, &self.kernels, call, rows, count)
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
        if let Some(output) = output.filter(|_| self.common.fixed.spec.weighted) {
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
        let refused = self.serve_return(call, out).map_err(|error| self.common.fixed.fail(error))?;
        match (refused, own) {
            (None | Some(Error::Plan(PlanError::RefusedHere)), Some(own)) => Err(own),
            (refused, _) => refused.map_or(Ok(()), Err),
        }
    }

    fn serve_return(&mut self, call: Returning, out: Option<&DeviceRange>) -> Result<Option<Error>, Error> {
        let Returning { machine, kind, options, context, tokens, steps, .. } = call;
        let refused = self.enqueuer.ret(&self.programs, machine, (kind, context), (steps, options))?;
        self.common.served.fetch_add(1, Ordering::Relaxed);
        let own = self.own_outputs((kind, context), steps)?;
        self.enqueue_returned((kind, context), (tokens, own), out)?;
        Ok(refused)
    }

    /// Calls are not captured: a graph would replay them with the words of this call. A query that
    /// fails reports earlier work of the device: then the call cannot be entered.
    pub(super) fn refuse_capture(&self) -> Result<(), Error> {
        match self.stream.is_capturing().map_err(|error| self.common.fixed.fail(error.into()))? {
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
        &self.common.fixed.spec.map
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
        self.common.fixed.shared.hub.health().check()?;
        let map = map.and_then(|map| self.check_map(&map).map(|()| map));
        let (map, refused) = map.map_or_else(|error| (None, Some(error)), |map| (Some(map), None));
        let context = self.common.shape.no_context();
        self.common.space.count();
        let reached =
            self.common.word(context, StreamFlag::Combine).and_then(|word| self.stream.write(word, 1));
        reached.map_err(|error| self.common.fixed.fail(error.into()))?;
        let machine = self.start(kind, context)?;
        let agreed = self.enqueuer.remap(&self.programs, machine, kind, (map, refused));
        let refusal = agreed.map_err(|error| self.common.fixed.fail(error))?;
        self.common.served.fetch_add(1, Ordering::Relaxed);
        self.common = Arc::clone(&self.enqueuer.common);
        refusal.map_or(Ok(()), Err)
    }

    fn check_map(&self, map: &ExpertMap) -> Result<(), Error> {
        self.common.fixed.check_map(map)?;
        match self.common.handles.load(Ordering::Relaxed) as usize {
            0 => Ok(()),
            count => Err(CallError::HandlesAlive { count }.into()),
        }
    }

    /// Memory for so many tokens, as a dispatch sends them.
    ///
    /// # Errors
    /// As [`Session::take`].
    pub fn token_buffer(&self, tokens: u32) -> Result<EnqueuedTokens, Error> {
        self.common.token_buffer(tokens)
    }

    /// Size, limit and use of its device heap.
    pub fn device_heap(&self) -> DeviceHeapReport {
        let limit = self.common.shape.pool_limit();
        self.common.space.report(if self.enqueuer.growth.is_some() { limit } else { 0 })
    }

    /// An allocator over its device heap.
    ///
    /// # Errors
    /// [`MemoryError::AllocatorTaken`](crate::error::MemoryError).
    pub fn heap_allocator(&self) -> Result<HeapAllocator, Error> {
        HeapAllocator::serve(&self.common, self.stream.context())
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
        let (common, spec) = (&self.common, &self.common.fixed.spec);
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
                let context = handle.map_or(self.common.shape.no_context(), EnqueuedHandle::context);
                self.along((call, context), 0, Err(error.clone())).map(drop)
            }
            (Class::Remap, _) => self.remap(call, Err(error.clone())),
        };
        refused.err().unwrap_or(error)
    }

    /// Enters a return for which this rank has no layout, to refuse it.
    fn refuse_without_context(&mut self, kind: CallKind) -> Result<(), Error> {
        self.common.fixed.shared.hub.health().check()?;
        let context = self.common.shape.no_context();
        self.common.space.count();
        let machine = self.enqueue_return(kind, context, REFUSED)?;
        let (steps, own) = (REFUSED, None);
        let call = Returning { machine, kind, options: 0, context, tokens: 0, steps, _sums: None, own };
        self.serve_return(call, None).map_err(|error| self.common.fixed.fail(error))?;
        Ok(())
    }

    /// Waits until the stream is done; waits of a failed world end by themselves.
    ///
    /// # Errors
    /// The cause of a failed world, [`PlanError::Interrupted`].
    pub fn synchronize(&self) -> Result<(), Error> {
        let mut polling = wait::Polling::new(self.common.fixed.shared.hub.health());
        while !self.stream.is_done()? {
            polling.rest().map_err(|_| PlanError::Interrupted)?;
        }
        Ok(self.common.fixed.shared.hub.health().check()?)
    }

    /// Whether a handle is one of this exchange.
    pub(super) fn own(&self, handle: &EnqueuedHandle) -> Result<(), Error> {
        self.common.fixed.shared.hub.health().check()?;
        let (seen, expected) = (handle.instance(), self.instance());
        if seen != expected {
            return Err(CallError::ForeignHandle { seen, expected }.into());
        }
        Ok(())
    }

    /// Enqueues the first half of a return.
    fn enqueue_return(&mut self, kind: CallKind, context: u32, steps: u32) -> Result<CallMachine, Error> {
        self.enqueue_reached(context, steps).map_err(|error| self.common.fixed.fail(error))?;
        let machine = self.start(kind, context)?;
        // Weight gradients return behind a call that is the caller's as well, with its faults.
        if CallProperties::of(kind).payload != Payload::Weights {
            let cleared = self.common.clear_status(&self.stream, context);
            cleared.map_err(|error| self.common.fixed.fail(error.into()))?;
        }
        Ok(machine)
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
        let shape = Shape::brought(&self.common.fixed.spec, kind, handle.tokens(), dtype);
        let x = x.on_device("tokens", shape, self.stream.device()).map(|x| (x, dtype));
        let extent = self.along((kind, handle.context()), handle.tokens(), x)?;
        handle.owe_output();
        let (common, place) = (&self.common, (handle.context(), extent.offset(), handle.rows()));
        if common.shape.arrives() {
            let regrouped = common.regroup(&self.stream, &self.kernels, kind, place);
            regrouped.map_err(|error| common.fixed.fail(error))?;
        }
        EnqueuedRows::new(handle.lease(), (kind, handle.rows()), extent)
    }

    /// Makes a call of this kind along the layout of a context: where rows land.
    fn along(
        &mut self,
        (kind, context): (CallKind, u32),
        tokens: u32,
        x: Result<(&DeviceRange, Dtype), Error>,
    ) -> Result<Extent, Error> {
        self.common.fixed.shared.hub.health().check()?;
        let (x, refused) = x.map_or_else(|error| (None, Some(error)), |x| (Some(x), None));
        self.common.space.count();
        let fail = |error| self.common.fixed.fail(error);
        let x = x.filter(|_| tokens > 0);
        let lies = x.is_some_and(|x| self.common.lie_here(kind, x).is_some() && self.may_lie(context));
        self.common.clear_status(&self.stream, context).map_err(|error| fail(error.into()))?;
        if let (Some((x, dtype)), false) = (x, lies) {
            let packed = self.common.pack(&self.stream, &self.kernels, (kind, context), (tokens, x, dtype));
            packed.map_err(fail)?;
        }
        self.enqueue_reached(context, 0).map_err(fail)?;
        let machine = self.start(kind, context)?;
        let x = x.map(|(x, dtype)| (x.clone(), dtype));
        let landed = self.enqueuer.cached(&self.programs, machine, (kind, context), (tokens, x, refused));
        self.common.served.fetch_add(1, Ordering::Relaxed);
        landed.map_err(|error| self.common.fixed.fail(error))?
    }

    /// Whether tokens may be sent along the layout of a context as they lie.
    fn may_lie(&self, context: u32) -> bool {
        self.enqueuer.kept[context as usize].in_place.is_some()
    }

    /// That choices go, with their tokens or before those, or, without any, that the call is
    /// refused; and that rows come.
    fn enqueue_dispatch(
        &mut self,
        (context, planner): (u32, Planner),
        brought: Option<Brought<'_>>,
    ) -> Result<(), Error> {
        let (common, stream, kernels) = (&*self.common, &*self.stream, &*self.kernels);
        if let Some((chosen, _)) = brought {
            planner.bring(common, (stream, kernels), (context, chosen))?;
        }
        stream.write(
            common.word(context, StreamFlag::Dispatch)?,
            brought.map_or(REFUSED, |(chosen, _)| chosen.tokens) + 1,
        )?;
        common.clear_status(stream, context)?;
        let packs = brought.filter(|(chosen, _)| chosen.tokens > 0);
        if let Some((chosen, x)) = packs {
            planner.order(common, (stream, kernels), (context, chosen))?;
            if let Some((x, dtype)) = x.filter(|&x| !common.packs_when_placed(x)) {
                common.pack(stream, kernels, (CallKind::Dispatch, context), (chosen.tokens, x, dtype))?;
            }
        }
        Ok(())
    }

    /// That the stream has come to a call along a known layout. In a return, outputs may be read,
    /// which lie so many `steps` into this rank's memory. On one node the caller's thread runs
    /// ahead: nobody hears of it but the streams of its peers.
    fn enqueue_reached(&self, context: u32, steps: u32) -> Result<(), Error> {
        if !self.common.fixed.paths().is_multi_node() {
            return Ok(());
        }
        Ok(self.stream.write(self.common.word(context, StreamFlag::Combine)?, steps + 1)?)
    }

    /// Outputs of this rank, or sums of them, that lie so many `steps` into its memory, and how
    /// many they are: what returns to its own tokens is read there.
    fn own_outputs(
        &self,
        (kind, context): (CallKind, u32),
        steps: u32,
    ) -> Result<Option<(DeviceRange, u32)>, Error> {
        if steps == REFUSED {
            return Ok(None);
        }
        let layout = &self.enqueuer.kept[context as usize].layout;
        let sums = self.common.returns_sums(kind);
        let rows = if sums { layout.received() } else { layout.landed };
        let bytes = u64::from(rows) * self.common.fixed.sizing(kind).home_bytes;
        Ok(Some((self.common.piece((u64::from(steps) * MemoryShape::STEP, bytes))?, rows)))
    }

    /// That what returned goes to `out`: sums of rows, or weight gradients. Those of `own` outputs
    /// are read where these lie.
    fn enqueue_returned(
        &mut self,
        (kind, context): (CallKind, u32),
        (tokens, own): (u32, Option<(DeviceRange, u32)>),
        out: Option<&DeviceRange>,
    ) -> Result<(), Error> {
        let (common, stream) = (&*self.common, &*self.stream);
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        let Some(out) = out.filter(|_| tokens > 0) else { return Ok(()) };
        let (rows, index) = (common.span(shape.staging())?, common.span(shape.places(context))?);
        let (n_rows, top_k) = (shape.entries() as u32, spec.top_k);
        let (status, out) = (common.word(context, StreamFlag::Status)?, out.span(0, out.len())?);
        let own = own
            .as_ref()
            .map(|(rows, count)| rows.span(0, rows.len()).map(|rows| OwnRows { rows, count: *count }));
        let own = own.transpose()?;
        if CallProperties::of(kind).payload == Payload::Weights {
            let words = common.fixed.sizing(CallKind::Combine).words_home;
            let choices = tokens * top_k;
            let fetch = FetchWeights { choices, n_rows, words, from: rows, own, index, status, out };
            return Ok(self.kernels.fetch_weights(stream, &fetch)?);
        }
        let weights = common.span(shape.weights(context))?;
        let groups = common.span(shape.groups())?;
        // Sums by rank are weighted and rounded already. A token's are added one after the other.
        let sums = common.returns_sums(kind);
        let partials = sums || common.sums_by_node(kind);
        let index = if partials { common.span(shape.sum_places(context))? } else { index };
        let weighted = common.weighs(kind);
        Ok(self.kernels.sum_choices(
            stream,
            &SumChoices {
                tokens,
                top_k,
                columns: spec.hidden as u32,
                dtype: spec.dtype,
                wire: if sums { PartialDtype::F32 } else { spec.partial_dtype },
                n_rows,
                rows,
                own,
                index,
                n_experts: common.fixed.bins.count(),
                experts: Some(common.span(shape.sums(context))?),
                weights: (weighted && !sums).then_some(weights),
                group_of: (spec.sum_order.has_partials() && !sums).then_some(groups),
                status,
                out,
            },
        )?)
    }
}

impl Drop for EnqueuedExchange {
    fn drop(&mut self) {
        if self.common.fixed.shared.hub.health().check().is_err() {
            self.enqueuer.engine.await_queues(DRAIN);
        }
        // The guard ends waits as long as it lives.
        let since = Instant::now();
        while self.common.fixed.shared.hub.health().check().is_err()
            && self.stream.is_done() == Ok(false)
            && since.elapsed() < DRAIN
        {
            wait::nap(Duration::from_millis(1));
        }
    }
}

impl std::fmt::Debug for EnqueuedExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnqueuedExchange").field("spec", &self.common.fixed.spec).finish_non_exhaustive()
    }
}
