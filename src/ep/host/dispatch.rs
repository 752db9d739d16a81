//! Dispatch: tokens to the ranks of their experts.

use super::Source;
use super::buffers::{HostRows, check_tensor};
use super::call::sort;
use super::exchange::{HostExchange, UnfinishedCall};
use super::flight::{Flight, Lent};
use super::handle::HostHandle;
use crate::error::{CallKind, Error, PlanError};
use crate::gate::Routing;
use crate::schedule::call::CallMachine;

/// A dispatch between its halves.
#[derive(Debug)]
pub(in crate::ep) struct HostDispatch<'a> {
    unfinished: UnfinishedCall<'a>,
    input: &'a [u8],
    routing: Option<&'a Routing<'a>>,
    flight: Flight,
    machine: CallMachine,
}

impl HostExchange {
    /// First half of a dispatch. `away`: the caller leaves before the second half, so a relay gets
    /// a thread of its own. Input that cannot be used is refused by the second half, on all ranks.
    pub fn start_dispatch<'a>(
        &'a mut self,
        x: Source<'a>,
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
            // What is gathered lies before the rows that are kept.
            most: most(self).saturating_add(gathers.map_or(0, |gather| most(&gather.engine))),
            keeps_room: gathers.is_some(),
            offloaded: away && self.fixed.paths().rails(),
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
            // What gathers sends choices as they are: those that make no sense are refused here.
            flight.refuse(sort(&self.fixed, &mut self.space.sorted, routing));
        }
        let tokens = routing.map_or(0, Routing::tokens);
        let lent = Lent { routing, tokens, ..Lent::default() };
        self.exchange().start(flight, lent)
    }

    /// Second half: what landed, and its layout with the metadata of the rows.
    pub fn finish_placing(
        &mut self,
        machine: CallMachine,
        flight: &mut Flight,
        (input, routing): (&[u8], Option<&Routing<'_>>),
    ) -> Result<(), Error> {
        let lent = Lent { routing, input, ..Lent::default() };
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
        x: Source<'_>,
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
        self.make(&mut flight, Lent { handle, input, ..Lent::default() })?;
        let (mut extent, Some(handle)) = (flight.landed()?, handle) else {
            return Err(PlanError::RefusedHere.into());
        };
        let inner = handle.inner();
        let row_bytes = self.fixed.sizing(kind).row_bytes;
        extent.trim(u64::from(inner.layout.landed) * row_bytes);
        let record = self.spec().record.filter(|_| kind == CallKind::CachedDispatch);
        let index = inner.received.index.clone();
        Ok(HostRows { extent, rows: inner.layout.landed, row_bytes, record, index })
    }
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
