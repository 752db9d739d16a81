//! The exchange, in its caller's thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::REFUSED;
use super::common::Common;
use super::enqueuer::Enqueuer;
use super::handle::{Lease, PlannedDispatch, PlannedHandle, PlannedOutput, PlannedRows};
use crate::device::{DeviceRange, Kernels, Stream};
use crate::dtype::Dtype;
use crate::ep::buffers::OutputAt;
use crate::ep::builder::Spec;
use crate::ep::device::guard::WaitBreaker;
use crate::ep::device::passage::RowTransport;
use crate::ep::tensor::{Chosen, Shape, Side, Tensor, TensorMut, Tokens, wrong_place};
use crate::ep::{CallExecutor, Choices, CombineInput, ExpertOutput, Feature, LaneUse};
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::schedule::call::{CallMachine, RankPrograms};
use crate::world::SymmetricRange;

/// An [`ExpertParallel`](crate::ExpertParallel) whose calls are laid out one by one: see the
/// [module](super).
///
/// Calls may be under way when it is dropped.
pub(in crate::ep) struct PlannedExchange {
    pub(super) common: Arc<Common>,
    pub(super) programs: RankPrograms,
    pub(super) stream: Arc<Stream>,
    pub(super) kernels: Arc<Kernels>,
    pub(super) enqueuer: Box<Enqueuer>,
    /// Per seat: returns started.
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
    seat: u32,
    tokens: u32,
    /// Where the output begins, in steps.
    steps: u32,
    /// Why this rank refuses the call.
    own: Option<Error>,
}

/// A combine between its halves.
#[derive(Debug)]
pub(in crate::ep) struct PlannedCombine {
    call: Returning,
    output: Option<PlannedOutput>,
}

/// Choices of a call that places rows and, if they go along, the tokens with their type.
pub(super) type Brought<'a> = (Chosen<'a>, Option<(&'a DeviceRange, Dtype)>);

/// How long streams of a dead world are waited for when the exchange goes.
const DRAIN: Duration = Duration::from_secs(10);

/// What an exchange is made of.
pub(super) struct Parts {
    pub common: Arc<Common>,
    pub programs: RankPrograms,
    pub stream: Arc<Stream>,
    pub kernels: Arc<Kernels>,
    pub enqueuer: Box<Enqueuer>,
    pub guards: Vec<WaitBreaker>,
    pub passage: RowTransport,
    pub control: SymmetricRange,
}

impl PlannedExchange {
    /// Of these parts.
    pub(super) fn of(parts: Parts) -> Self {
        let Parts { common, programs, stream, kernels, enqueuer, guards, passage, control } = parts;
        let returns = vec![0; common.shape.word_sets() as usize];
        let lanes = LaneUse::of_devices(&common.fixed.lanes).into();
        PlannedExchange {
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
    /// [`PlannedDispatch::finish`], on all ranks, and so is [`CallError::TooManyInFlight`], if as
    /// many dispatches are alive as there are contexts.
    pub fn start_dispatch(&mut self, x: Tensor<'_>, choices: Choices<'_>) -> Result<PlannedDispatch, Error> {
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
    pub fn prepare(&mut self, choices: Choices<'_>) -> Result<PlannedHandle, Error> {
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
        mut started: PlannedDispatch,
    ) -> Result<(PlannedRows, PlannedHandle), Error> {
        self.serve(&mut started)?;
        started.finish()
    }

    /// Second half of a call that places rows.
    fn serve(&mut self, started: &mut PlannedDispatch) -> Result<(), Error> {
        let (common, lease) = (&self.common, &started.lease);
        let tokens = if started.refused.is_some() { REFUSED } else { lease.tokens };
        let call = ((started.kind, lease.seat), (tokens, started.x.take()));
        let served = self.enqueuer.dispatch(&self.programs, started.machine, call.0, call.1);
        served.map_err(|error| common.fixed.fail(error))?;
        common.served.fetch_add(1, Ordering::Relaxed);
        if let Some(rows) = self.enqueuer.landed(lease.seat) {
            let chosen = common.lay_choices_apart(&self.stream, &self.kernels, (lease.seat, rows));
            chosen.map_err(|error| common.fixed.fail(error))?;
        }
        Ok(())
    }

    /// Sizes that stay on the device are refused: rows have no place before their number is known.
    /// The call is made first, for the other ranks.
    ///
    /// # Errors
    /// As [`PlannedExchange::finish_dispatch`]; [`PlanError::NotAvailable`].
    pub fn unfinished_dispatch(
        &mut self,
        started: PlannedDispatch,
    ) -> Result<(PlannedRows, PlannedHandle), Error> {
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
    ) -> Result<PlannedDispatch, Error> {
        self.common.fixed.shared.hub.health().check()?;
        self.refuse_capture()?;
        let common = Arc::clone(&self.common);
        let seats = common.shape.seats();
        let free = (0..seats).find(|&seat| common.seats[seat as usize].take());
        // Without a context the call is entered all the same: the other ranks do not wait.
        let (seat, brought) = match free {
            Some(seat) => (seat, brought),
            None => {
                let full = brought.and(Err(CallError::TooManyInFlight { max: seats }.into()));
                (common.shape.seatless(), full)
            }
        };
        let (brought, refused) =
            brought.map_or_else(|error| (None, Some(error)), |brought| (Some(brought), None));
        let count = brought.map_or(0, |(chosen, _)| chosen.tokens);
        self.dispatches += 1;
        let (call, lanes) = (self.dispatches, Arc::clone(&self.lanes));
        let dtype = brought.and_then(|(_, x)| x).map(|(_, dtype)| dtype);
        let packs = common.packs(kind, dtype.unwrap_or(Dtype::Bytes));
        let lease = Arc::new(Lease { common, seat, call, tokens: count, packs, lanes });
        self.common.space.count();
        self.enqueue_dispatch(seat, brought).map_err(|error| self.common.fixed.fail(error))?;
        let machine = self.start(kind, seat)?;
        let x = brought
            .filter(|(chosen, _)| chosen.tokens > 0)
            .and_then(|(_, x)| x.filter(|&x| self.packs_when_placed(x)))
            .map(|(x, dtype)| (x.clone(), dtype));
        let late = self.common.shape.arrives();
        let regroups = late.then(|| (Arc::clone(&self.stream), Arc::clone(&self.kernels)));
        Ok(PlannedDispatch { lease, kind, refused, regroups, machine, x })
    }

    /// Drives a call to its half.
    pub(super) fn start(&mut self, kind: CallKind, seat: u32) -> Result<CallMachine, Error> {
        self.enqueuer.start(&self.programs, kind, seat).map_err(|error| self.common.fixed.fail(error))
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
        handle: &PlannedHandle,
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
        handle: &PlannedHandle,
        unfit: Option<Error>,
    ) -> Result<PlannedCombine, Error> {
        self.refuse_capture()?;
        if let Err(foreign) = self.own(handle) {
            return Err(self.refuse(CallKind::Combine, None, foreign));
        }
        let output = Kernels::sum_choices_names(self.common.fixed.spec.dtype)
            .map_err(Error::from)
            .and_then(|_| self.output(y, handle));
        let call = self.offer((CallKind::Combine, 0), handle, output.as_ref(), unfit)?;
        Ok(PlannedCombine { call, output: output.ok() })
    }

    /// First half of a return of this kind and these options, unless something `unfit` refuses it.
    /// Its caller has the output for as long as something needs it behind the call.
    pub(super) fn offer(
        &mut self,
        (kind, options): (CallKind, u32),
        handle: &PlannedHandle,
        output: Result<&PlannedOutput, &Error>,
        unfit: Option<Error>,
    ) -> Result<Returning, Error> {
        let (seat, refused) = (handle.seat(), output.err().cloned().or(unfit));
        let steps = match output {
            Ok(output) if refused.is_none() => output.steps(kind),
            _ => REFUSED,
        };
        let returns = &mut self.returns[seat as usize];
        *returns += 1;
        let nth = *returns;
        // What is given back from now on no earlier call may use.
        self.common.space.count();
        let machine = self.enqueue_return(kind, seat, steps)?;
        handle.returns(nth, kind, refused.clone());
        Ok(Returning { machine, kind, options, seat, tokens: handle.tokens(), steps, own: refused })
    }

    /// Second half of a combine: the sums of the rows that came back.
    ///
    /// # Errors
    /// Why this rank refused the call, or the refusal of another rank.
    pub fn finish_combine(
        &mut self,
        started: PlannedCombine,
        handle: &PlannedHandle,
        out: Option<&DeviceRange>,
    ) -> Result<(), Error> {
        let PlannedCombine { call, output } = started;
        self.finish_return(call, out)?;
        if let Some(output) = output.filter(|_| self.common.fixed.spec.weighted) {
            handle.keep(output);
        }
        Ok(())
    }

    /// Second half of a return: what came back goes to `out`.
    ///
    /// # Errors
    /// As [`PlannedExchange::finish_combine`].
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
        let Returning { machine, kind, options, seat, tokens, steps, .. } = call;
        let refused = self.enqueuer.ret(&self.programs, machine, (kind, seat), (steps, options))?;
        self.common.served.fetch_add(1, Ordering::Relaxed);
        self.enqueue_returned((kind, seat), tokens, out)?;
        Ok(refused)
    }

    /// Calls are not captured: a graph would replay them with the words of this call.
    pub(super) fn refuse_capture(&self) -> Result<(), Error> {
        match self.stream.is_capturing()? {
            true => Ok(Feature::Capture.require(CallExecutor::Enqueuer)?),
            false => Ok(()),
        }
    }

    /// The output that a caller brings, or one that its rows are copied to.
    pub(super) fn output(&self, y: CombineInput<'_>, handle: &PlannedHandle) -> Result<PlannedOutput, Error> {
        let tensor = match y {
            CombineInput::Output(ExpertOutput(OutputAt::Planned(output))) => {
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

    /// Takes part in a call that this rank cannot make: the other ranks are told, as of bad input,
    /// and do not wait.
    pub fn refuse(&mut self, call: CallKind, handle: Option<&PlannedHandle>, error: Error) -> Error {
        if let Err(captured) = self.refuse_capture() {
            return captured;
        }
        let handle = handle.filter(|handle| handle.instance() == self.instance());
        let refused = match (call, handle) {
            (CallKind::Combine | CallKind::DispatchBackward | CallKind::ReturnWeights, Some(handle)) => self
                .own(handle)
                .and_then(|()| self.offer((call, 0), handle, Err(&error), None))
                .and_then(|started| self.finish_return(started, None)),
            (CallKind::Combine | CallKind::DispatchBackward | CallKind::ReturnWeights, None) => {
                self.refuse_without_seat(call)
            }
            (CallKind::Dispatch | CallKind::Prepare, _) => {
                let started = self.begin_placing(call, Err(error.clone()));
                started.and_then(|mut started| {
                    self.serve(&mut started)?;
                    started.placed().map(drop)
                })
            }
            (CallKind::CachedDispatch | CallKind::CombineBackward, handle) => {
                let seat = handle.map_or(self.common.shape.seatless(), PlannedHandle::seat);
                self.along((call, seat), 0, Err(error.clone())).map(drop)
            }
            (CallKind::ExpertMap, _) => self.set_expert_map(Err(error.clone())),
            // There is no other call on devices: every rank refuses it by itself.
            _ => Ok(()),
        };
        refused.err().unwrap_or(error)
    }

    /// Enters a return for which this rank has no layout, to refuse it.
    fn refuse_without_seat(&mut self, kind: CallKind) -> Result<(), Error> {
        self.common.fixed.shared.hub.health().check()?;
        let seat = self.common.shape.seatless();
        self.common.space.count();
        let machine = self.enqueue_return(kind, seat, REFUSED)?;
        let call = Returning { machine, kind, options: 0, seat, tokens: 0, steps: REFUSED, own: None };
        self.serve_return(call, None).map_err(|error| self.common.fixed.fail(error))?;
        Ok(())
    }

    /// Waits until the stream is done; waits of a failed world end by themselves.
    pub fn synchronize(&self) -> Result<(), Error> {
        while !self.stream.is_done()? {
            std::thread::yield_now();
        }
        Ok(self.common.fixed.shared.hub.health().check()?)
    }

    /// Whether a handle is one of this exchange.
    pub(super) fn own(&self, handle: &PlannedHandle) -> Result<(), Error> {
        self.common.fixed.shared.hub.health().check()?;
        let (seen, expected) = (handle.instance(), self.instance());
        if seen != expected {
            return Err(CallError::ForeignHandle { seen, expected }.into());
        }
        Ok(())
    }

    /// Enqueues the first half of a return.
    fn enqueue_return(&mut self, kind: CallKind, seat: u32, steps: u32) -> Result<CallMachine, Error> {
        self.enqueue_reached(seat, steps).map_err(|error| self.common.fixed.fail(error))?;
        self.start(kind, seat)
    }
}

impl Drop for PlannedExchange {
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
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl std::fmt::Debug for PlannedExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlannedExchange").field("spec", &self.common.fixed.spec).finish_non_exhaustive()
    }
}
