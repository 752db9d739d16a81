//! An instance on the host, and the calls that are made on it.
//!
//! ```text
//!   call                  programs it runs                              moves
//!   dispatch, prepare     placing: counts, placement, rows              tokens -> rows of experts (prepare: none)
//!   dispatch_cached       along a handle                                the same, without counts
//!   combine               return                                        rows -> sums of tokens
//!   dispatch_backward     return, with one f32 for each row             row gradients -> token gradients
//!   combine_backward      along a handle; weighted, a return behind it  token gradients -> rows, <y, g> -> choices
//!   set_expert_map        agreement
//! ```
//!
//! In a *return* every rank offers a chunk: rows, and one `f32` for each behind them. Readers of
//! the same node pull from it, and the parts for other nodes are put into staging there. Then each
//! rank sums in its own order. A rank that cannot make a call enters it to refuse it.

use std::sync::Arc;

use super::call::{CallTensors, Flight, HostCall, Workspace, options, sort};
use super::gather_dispatch::Gather;
use super::host_results::{HostHandle, HostInput, HostRows, Inner, check_tensor, elements};
use super::{InputTensor, OutputTensor};
use crate::ep::builder::Spec;
use crate::ep::state::{EpState, ReceiveMemory, RowMemory};
use crate::error::{CallError, CallKind, Cause, Error, PlanError};
use crate::exec::{Until, drive};
use crate::gate::Routing;
use crate::lane::Io;
use crate::memory::Pool;
use crate::plan::{ExpertMap, Strategy};
use crate::rows::Arithmetic;
use crate::schedule::call_program::{CallMachine, Engines, RankPrograms, Relays};
use crate::schedule::{CallProperties, Class, Payload, ReturnParts};
use crate::world::Group;

/// An [`ExpertParallel`](crate::ExpertParallel) on the host.
pub(in crate::ep) struct HostExchange {
    /// State that never changes, except for the expert map.
    pub fixed: Arc<EpState>,
    pub programs: Arc<RankPrograms>,
    /// State that calls reuse.
    pub space: Workspace,
    /// How rows go out, if not by exchange.
    pub gather: Option<Box<Gather>>,
}

impl HostExchange {
    /// Collective.
    pub fn new(group: &Group, spec: Spec) -> Result<Self, Error> {
        let gathers = spec.strategy == Strategy::AllGather;
        let gather = gathers.then(|| Gather::new(group, &spec)).transpose()?.map(Box::new);
        let total = group.shared.heap.pool().total();
        let room = ReceiveMemory::pool(total);
        let (fixed, range) = EpState::new(group, spec, room, RowMemory::Near)?;
        let fixed = Arc::new(fixed);
        let programs = RankPrograms::new(
            fixed.paths(),
            fixed.chunks,
            fixed.partial_bytes().is_some(),
            Engines::default(),
        );
        let space = Workspace::new(&fixed, range);
        Ok(HostExchange { fixed, programs: Arc::new(programs), space, gather })
    }

    /// Makes a call from its first step to its last.
    ///
    /// # Errors
    /// Why the call was refused; those that end the world.
    pub fn make(&mut self, flight: &mut Flight, lent: CallTensors<'_>) -> Result<(), Error> {
        self.enter()?;
        self.drive(&mut CallMachine::default(), flight, lent, Until::End)
    }

    /// Makes the first half of a call. [`HostExchange::finish`] makes the second.
    ///
    /// # Errors
    /// As [`HostExchange::make`].
    pub fn start(&mut self, flight: &mut Flight, lent: CallTensors<'_>) -> Result<CallMachine, Error> {
        self.enter()?;
        let mut machine = CallMachine::default();
        self.drive(&mut machine, flight, lent, Until::Half)?;
        Ok(machine)
    }

    /// Makes the second half of a call, which the machine has left at its half.
    ///
    /// # Errors
    /// As [`HostExchange::make`].
    pub fn finish(
        &mut self,
        mut machine: CallMachine,
        flight: &mut Flight,
        lent: CallTensors<'_>,
    ) -> Result<(), Error> {
        self.drive(&mut machine, flight, lent, Until::End)
    }

    fn enter(&mut self) -> Result<(), Error> {
        self.fixed.shared.hub.health().check()?;
        self.space.calls.enter();
        Ok(())
    }

    fn drive(
        &mut self,
        machine: &mut CallMachine,
        flight: &mut Flight,
        lent: CallTensors<'_>,
        until: Until,
    ) -> Result<(), Error> {
        let HostExchange { fixed, programs, space, .. } = self;
        let relays = if flight.offloaded { Relays::Thread } else { Relays::Inline };
        let program = programs.own(flight.kind(), relays);
        match drive(machine, program, &mut HostCall { fixed, programs, space, flight, lent }, until) {
            Ok(None) => Ok(()),
            Ok(Some(refusal)) => Err(refusal),
            Err(error) => {
                let error = self.fail(error);
                // The relay reads rows of this flight. It finds the world failed, and comes back.
                self.space.join_relay();
                Err(error)
            }
        }
    }

    pub fn spec(&self) -> &Spec {
        &self.fixed.spec
    }

    /// The pool rows are received in.
    pub fn pool(&self) -> &Arc<Pool> {
        self.fixed.pool()
    }

    pub fn fail(&self, error: Error) -> Error {
        self.fixed.fail(error)
    }

    /// Whether a handle is one of this instance.
    pub fn check_handle(&self, handle: &HostHandle) -> Result<(), Error> {
        let (seen, expected) = (handle.inner().instance, self.space.instance);
        if seen != expected {
            return Err(CallError::ForeignHandle { seen, expected }.into());
        }
        Ok(())
    }

    pub fn handle_of(&self, inner: Inner) -> HostHandle {
        self.space.handle_of(inner, self.pool())
    }

    /// First half of a dispatch. `away`: the caller leaves before the second half, so a relay gets
    /// a thread of its own. Input that cannot be used is refused by the second half, on all ranks.
    pub fn start_dispatch<'a>(
        &'a mut self,
        x: InputTensor<'a>,
        routing: Result<&'a Routing<'a>, Error>,
        away: bool,
    ) -> Result<HostDispatch<'a>, Error> {
        let of_call = routing.as_ref().ok().copied();
        let checked = routing.and_then(|routing| {
            self.check_routing(routing)?;
            let x = x?;
            check_tensor("tokens", x, routing.tokens(), self.spec().sent(CallKind::Dispatch)).map(|()| x.0)
        });
        let (input, checked) = checked.map_or_else(|error| (&[][..], Err(error)), |input| (input, Ok(())));
        let routing = of_call;
        let mut flight = self.placing(CallKind::Dispatch, checked, away);
        let machine = self.start_placing(&mut flight, routing)?;
        Ok(HostDispatch { unfinished: UnfinishedCall::new(self), input, routing, flight, machine })
    }

    /// A call that is placed by a routing, unless that or what comes with it was refused.
    pub fn placing(&self, kind: CallKind, checked: Result<(), Error>, away: bool) -> Flight {
        let most = |ep: &HostExchange| ep.fixed.most_bytes(kind, &ep.space.numbers.sizes);
        let gathers = self.gather.as_deref();
        Flight {
            // Gathered rows lie before the rows that are kept.
            most: most(self).saturating_add(gathers.map_or(0, |gather| most(&gather.engine))),
            keeps_room: gathers.is_some(),
            offloaded: away && self.fixed.paths().is_multi_node(),
            ..Flight::new(kind, checked)
        }
    }

    /// First half: announces memory, and publishes counts.
    pub fn start_placing(
        &mut self,
        flight: &mut Flight,
        routing: Option<&Routing<'_>>,
    ) -> Result<CallMachine, Error> {
        if let (true, None, Some(routing)) = (self.gather.is_some(), &flight.refused, routing) {
            // The gathering call sends choices as they are, so bad ones are refused here.
            flight.refuse(sort(&self.fixed, &mut self.space.sorted, routing));
        }
        let tokens = routing.map_or(0, Routing::tokens);
        let lent = CallTensors { routing, tokens, ..CallTensors::default() };
        self.exchange().start(flight, lent)
    }

    /// Second half: what landed, and its layout with the metadata of the rows.
    pub fn finish_placing(
        &mut self,
        machine: CallMachine,
        flight: &mut Flight,
        (input, routing): (&[u8], Option<&Routing<'_>>),
    ) -> Result<(), Error> {
        let lent = CallTensors { routing, input, ..CallTensors::default() };
        self.exchange().finish(machine, flight, lent)?;
        let HostExchange { fixed, programs, space, gather } = self;
        match gather {
            None => Ok(()),
            Some(gather) => gather.regroup(
                fixed,
                programs,
                space,
                (flight, routing.map_or(&[], |routing| routing.weights())),
            ),
        }
    }

    /// Instance that sends the rows: this one, or the one that gathers for it.
    fn exchange(&mut self) -> &mut HostExchange {
        match self.gather {
            Some(ref mut gather) => &mut gather.engine,
            None => self,
        }
    }

    /// Whether a routing is one of this instance.
    pub fn check_routing(&self, routing: &Routing<'_>) -> Result<(), Error> {
        let (tokens, spec) = (routing.tokens(), &self.fixed.spec);
        if routing.top_k() != spec.top_k {
            let (what, seen) = ("routing", routing.experts().len());
            let (rows, columns) = (tokens as usize, spec.top_k as usize);
            return Err(PlanError::WrongShape { what, seen, rows, columns }.into());
        }
        if tokens > spec.max_tokens {
            return Err(PlanError::TooManyTokens { tokens, max: spec.max_tokens }.into());
        }
        Ok(())
    }

    /// A dispatch along a known layout, unless what comes with it was refused.
    pub fn cached(
        &mut self,
        (kind, options): (CallKind, u32),
        x: InputTensor<'_>,
        handle: Result<&HostHandle, Error>,
    ) -> Result<HostRows, Error> {
        let along = handle.as_ref().ok().copied();
        let checked = x.and_then(|x| {
            let handle = handle?;
            self.check_handle(handle)?;
            check_tensor("tokens", x, handle.tokens(), self.spec().sent(kind)).map(|()| x.0)
        });
        let (input, checked) = checked.map_or_else(|error| (&[][..], Err(error)), |input| (input, Ok(())));
        let (handle, mut flight) = (along, Flight::new(kind, checked));
        flight.tag.options = options;
        self.make(&mut flight, CallTensors { handle, input, ..CallTensors::default() })?;
        let (mut extent, Some(handle)) = (flight.landed()?, handle) else {
            return Err(PlanError::RefusedHere.into());
        };
        let inner = handle.inner();
        let row_bytes = self.fixed.sizing(kind).row_bytes;
        extent.trim(u64::from(inner.layout.landed) * row_bytes);
        let record = self.spec().record.filter(|_| CallProperties::of(kind).payload == Payload::Tokens);
        let index = inner.received.index.clone();
        Ok(HostRows { extent, rows: inner.layout.landed, row_bytes, record, index })
    }

    /// The layout of a dispatch, and what goes with its rows.
    pub fn prepare(&mut self, routing: Result<&Routing<'_>, Error>) -> Result<HostHandle, Error> {
        let (routing, checked) = routing.map_or_else(|error| (None, Err(error)), |one| (Some(one), Ok(())));
        let checked = checked.and_then(|()| routing.map_or(Ok(()), |one| self.check_routing(one)));
        let made = self.place(CallKind::Prepare, checked, routing)?;
        Ok(self.handle_of(made))
    }

    /// A call that is placed by a routing and brings no tokens.
    fn place(
        &mut self,
        kind: CallKind,
        checked: Result<(), Error>,
        routing: Option<&Routing<'_>>,
    ) -> Result<Inner, Error> {
        let mut flight = self.placing(kind, checked, false);
        let machine = self.start_placing(&mut flight, routing)?;
        self.finish_placing(machine, &mut flight, (&[], routing))?;
        Ok(flight.made)
    }

    /// A combine in one go.
    pub fn combine(
        &mut self,
        y: Result<HostInput<'_>, Error>,
        handle: Result<&HostHandle, Error>,
        out: OutputTensor<'_>,
    ) -> Result<(), Error> {
        let mut flight = self.combining();
        let output = self.sums(&mut flight, &handle, "combined tokens", out);
        let output = output.map(|output| Io { output, ..Io::default() });
        self.ret(&mut flight, y, handle, CallTensors { output, ..CallTensors::default() })
    }

    /// First half of a combine.
    pub fn start_combine<'a>(
        &'a mut self,
        y: Result<HostInput<'_>, Error>,
        handle: Result<&'a HostHandle, Error>,
    ) -> Result<HostCombine<'a>, Error> {
        let mut flight = Flight { offloaded: self.fixed.paths().is_multi_node(), ..self.combining() };
        let (rows, handle) = self.brought(&mut flight, y, handle);
        let machine = self.start(&mut flight, CallTensors { handle, rows, ..CallTensors::default() })?;
        Ok(HostCombine { unfinished: UnfinishedCall::new(self), handle, flight, machine })
    }

    /// A combine, as this instance makes it.
    pub fn combining(&self) -> Flight {
        let parts = ReturnParts { rows: true, weights: false };
        Flight::returning(CallKind::Combine, parts, self.fixed.spec.weighted)
    }

    /// Makes a return of what the caller brings.
    pub fn ret(
        &mut self,
        flight: &mut Flight,
        y: Result<HostInput<'_>, Error>,
        handle: Result<&HostHandle, Error>,
        lent: CallTensors<'_>,
    ) -> Result<(), Error> {
        let (rows, handle) = self.brought(flight, y, handle);
        self.make(flight, CallTensors { handle, rows, ..lent })
    }

    /// The tensor that sums go to; one that cannot be used refuses the call.
    pub fn sums<'o>(
        &self,
        flight: &mut Flight,
        handle: &Result<&HostHandle, Error>,
        what: &'static str,
        out: OutputTensor<'o>,
    ) -> Option<&'o mut [u8]> {
        let sent = (self.spec().hidden, self.spec().dtype);
        let tokens = handle.as_ref().map_or(0, |handle| handle.tokens());
        let (bytes, checked) = match out {
            // Without a handle the number of tokens is unknown, and the call is refused
            // anyway.
            Ok((bytes, _)) if handle.is_err() => (Some(bytes), Ok(())),
            Ok((bytes, dtype)) => {
                let checked = check_tensor(what, (&*bytes, dtype), tokens, sent);
                (Some(bytes), checked)
            }
            Err(error) => (None, Err(error)),
        };
        flight.refuse(checked);
        bytes
    }

    /// Rows and handle of a return, unless they are refused.
    fn brought<'y, 'h>(
        &self,
        flight: &mut Flight,
        y: Result<HostInput<'y>, Error>,
        handle: Result<&'h HostHandle, Error>,
    ) -> (Option<HostInput<'y>>, Option<&'h HostHandle>) {
        let handle = handle.map_err(|error| flight.refuse(Err(error))).ok();
        if let Some(handle) = handle {
            flight.refuse(self.check_handle(handle));
        }
        let rows = y.map_err(|error| flight.refuse(Err(error))).ok();
        flight.refuse(Arithmetic::try_from(self.spec().dtype).map(drop).map_err(Error::from));
        (rows, handle)
    }

    /// Gradient of a dispatch, into tensors of the caller's.
    pub fn dispatch_backward(
        &mut self,
        (rows, row_weights): (Result<HostInput<'_>, Error>, RowNumbers<'_>),
        handle: Result<&HostHandle, Error>,
        (tokens, weights): (OutputTensor<'_>, Result<&mut [f32], Error>),
    ) -> Result<(), Error> {
        let parts = ReturnParts { rows: true, weights: row_weights.is_some() };
        let mut flight = Flight::returning(CallKind::DispatchBackward, parts, false);
        let output = self.sums(&mut flight, &handle, "token gradients", tokens);
        let row_weights = row_weights.and_then(|given| given.map_err(|error| flight.refuse(Err(error))).ok());
        let weights = weights.unwrap_or_else(|error| {
            flight.refuse(Err(error));
            &mut []
        });
        if let Ok(handle) = handle {
            flight.refuse(self.check_weights(row_weights, weights, handle));
        }
        let output = output.map(|output| Io { output, weights, ..Io::default() });
        self.ret(&mut flight, rows, handle, CallTensors { row_weights, output, ..CallTensors::default() })
    }

    fn check_weights(&self, rows: Option<&[f32]>, weights: &[f32], handle: &HostHandle) -> Result<(), Error> {
        let wrong = |what, seen, rows| PlanError::WrongShape { what, seen, rows, columns: 1 };
        let words = handle.inner().offer.metadata as usize;
        match rows {
            None if !weights.is_empty() => Err(wrong("weight gradients", weights.len(), 0).into()),
            None => Ok(()),
            Some(_) if weights.len() != self.choices(handle) => self.check_choices(weights.len(), handle),
            Some(rows) if rows.len() != words => Err(wrong("row weight gradients", rows.len(), words).into()),
            Some(_) => Ok(()),
        }
    }

    /// Choices of the tokens of a handle.
    pub fn choices(&self, handle: &HostHandle) -> usize {
        handle.tokens() as usize * self.fixed.spec.top_k as usize
    }

    /// Gradient of a combine. A weighted one takes two calls: the cached dispatch, then the return
    /// of weight gradients.
    pub fn combine_backward(
        &mut self,
        gradients: InputTensor<'_>,
        handle: Result<&HostHandle, Error>,
        weights: Option<Result<&mut [f32], Error>>,
    ) -> Result<HostRows, Error> {
        let along = handle.as_ref().ok().copied();
        // A tensor that cannot be used refuses the first of the two calls.
        let (weights, checked) = match weights.transpose() {
            Ok(weights) => {
                let lens = weights.as_ref().map(|weights| weights.len()).zip(along);
                (weights, lens.map_or(Ok(()), |(seen, handle)| self.check_choices(seen, handle)))
            }
            Err(error) => (None, Err(error)),
        };
        let gradients = gradients.and_then(|gradients| checked.map(|()| gradients));
        let weighted = if self.fixed.spec.weighted { options::WEIGHTED } else { 0 };
        let mut rows = self.cached((CallKind::CombineBackward, weighted), gradients, handle)?;
        let Some(handle) = along.filter(|_| weighted != 0) else { return Ok(rows) };
        let parts = ReturnParts { rows: false, weights: true };
        let mut flight = Flight::returning(CallKind::ReturnWeights, parts, true);
        let y = self.weight_gradients(&mut rows, handle).map(|()| HostInput::Kept);
        let output = weights.map(|weights| Io { weights, ..Io::default() });
        self.ret(&mut flight, y, Ok(handle), CallTensors { output, ..CallTensors::default() })?;
        Ok(rows)
    }

    fn check_choices(&self, seen: usize, handle: &HostHandle) -> Result<(), Error> {
        let (what, rows) = ("weight gradients", self.choices(handle));
        if seen != rows {
            return Err(PlanError::WrongShape { what, seen, rows, columns: 1 }.into());
        }
        Ok(())
    }

    /// Multiplies gradient rows with their weights, after `<y, g>` has been taken of each; leaves
    /// these behind the rows of the kept output.
    fn weight_gradients(&mut self, gradients: &mut HostRows, handle: &HostHandle) -> Result<(), Error> {
        let (inner, HostExchange { fixed, space, .. }) = (handle.inner(), self);
        let (dtype, loops) = (Arithmetic::try_from(fixed.spec.dtype)?, &fixed.lanes.rows);
        let (row_bytes, products) = (inner.row_bytes as usize, &mut space.products);
        let grads = gradients.rows_mut::<u8>()?.chunks_exact_mut(row_bytes);
        inner.kept_output(|kept| {
            let (extent, chunk) = (&mut kept.extent, inner.offer);
            let rows = extent.slice::<u8>(0, elements::<u8>(chunk.rows, chunk.row_bytes))?;
            products.clear();
            for ((y, g), &weight) in rows.chunks_exact(row_bytes).zip(grads).zip(&inner.received.weights) {
                products.push(loops.dot_rows(dtype, y, g));
                loops.scale_row(dtype, g, weight);
            }
            extent.slice_mut(chunk.metadata_at(), chunk.metadata as usize)?.copy_from_slice(products);
            Ok(())
        })?
    }

    /// Adopts another expert map, if all ranks bring the same and no handle is alive.
    pub fn set_expert_map(&mut self, map: Result<ExpertMap, Error>) -> Result<(), Error> {
        self.remap(CallKind::ExpertMap, map)
    }

    fn remap(&mut self, kind: CallKind, map: Result<ExpertMap, Error>) -> Result<(), Error> {
        let map = map.and_then(|map| self.check_map(&map).map(|()| map));
        let (map, checked) = map.map_or_else(|error| (None, Err(error)), |map| (Some(map), Ok(())));
        let mut flight = Flight::new(kind, checked);
        self.make(&mut flight, CallTensors { map, ..CallTensors::default() })
    }

    fn check_map(&self, map: &ExpertMap) -> Result<(), Error> {
        self.fixed.check_map(map)?;
        // Every handle has a share of the queue that its memory goes back to.
        match Arc::strong_count(&self.space.spare) - 1 {
            0 => Ok(()),
            count => Err(CallError::HandlesAlive { count }.into()),
        }
    }

    /// In place of a call of this kind.
    pub fn refuse(&mut self, kind: CallKind, handle: Option<&HostHandle>, error: Error) -> Error {
        // A missing handle is no second reason.
        let handle = handle.ok_or_else(|| error.clone());
        let refused = match CallProperties::of(kind).class {
            Class::Dispatch => self.place(kind, Err(error.clone()), None).map(drop),
            Class::Cached => self.cached((kind, 0), Err(error.clone()), handle).map(drop),
            Class::Return => {
                // Ranks do not compare the options of a call that one of them refuses.
                let mut flight = Flight::returning(kind, ReturnParts::default(), false);
                flight.refuse(Err(error.clone()));
                self.ret(&mut flight, Err(error.clone()), handle, Default::default())
            }
            Class::Remap => self.remap(kind, Err(error.clone())),
        };
        // A call that a rank refuses has no other end.
        refused.err().unwrap_or(error)
    }
}

impl std::fmt::Debug for HostExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostExchange")
            .field("rank", &self.fixed.lanes.rank)
            .field("spec", self.spec())
            .finish()
    }
}

/// A call that was started, and that the other ranks wait for: dropped before it is finished, it
/// ends the world.
#[derive(Debug)]
struct UnfinishedCall<'a> {
    ep: &'a mut HostExchange,
    finishing: bool,
}

impl<'a> UnfinishedCall<'a> {
    pub fn new(ep: &'a mut HostExchange) -> Self {
        UnfinishedCall { ep, finishing: false }
    }

    /// To make the second half.
    pub fn finish(&mut self) -> &mut HostExchange {
        self.finishing = true;
        self.ep
    }
}

impl Drop for UnfinishedCall<'_> {
    fn drop(&mut self) {
        if !self.finishing {
            let hub = &self.ep.fixed.shared.hub;
            hub.cancel(Cause::Cancelled { by: hub.rank() });
            // The relay finds the world failed, and comes back.
            self.ep.space.join_relay();
            if let Some(gather) = &mut self.ep.gather {
                gather.engine.space.join_relay();
            }
        }
    }
}

/// A dispatch between its halves.
#[derive(Debug)]
pub(in crate::ep) struct HostDispatch<'a> {
    unfinished: UnfinishedCall<'a>,
    input: &'a [u8],
    routing: Option<&'a Routing<'a>>,
    flight: Flight,
    machine: CallMachine,
}

impl HostDispatch<'_> {
    /// Second half.
    pub fn finish(self) -> Result<(HostRows, HostHandle), Error> {
        let HostDispatch { mut unfinished, input, routing, mut flight, machine } = self;
        let ep = unfinished.finish();
        ep.finish_placing(machine, &mut flight, (input, routing))?;
        let (extent, inner) = (flight.landed()?, flight.made);
        let (rows, row_bytes) = (inner.layout.landed, ep.fixed.sizing(CallKind::Dispatch).row_bytes);
        let (record, index) = (ep.spec().record, inner.received.index.clone());
        Ok((HostRows { extent, rows, row_bytes, record, index }, ep.handle_of(inner)))
    }
}

/// A combine between its halves.
#[derive(Debug)]
pub(in crate::ep) struct HostCombine<'a> {
    unfinished: UnfinishedCall<'a>,
    handle: Option<&'a HostHandle>,
    flight: Flight,
    machine: CallMachine,
}

impl HostCombine<'_> {
    /// Second half.
    pub fn finish(self, out: OutputTensor<'_>) -> Result<(), Error> {
        let HostCombine { mut unfinished, handle, mut flight, machine } = self;
        let ep = unfinished.finish();
        let sent = (ep.spec().hidden, ep.spec().dtype);
        let tokens = handle.map_or(0, HostHandle::tokens);
        // Too late to refuse the call: peers have this rank's entry.
        let out = out.and_then(|(bytes, dtype)| {
            check_tensor("combined tokens", (&*bytes, dtype), tokens, sent).map(|()| bytes)
        });
        let (output, checked) = match out {
            Ok(output) => (Some(Io { output, ..Io::default() }), Ok(())),
            Err(error) => (None, Err(error)),
        };
        ep.finish(machine, &mut flight, CallTensors { handle, output, ..CallTensors::default() })?;
        checked
    }
}

/// Numbers of rows, if there are any, as the caller brought them.
type RowNumbers<'a> = Option<Result<&'a [f32], Error>>;
