//! An instance in fixed slots: its calls, each step of which is a constant of a stream.
//!
//! ```text
//!   start_dispatch    pack     | stage, start | half
//!   finish_dispatch                             stage, finish | check, expand
//!   start_combine     bring, fold | stage, start | half
//!   finish_combine                                 stage, finish | sum
//!   release                         stage
//!   refuse            pack     | stage, start               stage, finish | check, expand    of a dispatch
//!                     mark     | stage, start                                               always
//!                                                           stage, finish                   of a combine
//! ```
//!
//! One dispatch is in flight, and each half is made once ([`CallState`]). What a kernel or copy
//! before the first stage refuses, and what is wrong with the tensors, this rank refuses at all
//! ranks: it enters the call with no rows, and answers it by a refusal at once. The verdict of the
//! call then names it everywhere. Peers wait for later steps, so an error there ends the world.
//! Sums concern this rank only, so their errors do not.
//!
//! The refusal of a dispatch signals at once, but waits late: peers answer after calls that the
//! stream has yet to reach, perhaps of another instance, so to wait at once would break the common
//! order. Its second half is enqueued by the next dispatch, by a release, or at the end
//! ([`close`](SlotExchange::close)).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::expansion::{Expansion, ExpansionInput};
use super::proxy::Proxy;
use super::slot_memory::{WindowLayout, Windows, write_map};
use super::slot_results::{ExchangeState, ExpandedRows, SlotHandle, SlotRows};
use crate::bootstrap::wait::Polling;
use crate::device::{Addresses, Check, DeviceRange, Kernels, Pack, RefusalMarks, Stream, SumArgs, Word};
use crate::ep::builder::Spec;
use crate::ep::device::watchdog::{BypassStream, WaitBreaker};
use crate::ep::rows::OutputAt;
use crate::ep::tensor::{Shape, Side, Tensor, TensorMut, Tokens, wrong_place};
use crate::ep::{Choices, CombineInput, ExpertOutput, LaneUse, Status};
use crate::error::{CallError, CallKind, DeviceError, Error, KernelFault, LaneError, PlanError};
use crate::exec::{EnqueueCounts, Lowered, StepExecutor, Until, drive};
use crate::lane::COPY_ENGINE;
use crate::plan::{ExpertMap, SlotShape};
use crate::schedule::Flag;
use crate::schedule::call_program::{CallMachine, CallProgram, Part, Role, SlotCall, StageId, Work};
use crate::schedule::stream_program::Slots;
use crate::world::{Group, WorldState};

/// Flags that this rank awaits from each peer.
pub(super) const FLAGS: [Flag; 2] = [Flag::Landed, Flag::Returned];
/// The status of a failed world; faults of kernels are below it.
pub(super) const DEAD: u64 = 1 << 16;

/// An [`ExpertParallel`](crate::ExpertParallel) in fixed slots on a device. See the
/// [module](super).
///
/// It may be dropped when the host has enqueued its last call. Graphs that hold its calls must not
/// be launched any more, and with several nodes their launches must have finished.
///
/// With several nodes, confirm that the stream is done, by [`synchronize`](Self::synchronize) or
/// [`Stream::is_done`], before the exchange is dropped, or at least before the world is. Until
/// Sidelane has seen that, it treats the stream as unfinished. A thread then serves the stream and
/// holds the world, which does not leave. If the process exits, other ranks see it as lost.
#[derive(Debug)]
pub(in crate::ep) struct SlotExchange {
    /// Programs of its calls, by [`SlotCall`].
    pub(super) programs: [CallProgram; 4],
    /// Their operations, lowered for a stream.
    pub(super) lowered: [LoweredCall; 4],
    pub(super) turn: CallState,
    /// Dropped last, because of its proxy.
    pub(super) state: SlotState,
}

/// State that is the same in every call, but for the memory that it names.
#[derive(Debug)]
pub(super) struct SlotState {
    pub(super) shared: Arc<WorldState>,
    /// Where ranks agree on a mask, as they do not by their streams.
    pub(super) group: Group,
    pub(super) world_ranks: Vec<u32>,
    pub(super) me: u32,
    pub(super) device: u32,
    pub(super) spec: Spec,
    pub(super) shape: SlotShape,
    pub(super) experts: u32,
    pub(super) digest: u64,
    pub(super) places: WindowLayout,
    pub(super) kernels: Kernels,
    /// The rank of each expert, its number there, and the place of each token.
    pub(super) rank_of: DeviceRange,
    pub(super) local_of: DeviceRange,
    /// Which choices of the last dispatch were dropped, `u8 [max_tokens, top_k]`.
    pub(super) dropped: DeviceRange,
    /// Marks of ranks that refuse a call.
    pub(super) marks: DeviceRange,
    pub(super) rows: DeviceRange,
    pub(super) received: DeviceRange,
    /// Rows that return, `[ranks, max_tokens, hidden]`.
    pub(super) partials: DeviceRange,
    /// Within a budget: expert-major rows.
    pub(super) expansion: Option<Expansion>,
    /// Where slots are packed to, and where partial rows are summed from.
    pub(super) packed_at: Addresses,
    pub(super) summed_from: Addresses,
    pub(super) lanes: Vec<LaneUse>,
    pub(super) facts: Arc<ExchangeState>,
    pub(super) guard: WaitBreaker,
    /// Peers that it awaits: by words of the host first, then by those that NICs raise in device
    /// memory.
    pub(super) awaited: Vec<u32>,
    pub(super) aside: Option<Arc<BypassStream>>,
    /// This rank's own.
    pub(super) memory: DeviceRange,
    pub(super) window: Windows,
    /// Dropped last: it sees whether a stream still uses the words.
    pub(super) proxy: Option<Proxy>,
}

/// A call as this rank makes it.
#[derive(Debug)]
pub(super) struct LoweredCall {
    /// The operations of its stage.
    pub stage: Lowered,
    /// Work of a call, without how copies are enqueued.
    pub counts: EnqueueCounts,
}

/// A dispatch between its halves.
#[derive(Debug)]
pub(in crate::ep) struct SlotDispatch {
    machine: CallMachine,
}

/// A combine between its halves.
#[derive(Debug)]
pub(in crate::ep) struct SlotCombine {
    machine: CallMachine,
}

impl LoweredCall {
    /// Work of the last call.
    fn enqueued(&self) -> EnqueueCounts {
        self.stage.with_copies(self.counts)
    }
}

impl SlotExchange {
    /// Its number among instances on devices.
    pub fn instance(&self) -> u64 {
        self.state.facts.instance
    }

    /// The lanes of the group.
    pub fn lanes(&self) -> &[LaneUse] {
        &self.state.lanes
    }

    /// Where experts live.
    pub fn expert_map(&self) -> &ExpertMap {
        &self.state.spec.map
    }

    /// Goes by this map from the next dispatch on: the same slots, under another mask. Waits for
    /// the stream. Ranks agree through the coordinator, because their streams agree on nothing.
    ///
    /// # Errors
    /// [`CallError::OutOfTurn`], an error of `map`, what [`settle`](Self::settle) finds;
    /// [`CallError::ConfigsDiffer`] at the other ranks, and where ranks bring different masks: the
    /// old mask stays everywhere. Later errors end the world.
    pub fn mask(&mut self, stream: &Stream, map: Result<ExpertMap, Error>) -> Result<(), Error> {
        let idle = self.turn("mask", SlotCall::Dispatch, false).and_then(|()| self.settle(stream));
        let map = idle.and(map);
        let agreed = self.state.group.alike(&[
            ("whether their masks can be used (1: yes)", map.is_ok().into()),
            ("the mask", map.as_ref().map_or(0, ExpertMap::digest)),
        ]);
        let map = map?;
        agreed?;
        let SlotState { rank_of, local_of, me, expansion, .. } = &self.state;
        let written = write_map((rank_of, local_of), &map, *me, stream)
            .and_then(|()| expansion.as_ref().map_or(Ok(()), |expansion| expansion.write_map(&map, stream)))
            // A peer's next dispatch would await this rank, whose driver calls may wait for the
            // device.
            .and_then(|()| self.state.group.gather(&[]).map(drop));
        written.map_err(|error| self.state.fail(error))?;
        self.state.spec.map = Arc::new(map);
        Ok(())
    }

    /// First half of a dispatch: sends rows and states the number of tokens. Work that is enqueued
    /// before the second half runs meanwhile.
    ///
    /// # Errors
    /// [`CallError::OutOfTurn`]: nothing was enqueued. [`PlanError`](crate::error::PlanError) and
    /// [`DeviceError`] for tensors of another shape, misaligned or out of reach: the call is
    /// refused at all ranks, as by [`refuse`](Self::refuse). The reason of the world's failure.
    pub fn start_dispatch(
        &mut self,
        stream: &Stream,
        x: Tensor<'_>,
        choices: Choices<'_>,
    ) -> Result<SlotDispatch, Error> {
        self.turn("start_dispatch", SlotCall::Dispatch, false)?;
        self.finish_refusal(stream)?;
        let started = Tokens::check(&self.state.spec, stream.device(), x, choices).and_then(|tokens| {
            let count = tokens.count;
            Ok((self.start(stream, SlotCall::Dispatch, HalfTensors::Tokens(tokens))?, count))
        });
        let (machine, count) = started.map_err(|error| self.refuse(stream, CallKind::Dispatch, error))?;
        self.turn.tokens = count;
        Ok(SlotDispatch { machine })
    }

    /// Second half of a dispatch: the stream waits for the rows of all ranks.
    ///
    /// # Errors
    /// [`CallError::OutOfTurn`]; what the driver refuses ends the world.
    pub fn finish_dispatch(
        &mut self,
        stream: &Stream,
        started: SlotDispatch,
    ) -> Result<(SlotRows, SlotHandle), Error> {
        self.turn("finish_dispatch", SlotCall::Dispatch, true)?;
        self.end(started.machine, stream, SlotCall::Dispatch, HalfTensors::Nothing)?;
        let tokens = self.turn.tokens;
        self.turn.dispatches += 1;
        let enqueued = self.lowered[SlotCall::Dispatch as usize].enqueued();
        let facts = Arc::clone(&self.state.facts);
        let expanded = self.state.expansion.as_ref().map(ExpandedRows::of).transpose()?;
        let dropped = self.state.dropped.part(0, u64::from(tokens) * u64::from(self.state.spec.top_k))?;
        let (received, ranks) = (self.state.received.clone(), self.state.size());
        let rows = SlotRows { received, shape: self.state.shape, ranks, expanded };
        Ok((rows, SlotHandle::new(facts, (self.turn.dispatches, tokens), dropped, enqueued)))
    }

    /// First half of a combine: sends the partial rows back. `out` is the target of the sums, if it
    /// is known.
    ///
    /// # Errors
    /// As [`start_dispatch`](Self::start_dispatch).
    pub fn start_combine(
        &mut self,
        stream: &Stream,
        y: CombineInput<'_>,
        handle: &SlotHandle,
        out: Option<&TensorMut<'_>>,
    ) -> Result<SlotCombine, Error> {
        self.own(handle).map_err(|error| self.refuse(stream, CallKind::Combine, error))?;
        self.turn("start_combine", SlotCall::Combine, false)?;
        let usable = out.map_or(Ok(()), |out| self.state.sums(out, self.turn.tokens).map(drop));
        let started =
            usable.and_then(|()| self.start(stream, SlotCall::Combine, HalfTensors::Outputs(y, handle)));
        let machine = started.map_err(|error| self.refuse(stream, CallKind::Combine, error))?;
        handle.combined(self.lowered[SlotCall::Combine as usize].enqueued());
        Ok(SlotCombine { machine })
    }

    /// Second half of a combine: sums.
    ///
    /// # Errors
    /// An error of the driver ends the world. An `out` that cannot be used is this rank's error
    /// alone: the rows have returned, and are used up.
    pub fn finish_combine(
        &mut self,
        stream: &Stream,
        started: SlotCombine,
        handle: &SlotHandle,
        out: TensorMut<'_>,
    ) -> Result<(), Error> {
        self.turn("finish_combine", SlotCall::Combine, true)?;
        self.own(handle)?;
        self.end(started.machine, stream, SlotCall::Combine, HalfTensors::Sums(out))
    }

    /// Ends the dispatch of this handle, or the last one, without a combine: the received rows have
    /// been read. Collective. Of a dispatch that this rank refused, it ends the refusal.
    ///
    /// # Errors
    /// As [`start_dispatch`](Self::start_dispatch).
    pub fn release(&mut self, stream: &Stream, handle: Option<&SlotHandle>) -> Result<(), Error> {
        let own = handle.map_or(Ok(()), |handle| self.own(handle));
        own.map_err(|error| self.refuse(stream, CallKind::Combine, error))?;
        if self.turn.refusal.is_some() {
            return self.finish_refusal(stream);
        }
        self.turn("release", SlotCall::Combine, false)?;
        self.end(CallMachine::default(), stream, SlotCall::Release, HalfTensors::Nothing)
    }

    /// Enters a call that this rank cannot make: the others find in its verdict that this rank
    /// refuses it, none of them has rows or sums, and the next call is a dispatch. Returns the
    /// error to report here: `error`, or that of what could not be enqueued, which ends the world.
    ///
    /// Nothing is entered out of turn, in a world that has failed, and amid a capture: launches of
    /// the graph come later, and are not refused.
    pub fn refuse(&mut self, stream: &Stream, kind: CallKind, error: Error) -> Error {
        self.enter_refused(stream, kind).map_or_else(|failed| failed, |()| error)
    }

    fn enter_refused(&mut self, stream: &Stream, kind: CallKind) -> Result<(), Error> {
        let next = self.turn.call.kind() == kind && !self.turn.pending;
        let lives = self.state.shared.hub.health().check().is_ok();
        if !next || !lives || stream.is_capturing()? {
            return Ok(());
        }
        if self.turn.call == SlotCall::Combine {
            self.end(CallMachine::default(), stream, SlotCall::Refusal, HalfTensors::Refusal)?;
            return self.state.judge(stream).map_err(|error| self.state.fail(error));
        }
        self.finish_refusal(stream)?;
        self.turn.tokens = 0;
        self.end(CallMachine::default(), stream, SlotCall::Dispatch, HalfTensors::Refusal)?;
        self.turn.dispatches += 1;
        let mut machine = CallMachine::default();
        self.drive(&mut machine, stream, SlotCall::Refusal, HalfTensors::Refusal, Until::Half)?;
        self.turn.call = SlotCall::Dispatch;
        self.turn.refusal = Some(machine);
        Ok(())
    }

    /// Enqueues the waits of a refused dispatch, if there are any yet. A graph cannot hold them,
    /// because peers answer once, and launches are many.
    fn finish_refusal(&mut self, stream: &Stream) -> Result<(), Error> {
        let Some(machine) = self.turn.refusal else { return Ok(()) };
        self.state.shared.hub.health().check()?;
        if stream.is_capturing()? {
            let expected = "release or start_dispatch outside of a capture, after a refusal";
            return Err(CallError::OutOfTurn { call: "start_dispatch", expected }.into());
        }
        self.turn.refusal = None;
        self.end(machine, stream, SlotCall::Refusal, HalfTensors::Nothing)
    }

    /// Enqueues what is left of a refusal before the exchange is dropped, because peers still write
    /// to its memory. A stream with such waits holds that.
    pub fn close(&mut self, stream: &Stream) {
        // An error here has ended the world, and so the writes of peers.
        let _ = self.finish_refusal(stream);
    }

    /// Makes the first half of a call.
    fn start(
        &mut self,
        stream: &Stream,
        call: SlotCall,
        given: HalfTensors<'_>,
    ) -> Result<CallMachine, Error> {
        let mut machine = CallMachine::default();
        self.drive(&mut machine, stream, call, given, Until::Half)?;
        self.turn.pending = true;
        Ok(machine)
    }

    /// Makes a call to its end, from where the machine stands. One that fails is over, too.
    fn end(
        &mut self,
        mut machine: CallMachine,
        stream: &Stream,
        call: SlotCall,
        given: HalfTensors<'_>,
    ) -> Result<(), Error> {
        self.turn.pending = false;
        self.turn.call = if call == SlotCall::Dispatch { SlotCall::Combine } else { SlotCall::Dispatch };
        self.drive(&mut machine, stream, call, given, Until::End)
    }

    fn drive(
        &mut self,
        machine: &mut CallMachine,
        stream: &Stream,
        call: SlotCall,
        given: HalfTensors<'_>,
        until: Until,
    ) -> Result<(), Error> {
        let SlotExchange { programs, lowered, turn, state } = self;
        let (program, stage) = (&programs[call as usize], &mut lowered[call as usize].stage);
        let mut made = ConstantCall { state, stage, stream, call, given, tokens: turn.tokens };
        drive(machine, program, &mut made, until).map(drop)
    }

    /// That a handle is of the last dispatch.
    fn own(&self, handle: &SlotHandle) -> Result<(), Error> {
        self.state.shared.hub.health().check()?;
        if !Arc::ptr_eq(&handle.facts, &self.state.facts) {
            let (seen, expected) = (handle.instance(), self.instance());
            return Err(CallError::ForeignHandle { seen, expected }.into());
        }
        match (handle.nth, self.turn.dispatches) {
            (seen, expected) if seen != expected => Err(CallError::WrongOutput { seen, expected }.into()),
            _ => Ok(()),
        }
    }

    /// Blocks until everything in the stream is done, even if the world fails, and returns the
    /// outcome, that of the last call included. Use it at the end of a step or of a test: nothing
    /// else here blocks.
    ///
    /// With words in device memory, a stream of Sidelane's ends the waits of a failed world. If
    /// blocked streams hold all hardware queues, there is none. Then this returns the cause with
    /// the stream still waiting: it keeps Sidelane's memory, and the caller's tensors must stay.
    ///
    /// # Errors
    /// [`LaneError::Deadline`] if a live rank is silent for too long, which ends the world. It
    /// names the first peer that has sent nothing, as far as words can be read: if the device does
    /// not answer, those of the host. If these show no late peer, it names this rank itself. Else
    /// as [`status`](Self::status).
    pub fn synchronize(&self, stream: &Stream) -> Result<(), Error> {
        self.settle(stream).and_then(|()| self.status())
    }

    /// Blocks likewise, and leaves the last call's verdict out.
    fn settle(&self, stream: &Stream) -> Result<(), Error> {
        let (start, deadline) = (Instant::now(), self.state.shared.options.timeouts.deadline);
        let mut late = None;
        let mut polling = Polling::new(self.state.shared.hub.health());
        while !stream.is_done()? {
            let waited = start.elapsed();
            if self.state.shared.hub.health().check().is_err() {
                if self.state.aside.as_ref().is_some_and(|aside| aside.is_stuck()) {
                    break;
                }
            } else if waited > deadline && late.is_none() {
                let CallState { call, pending, refusal, .. } = self.turn;
                let landing = refusal.is_some() || (call == SlotCall::Dispatch) == pending;
                let missing = self.state.missing(waited, landing);
                // Words of a world that has died meanwhile tell nothing. Ending it ends the waits.
                late = self.state.shared.hub.health().check().is_ok().then(|| self.state.fail(missing));
            }
            polling.rest().map_err(|_| PlanError::Interrupted)?;
        }
        late.map_or_else(|| self.lasting(), Err)
    }

    /// Errors that stay: the world's cause, or that slots were not of the calls that they should
    /// be.
    fn lasting(&self) -> Result<(), Error> {
        self.state.shared.hub.health().check()?;
        let fault = KernelFault::of(self.state.guard.status() as u32);
        fault.map_or(Ok(()), |fault| Err(DeviceError::Fault { device: self.state.device, fault }.into()))
    }

    /// Known errors: those that stay, or the verdict of the last call that the stream has come to.
    /// Sums are zeros then.
    ///
    /// # Errors
    /// [`Cause`](crate::error::Cause), [`DeviceError::Fault`]; [`CallError::PeerRefused`], and at
    /// the rank itself [`PlanError::RefusedHere`] or the fault for which it refused.
    pub fn status(&self) -> Result<(), Error> {
        self.lasting()?;
        let (Status(word), call) = self.state.facts.verdict();
        match KernelFault::of(word) {
            None => Ok(()),
            Some(KernelFault::Refused { rank }) if rank == self.state.me => {
                Err(PlanError::RefusedHere.into())
            }
            Some(KernelFault::Refused { rank: peer }) => {
                Err(CallError::PeerRefused { call: call.into(), peer }.into())
            }
            Some(fault) => Err(DeviceError::Fault { device: self.state.device, fault }.into()),
        }
    }

    /// Refuses what is not next, and what comes after the end of the world.
    fn turn(&self, name: &'static str, call: SlotCall, pending: bool) -> Result<(), Error> {
        self.state.shared.hub.health().check()?;
        match self.turn.call == call && self.turn.pending == pending {
            true => Ok(()),
            false => Err(CallError::OutOfTurn { call: name, expected: self.turn.name() }.into()),
        }
    }
}

impl SlotState {
    /// Calls of this rank, as the pack kernel counts them.
    pub(super) fn counter(&self) -> Result<Word<'_, u64>, DeviceError> {
        self.memory.word(self.places.counter().0)
    }

    /// The status word, for kernels.
    pub(super) fn status_word(&self) -> Result<Word<'_, u32>, DeviceError> {
        self.facts.words.range().word(self.places.status())
    }

    /// The verdict of the last call, for kernels that judge: with the number of the call.
    fn verdict(&self) -> Result<Word<'_, u64>, DeviceError> {
        self.facts.words.range().word(self.facts.verdict)
    }

    /// The same without the number, for kernels that go by it.
    fn verdict_status(&self) -> Result<Word<'_, u32>, DeviceError> {
        self.facts.words.range().word(self.facts.verdict)
    }

    /// Number of ranks.
    pub(super) fn size(&self) -> u32 {
        self.world_ranks.len() as u32
    }

    /// Peers wait for what could not be enqueued: their waits are ended, too.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.shared.fail(&self.world_ranks, error)
    }

    /// The peer whose word a stream still waits for.
    fn missing(&self, waited: Duration, landing: bool) -> Error {
        let by_nic = self.aside.as_ref().map_or_else(|| Some(Vec::new()), |aside| aside.values());
        let all = FLAGS.len() * self.awaited.len();
        let by_host = all - if self.aside.is_some() { FLAGS.len() * self.window.far.len() } else { 0 };
        let mut values: Vec<u64> = (0..by_host).map(|nth| self.guard.value(nth)).collect();
        values.extend(by_nic.into_iter().flatten());
        let (late, flag) = late(&values, usize::from(!landing));
        let peer = late.map_or(self.me, |nth| self.awaited[nth]);
        let lanes = self.proxy.as_ref().map(|proxy| proxy.work().port.lanes());
        let far = lanes.filter(|_| self.window.far.contains(&peer));
        let lane = far.map_or(COPY_ENGINE, |lanes| lanes.reach[peer as usize].name());
        let (rank, flag) = (self.me, FLAGS[flag] as u32);
        LaneError::Deadline { rank, peer, lane, flag, awaited: 1, seen: 0, waited }.into()
    }

    /// Packs the rows of these tokens; none where this rank refuses the call.
    fn pack(&self, stream: &Stream, tokens: Option<&Tokens<'_>>) -> Result<(), Error> {
        let none = self.rows.span(0, 0)?;
        let (count, [x, experts, weights]) = match tokens {
            Some(Tokens { count, x, experts, weights, .. }) => (
                *count,
                [x.span(0, x.len())?, experts.span(0, experts.len())?, weights.span(0, weights.len())?],
            ),
            None => (0, [none; 3]),
        };
        let pack = Pack {
            shape: self.shape,
            tokens: count,
            x,
            experts,
            weights,
            n_experts: self.experts,
            rank_of: self.rank_of.span(0, self.rank_of.len())?,
            local_of: self.local_of.span(0, self.local_of.len())?,
            slots: &self.packed_at,
            places: self.rows.span(0, self.rows.len())?,
            dropped: self.dropped.span(0, self.dropped.len())?,
            counter: self.counter()?,
            digest: self.digest,
            refused: if tokens.is_some() { 0 } else { KernelFault::refused_by(self.me) },
        };
        self.kernels.pack(stream, &pack)?;
        let Some(expansion) = &self.expansion else { return Ok(()) };
        // `pack` has counted the call: it cannot be made again.
        let tallied = expansion.tally((&self.kernels, stream), &self.packed_at, (count, pack.experts));
        tallied.map_err(|error| self.fail(error))
    }

    /// Compares the headers with what they must be. So a rank that makes another call, or refuses
    /// this one, is found before its rows are used.
    fn check(&self, stream: &Stream, tokens: u32) -> Result<(), Error> {
        let check = Check {
            shape: self.shape,
            ranks: self.size(),
            rank: self.me,
            received: self.received.span(0, self.received.len())?,
            counter: self.counter()?,
            status: self.status_word()?,
            verdict: self.verdict()?,
            digest: self.digest,
        };
        self.kernels.check(stream, &check)?;
        let Some(expansion) = &self.expansion else { return Ok(()) };
        let (status, verdict) = (self.status_word()?, self.verdict()?);
        let received = ExpansionInput { slots: &self.received, dropped: &self.dropped, status, verdict };
        expansion.expand((&self.kernels, stream), received, tokens)
    }

    /// Makes one partial row of the outputs for a token.
    fn fold(&self, stream: &Stream) -> Result<(), Error> {
        let Some(expansion) = &self.expansion else { return Ok(()) };
        expansion.fold((&self.kernels, stream), &self.partials)
    }

    /// Copies outputs that lie elsewhere to where peers expect them.
    fn bring(&self, stream: &Stream, y: &CombineInput<'_>, handle: &SlotHandle) -> Result<(), Error> {
        let tensor = match y {
            CombineInput::Output(ExpertOutput(OutputAt::Slots(output))) => {
                let (seen, expected) = (output.nth, handle.nth);
                return match output.nth == handle.nth && Arc::ptr_eq(&output.facts, &handle.facts) {
                    true => Ok(()),
                    false => Err(CallError::WrongOutput { seen, expected }.into()),
                };
            }
            CombineInput::Output(ExpertOutput(OutputAt::Enqueued(output))) => {
                let (seen, expected) = (output.instance(), self.facts.instance);
                return Err(CallError::ForeignHandle { seen, expected }.into());
            }
            CombineInput::Output(_) => return Err(wrong_place("expert outputs", Side::Device)),
            CombineInput::Elsewhere(tensor) => tensor,
        };
        let outputs = &self.facts.outputs;
        let (columns, dtype) = (self.spec.hidden, self.spec.dtype);
        let rows = outputs.len() / self.spec.row_bytes();
        let from = tensor.on_device("expert outputs", Shape { rows, columns, dtype }, stream.device())?;
        if from.address() == outputs.address() || rows == 0 {
            return Ok(());
        }
        stream.copy(outputs.span(0, from.len())?, from.span(0, from.len())?)?;
        handle.count_copied(from.len());
        Ok(())
    }

    /// Makes the number of this call the mark that goes to the others.
    fn mark(&self, stream: &Stream) -> Result<(), DeviceError> {
        let counter = WindowLayout::part(&self.memory, self.places.counter())?;
        let own = self.marks.span(u64::from(self.me) * Slots::MARK_BYTES, Slots::MARK_BYTES)?;
        stream.copy(own, counter.span(0, Slots::MARK_BYTES)?)
    }

    /// Where sums of the last dispatch's tokens go.
    pub(super) fn sums<'o>(&self, out: &TensorMut<'o>, tokens: u32) -> Result<&'o DeviceRange, Error> {
        let (rows, columns) = (tokens.into(), self.spec.hidden);
        let dtype = self.spec.dtype;
        out.on_device("combined tokens", Shape { rows, columns, dtype }, self.device)
    }

    /// Finds which ranks refuse a combine that this rank refuses: sums of no tokens.
    fn judge(&self, stream: &Stream) -> Result<(), Error> {
        self.sum(stream, &self.rows.part(0, 0)?, 0)
    }

    /// Sums by rank, ascending; zeros where a rank refuses to combine.
    fn sum(&self, stream: &Stream, out: &DeviceRange, tokens: u32) -> Result<(), Error> {
        let sum = SumArgs {
            shape: self.shape,
            tokens,
            columns: self.spec.hidden as u32,
            rows: self.expansion.as_ref().map_or(self.spec.dtype, Expansion::partial_dtype),
            dtype: self.spec.dtype,
            returned_rows: &self.summed_from,
            places: self.rows.span(0, self.rows.len())?,
            status: self.verdict_status()?,
            marks: Some(RefusalMarks {
                marks: self.marks.span(0, self.marks.len())?,
                counter: self.counter()?,
                rank: self.me,
                verdict: self.verdict()?,
                lasting: self.status_word()?,
            }),
            out: out.span(0, out.len())?,
        };
        Ok(self.kernels.sum(stream, &sum)?)
    }
}

/// The next call of an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallState {
    /// A dispatch, or what answers one.
    pub call: SlotCall,
    /// It stands at its half.
    pub pending: bool,
    /// The refusal of the last dispatch, if its second half is not enqueued yet.
    pub refusal: Option<CallMachine>,
    /// Dispatches so far.
    pub dispatches: u64,
    /// Tokens of the last one.
    pub tokens: u32,
}

impl CallState {
    /// The calls that are right now.
    pub fn name(&self) -> &'static str {
        match (self.call, self.pending) {
            (SlotCall::Dispatch, false) => "start_dispatch",
            (SlotCall::Dispatch, true) => "finish_dispatch",
            (_, false) => "start_combine or release",
            (_, true) => "finish_combine",
        }
    }
}

/// The first peer that is awaited, and its flag, from the words of each peer, [`FLAGS`] in turn;
/// `newest` if they do not tell.
///
/// Words that have arrived stay set until all have. A peer that has sent its dispatch may have sent
/// the answering combine too, before this rank has received all dispatches. A peer whose answer is
/// here may have sent the next dispatch, before all answers are. So a peer with any word set is not
/// awaited.
pub(super) fn late(values: &[u64], newest: usize) -> (Option<usize>, usize) {
    let peers = || values.chunks_exact(FLAGS.len()).map(|words| [words[0] != 0, words[1] != 0]);
    let only = |flags: [bool; 2]| peers().any(|words| words == flags);
    let flag = match (only([true, false]), only([false, true])) {
        (true, _) => 0,
        (_, true) => 1,
        _ => newest,
    };
    (peers().position(|words| words == [false, false]), flag)
}

/// Tensors of the caller that a half needs.
pub(super) enum HalfTensors<'a> {
    Nothing,
    /// First half of a dispatch.
    Tokens(Tokens<'a>),
    /// Of a call that this rank refuses.
    Refusal,
    /// First half of a combine.
    Outputs(CombineInput<'a>, &'a SlotHandle),
    /// Second half of a combine.
    Sums(TensorMut<'a>),
}

/// A call amid its steps.
struct ConstantCall<'a> {
    pub state: &'a SlotState,
    /// The operations of its stage.
    pub stage: &'a mut Lowered,
    pub stream: &'a Stream,
    pub call: SlotCall,
    pub given: HalfTensors<'a>,
    /// Tokens of the last dispatch.
    pub tokens: u32,
}

impl StepExecutor for ConstantCall<'_> {
    fn run(&mut self, _: Role, _: StageId, part: Part) -> Result<(), Error> {
        self.stage.enqueue(part, self.stream).map_err(|error| self.state.fail(error.into()))
    }

    fn compute(&mut self, _: Role, work: Work) -> Result<(), Error> {
        let ConstantCall { state, stream, given, tokens: last, .. } = self;
        match (work, given) {
            (Work::Pack, HalfTensors::Tokens(tokens)) => state.pack(stream, Some(tokens)),
            (Work::Pack, HalfTensors::Refusal) => state.pack(stream, None).map_err(|error| state.fail(error)),
            (Work::Check, _) => state.check(stream, *last).map_err(|error| state.fail(error)),
            (Work::Partials, HalfTensors::Outputs(y, handle)) => {
                state.bring(stream, y, handle)?;
                state.fold(stream)
            }
            (Work::Partials, HalfTensors::Refusal) => {
                state.mark(stream).map_err(|error| state.fail(error.into()))
            }
            (Work::Sum, HalfTensors::Sums(out)) => state.sum(stream, state.sums(out, *last)?, *last),
            _ => Err(CallError::unknown_step(self.call.kind(), &work).into()),
        }
    }

    /// Ranks agreed on all constants when they built the exchange.
    fn agree(&mut self, _: Role) -> Result<(), Error> {
        Ok(())
    }

    fn admit(&mut self, _: Role) -> Result<(), Error> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::late;

    #[test]
    fn a_peer_is_late_of_which_no_word_has_come() {
        // Dispatches are awaited: of the third, and the first has heard all and answered.
        assert_eq!(late(&[1, 1, 1, 0, 0, 0], 1), (Some(2), 0));
        // Answers are: of the second, and the next dispatch of the first is here.
        assert_eq!(late(&[1, 1, 0, 0, 0, 1], 0), (Some(1), 1));
        // Nothing has come, or that of one peer tells not what is awaited.
        assert_eq!(late(&[0, 0, 0, 0], 1), (Some(0), 1));
        assert_eq!(late(&[1, 1, 0, 0], 0), (Some(1), 0));
        // By these words no peer is awaited.
        assert_eq!(late(&[1, 0, 1, 1], 1), (None, 0));
        assert_eq!(late(&[], 0), (None, 0));
    }
}
