//! Dispatch: tokens to the ranks of their experts.

use super::buffers::check_tensor;
use super::flight::{Flight, Lent, UnfinishedCall};
use super::host_call::sort;
use super::{ExpertParallel, ExpertRows, Handle};
use crate::dtype::Element;
use crate::error::{CallKind, Error, PlanError};
use crate::exec::Until;
use crate::gate::Routing;

/// A dispatch that was started: counts are on their way. Finish it before the next call; dropping it cancels the
/// world, because the other ranks cannot go on.
#[must_use = "the other ranks wait until this is finished"]
#[derive(Debug)]
pub struct PendingDispatch<'a> {
    unfinished: UnfinishedCall<'a>,
    input: &'a [u8],
    routing: &'a Routing<'a>,
    flight: Flight,
}

impl ExpertParallel {
    /// Sends every token to the ranks of its experts, and receives the rows of this rank's experts. Collective.
    ///
    /// `x` is `[tokens, hidden]`, `routing` `[tokens, top_k]`; both may be empty.
    ///
    /// # Errors
    /// On every rank, before a byte moves: [`PlanError`] where the input is wrong ([`PeerRefused`](crate::error::CallError) on the
    /// others), [`CallError`](crate::error::CallError) where ranks make different calls, [`MemoryError::OutOfSpace`](crate::error::MemoryError)
    /// if a rank cannot hold its rows. The world stays usable after these. [`LaneError`](crate::error::LaneError) and
    /// [`Cause`](crate::error::Cause) end it.
    pub fn dispatch<E: Element>(
        &mut self,
        x: &[E],
        routing: &Routing<'_>,
    ) -> Result<(ExpertRows, Handle), Error> {
        self.begin_dispatch(x, routing, false)?.finish()
    }

    /// First half of [`ExpertParallel::dispatch`]: announces memory and publishes counts, and does not wait. Until the
    /// second half, what this rank does for other nodes is done in a thread of its own.
    ///
    /// # Errors
    /// Those that end the world. Bad input is reported by the second half, on all ranks.
    pub fn start_dispatch<'a, E: Element>(
        &'a mut self,
        x: &'a [E],
        routing: &'a Routing<'_>,
    ) -> Result<PendingDispatch<'a>, Error> {
        self.begin_dispatch(x, routing, true)
    }

    fn begin_dispatch<'a, E: Element>(
        &'a mut self,
        x: &'a [E],
        routing: &'a Routing<'_>,
        away: bool,
    ) -> Result<PendingDispatch<'a>, Error> {
        let sent = self.spec().sent(CallKind::Dispatch);
        let checked = self.check_routing(routing);
        let checked = checked.and_then(|()| check_tensor("tokens", x, routing.tokens(), sent));
        let mut flight = self.placing(CallKind::Dispatch, checked, away);
        self.start_placing(&mut flight, routing)?;
        Ok(PendingDispatch {
            unfinished: UnfinishedCall::new(self),
            input: bytemuck::cast_slice(x),
            routing,
            flight,
        })
    }

    /// A call that is placed by a routing, unless that or what comes with it was refused.
    pub(super) fn placing(&self, kind: CallKind, checked: Result<(), Error>, away: bool) -> Flight {
        let most = |ep: &ExpertParallel| ep.fixed.most_bytes(kind, &ep.space.numbers.sizes);
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
    pub(super) fn start_placing(&mut self, flight: &mut Flight, routing: &Routing<'_>) -> Result<(), Error> {
        if self.gather.is_some() && flight.refused.is_none() {
            // What gathers sends choices as they are: those that make no sense are refused here.
            flight.refuse(sort(&self.fixed, &mut self.space.sorted, routing));
        }
        let lent = Lent { routing: Some(routing), tokens: routing.tokens(), ..Lent::default() };
        self.exchange().enter(flight, lent, Until::Half)
    }

    /// Second half: what landed, and its layout with what came beside the rows.
    pub(super) fn finish_placing(
        &mut self,
        flight: &mut Flight,
        (input, routing): (&[u8], &Routing<'_>),
    ) -> Result<(), Error> {
        let lent = Lent { routing: Some(routing), input, ..Lent::default() };
        self.exchange().proceed(flight, lent, Until::End)?;
        let ExpertParallel { fixed, programs, space, gather } = self;
        match gather {
            None => Ok(()),
            Some(gather) => gather.regroup(fixed, programs, space, (flight, routing.weights())),
        }
    }

    /// What rows go out by: this instance, or the one that gathers for it.
    fn exchange(&mut self) -> &mut ExpertParallel {
        match self.gather {
            Some(ref mut gather) => &mut gather.engine,
            None => self,
        }
    }

    /// Whether a routing is one of this instance.
    pub(super) fn check_routing(&self, routing: &Routing<'_>) -> Result<(), Error> {
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

    /// Sends tokens along the layout of an earlier dispatch: no ids, no counts. Collective.
    ///
    /// `x` is `[tokens, hidden]` with the tokens of that dispatch.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`], and [`CallError::ForeignHandle`](crate::error::CallError).
    pub fn dispatch_cached<E: Element>(&mut self, x: &[E], handle: &Handle) -> Result<ExpertRows, Error> {
        self.cached(CallKind::CachedDispatch, 0, Ok(()), x, handle)
    }

    /// A dispatch along a known layout, unless what comes with it was refused.
    pub(super) fn cached<E: Element>(
        &mut self,
        kind: CallKind,
        options: u32,
        checked: Result<(), Error>,
        x: &[E],
        handle: &Handle,
    ) -> Result<ExpertRows, Error> {
        let (inner, sent) = (handle.inner(), self.spec().sent(kind));
        let checked = checked
            .and_then(|()| self.check_handle(handle))
            .and_then(|()| check_tensor("tokens", x, inner.layout.tokens, sent));
        let mut flight = Flight::new(kind, checked);
        flight.tag.options = options;
        let lent = Lent { handle: Some(handle), input: bytemuck::cast_slice(x), ..Lent::default() };
        self.enter(&mut flight, lent, Until::End)?;
        let mut extent = flight.landed()?;
        let row_bytes = self.fixed.sizing(kind).row_bytes;
        extent.trim(u64::from(inner.layout.landed) * row_bytes);
        let record = self.record().filter(|_| kind == CallKind::CachedDispatch);
        let index = inner.received.index.clone();
        Ok(ExpertRows { extent, rows: inner.layout.landed, row_bytes, record, index })
    }
}

impl PendingDispatch<'_> {
    /// Second half: waits for the counts of all, places, moves the rows, and waits for those that come here.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`].
    pub fn finish(self) -> Result<(ExpertRows, Handle), Error> {
        let PendingDispatch { mut unfinished, input, routing, mut flight } = self;
        let ep = unfinished.finish();
        ep.finish_placing(&mut flight, (input, routing))?;
        let (extent, inner) = (flight.landed()?, flight.made);
        let (rows, row_bytes) = (inner.layout.landed, ep.fixed.sizing(CallKind::Dispatch).row_bytes);
        let (record, index) = (ep.record(), inner.received.index.clone());
        Ok((ExpertRows { extent, rows, row_bytes, record, index }, ep.handle_of(inner)))
    }
}
