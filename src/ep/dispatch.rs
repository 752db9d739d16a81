//! Dispatch: tokens to the ranks of their experts.

use std::sync::Arc;

use super::buffers::check_tensor;
use super::call::{Begun, Relaying, entry};
use super::fixed::Fixed;
use super::handle::Inner;
use super::meeting::Numbers;
use super::relay::Errand;
use super::{ExpertParallel, ExpertRows, Handle};
use crate::dtype::Element;
use crate::error::{CallError, CallKind, Error, MemoryError, PlanError};
use crate::exec::Moved;
use crate::gate::Routing;
use crate::lane::Io;
use crate::memory::Extent;
use crate::plan::{Frame, Overflow, Traffic};
use crate::rows::Stores;
use crate::schedule::{Tag, WindowId};

/// A dispatch that was started: counts are on their way. Finish it before the next call; dropping it cancels the
/// world, because the other ranks cannot go on.
#[must_use = "the other ranks wait until this is finished"]
#[derive(Debug)]
pub struct PendingDispatch<'a> {
    begun: Begun<'a>,
    x: &'a [u8],
    top_k: u32,
    weights: &'a [f32],
    opened: Opened,
}

/// What the first half of a dispatch leaves to the second.
#[derive(Debug)]
pub(super) struct Opened {
    tag: Tag,
    /// The extent this rank announced, unless it refuses its input.
    ready: Result<Extent, Error>,
    relaying: Relaying,
    inner: Inner,
}

impl Opened {
    /// Which call it is of.
    pub fn kind(&self) -> CallKind {
        self.tag.kind
    }
}

impl ExpertParallel {
    /// Sends every token to the ranks of its experts, and receives the rows of this rank's experts. Collective.
    ///
    /// `x` is `[tokens, hidden]`, `routing` `[tokens, top_k]`; both may be empty.
    ///
    /// # Errors
    /// On every rank, before a byte moves: [`PlanError`] where the input is wrong ([`CallError::PeerRefused`] on the
    /// others), [`CallError`] where ranks make different calls, [`MemoryError::OutOfSpace`](crate::error::MemoryError)
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
        let opened = self.begin(CallKind::Dispatch, checked, routing, away)?;
        let (x, top_k, weights) = (bytemuck::cast_slice(x), routing.top_k(), routing.weights());
        Ok(PendingDispatch { begun: Begun::new(self), x, top_k, weights, opened })
    }

    /// First half of what is placed by a routing, if that and what comes with it was `checked`.
    pub(super) fn begin(
        &mut self,
        kind: CallKind,
        checked: Result<(), Error>,
        routing: &Routing<'_>,
        away: bool,
    ) -> Result<Opened, Error> {
        let sorted = checked.and_then(|()| self.sort(routing));
        let most = self.fixed.most_bytes(kind, &self.numbers.sizes);
        match &mut self.gather {
            None => self.open(kind, sorted, most, away),
            Some(gather) => gather.open(kind, sorted, routing, most, away),
        }
    }

    /// First half of whatever was `sorted`: announces memory, `most` bytes of it at most, and publishes counts.
    pub(super) fn open(
        &mut self,
        kind: CallKind,
        sorted: Result<(), Error>,
        most: u64,
        away: bool,
    ) -> Result<Opened, Error> {
        self.enter()?;
        if sorted.is_err() {
            self.sorted.clear(&self.fixed.bins);
        }
        self.publish()?;
        let ready = sorted.map(|()| self.pool().announce(most));
        let (base, handle) = ready.as_ref().map_or((0, 0), |extent| (extent.offset(), extent.len()));
        let tag = entry(Tag { kind, base, handle, ..Tag::default() }, &ready);
        self.tables.clear();
        self.tables.tags.fill(tag);
        let skeletons = Arc::clone(&self.skeletons);
        self.run(skeletons.dispatch.entry.start(), None, &mut Io::default(), Stores::Cached)?;
        let mut inner = self.spare_handle();
        let row_bytes = self.fixed.sizing(kind).row_bytes;
        let stores = self.stores(self.sorted.entries() as u64 * row_bytes);
        let relaying = self.relay(away, |calls| {
            let forward = inner.forward.take().unwrap_or_default();
            Errand { stores, ..Errand::new(calls, kind, forward) }
        })?;
        Ok(Opened { tag, ready, relaying, inner })
    }

    /// Whether a routing is one of this instance.
    pub(super) fn check_routing(&self, routing: &Routing<'_>) -> Result<(), Error> {
        let (tokens, spec) = (routing.tokens(), &self.fixed.spec);
        if routing.top_k() != spec.top_k {
            let (what, seen) = ("routing", routing.experts().len());
            return Err(PlanError::WrongShape {
                what,
                seen,
                rows: tokens as usize,
                columns: spec.top_k as usize,
            }
            .into());
        }
        if tokens > spec.max_tokens {
            return Err(PlanError::TooManyTokens { tokens, max: spec.max_tokens }.into());
        }
        Ok(())
    }

    fn sort(&mut self, routing: &Routing<'_>) -> Result<(), Error> {
        let spec = &self.fixed.spec;
        let (bins, rank) = (&self.fixed.bins, self.fixed.lanes.rank);
        self.sorted.fill(&spec.map, bins, spec.notes(), rank, routing)?;
        if let Some(slots) = spec.mode.slots() {
            let full = (0..).zip(&self.sorted.counts).find(|(_, rows)| **rows > slots);
            if let (Some((bin, &rows)), Overflow::Error) = (full, spec.mode.overflow()) {
                return Err(PlanError::SlotsFull { bin, rows, slots }.into());
            }
            self.sorted.keep(spec.top_k, |_| slots);
        }
        Ok(())
    }

    /// Says what this rank has for every bin, and for every rank that hands on. Where slots are fixed, nobody asks.
    fn publish(&mut self) -> Result<(), MemoryError> {
        let Fixed { port, control, bins, .. } = &*self.fixed;
        let paths = self.fixed.paths();
        self.crossing.fill(bins, &paths, &self.sorted);
        if self.fixed.spec.mode.slots().is_some() {
            return Ok(());
        }
        let numbers = &mut self.numbers.scratch;
        numbers.clone_from(&self.sorted.counts);
        self.crossing.staged(&paths, numbers);
        port.write(WindowId::CONTROL, control.publication(self.calls.parity()), numbers)
    }

    /// Places, once everybody agrees: from everybody's counts to this rank's layout.
    fn place(&mut self, inner: &mut Inner, tag: Tag, top_k: u32) -> Result<(), Error> {
        let fixed = Arc::clone(&self.fixed);
        let meeting = fixed.meeting(self.calls, tag.kind);
        meeting.judge(tag, &mut self.numbers)?;
        let Numbers { counts, sizes, landing, .. } = &self.numbers;
        self.tables.landing.clone_from(landing);
        let clipped = fixed.spec.mode.budget().is_some();
        if clipped && self.sorted.keep(top_k, |bin| sizes.room(&fixed.bins, counts, bin)) {
            self.crossing.fill(&fixed.bins, &fixed.paths(), &self.sorted);
        }
        inner.required.clone_from(&sizes.required);
        inner.dropped.clone_from(&self.sorted.dropped);
        let frame = fixed.frame();
        if fixed.spec.spans {
            self.spans.arrange(&frame, (&mut self.sorted, &mut self.crossing), counts, sizes);
        }
        let own = (&self.sorted, &self.crossing);
        inner.layout.fill(&frame, own, top_k, counts, sizes);
        inner.offer = frame.sizing.offer(inner.layout.landed);
        fixed.describe_blocks(self.calls, &inner.layout, &self.sorted)
    }

    /// Stage "rows": everybody's rows to where `tables.landing` says. Where they are placed in this call, what goes with them, too.
    fn put_rows(
        &mut self,
        inner: &Inner,
        relaying: &mut Relaying,
        x: &[u8],
        kind: CallKind,
    ) -> Result<(), Error> {
        let noted = kind.places();
        let fixed = Arc::clone(&self.fixed);
        self.tables.rows(&fixed.meeting(self.calls, kind).setting, &inner.layout, noted);
        let stores = self.stores(inner.layout.terms.len() as u64 * fixed.sizing(kind).row_bytes);
        let skeletons = Arc::clone(&self.skeletons);
        let rows = &skeletons.dispatch.rows;
        let notes = if noted { std::mem::take(&mut self.sorted.notes) } else { Vec::new() };
        let mut io = Io { input: x, notes: bytemuck::cast_slice(&notes), ..Io::default() };
        self.run(rows.start(), Some(inner), &mut io, stores)?;
        if noted {
            self.sorted.notes = notes;
        }
        self.carry(relaying)?;
        self.run(rows.finish(), Some(inner), &mut Io::default(), stores)
    }

    /// Sends tokens along the layout of an earlier dispatch: no ids, no counts. Collective.
    ///
    /// `x` is `[tokens, hidden]` with the tokens of that dispatch.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`], and [`CallError::ForeignHandle`].
    pub fn dispatch_cached<E: Element>(&mut self, x: &[E], handle: &Handle) -> Result<ExpertRows, Error> {
        self.cached(CallKind::CachedDispatch, 0, Ok(()), x, handle)
    }

    pub(super) fn cached<E: Element>(
        &mut self,
        kind: CallKind,
        options: u32,
        checked: Result<(), Error>,
        x: &[E],
        handle: &Handle,
    ) -> Result<ExpertRows, Error> {
        self.enter()?;
        let inner = handle.inner();
        let sizing = self.fixed.sizing(kind);
        let row_bytes = sizing.row_bytes;
        let ready = checked.and_then(|()| self.check_handle(inner)).and_then(|()| {
            check_tensor("tokens", x, inner.layout.tokens, self.spec().sent(kind))?;
            Ok(self.pool().take(sizing.extent_bytes(inner.layout.landed, inner.layout.staged))?)
        });
        let base = ready.as_ref().map_or(0, Extent::offset);
        let tag = entry(Tag { kind, options, handle: inner.number, base, ..Tag::default() }, &ready);
        self.tables.clear();
        self.tables.tags.fill(tag);
        let skeletons = Arc::clone(&self.skeletons);
        self.run(skeletons.dispatch.entry.start(), None, &mut Io::default(), Stores::Cached)?;
        let stores = self.stores(inner.layout.terms.len() as u64 * row_bytes);
        let mut relaying = self.relay(false, |calls| {
            let forward = inner.forward.clone().unwrap_or_default();
            Errand { stores, ..Errand::new(calls, kind, forward) }
        })?;
        self.meet(&mut relaying)?;
        self.run(skeletons.dispatch.entry.finish(), None, &mut Io::default(), Stores::Cached)?;
        let mut extent = self.agree(tag, ready, drop)?;
        self.tell_agreed();
        let meeting = self.fixed.meeting(self.calls, kind);
        for peer in 0..self.size() {
            let peers = if peer == self.rank() { tag } else { meeting.tag_of(peer)? };
            self.tables.landing[peer as usize] = peers.base;
        }
        self.put_rows(inner, &mut relaying, bytemuck::cast_slice(x), kind)?;
        self.relayed(relaying);
        extent.trim(u64::from(inner.layout.landed) * row_bytes);
        let record = self.record().filter(|_| kind == CallKind::CachedDispatch);
        let index = inner.received.index.clone();
        Ok(ExpertRows { extent, rows: inner.layout.landed, row_bytes, record, index })
    }

    /// Second half: waits for the counts of all, places, moves the rows, and waits for those that come here. They lie at the
    /// start of the extent; `room`: the rest of what was announced stays taken.
    pub(super) fn land(
        &mut self,
        opened: Opened,
        x: &[u8],
        top_k: u32,
        room: bool,
    ) -> Result<(Extent, Inner), Error> {
        let Opened { tag, ready, mut relaying, mut inner } = opened;
        let skeletons = Arc::clone(&self.skeletons);
        self.meet(&mut relaying)?;
        self.run(skeletons.dispatch.entry.finish(), None, &mut Io::default(), Stores::Cached)?;
        let placed = self.agree(tag, ready, drop).and_then(|announced| {
            self.place(&mut inner, tag, top_k)?;
            Ok(announced)
        });
        let mut announced = match placed {
            Ok(announced) => announced,
            Err(error) => {
                self.relayed(relaying);
                return Err(error);
            }
        };
        let sizing = self.fixed.sizing(tag.kind);
        if !room {
            announced.trim(sizing.extent_bytes(inner.layout.landed, inner.layout.staged));
        }
        // Whoever begins another call finds the room that this one does not need.
        self.tell_agreed();
        self.host.take_moved();
        self.put_rows(&inner, &mut relaying, x, tag.kind)?;
        inner.report.moved = self.host.take_moved();
        inner.report.relayed = Moved::default();
        if let Some(errand) = self.relayed(relaying) {
            inner.report.moved.add(errand.moved);
            inner.report.relayed = errand.moved;
            inner.forward = Some(errand.forward);
        }
        if !room {
            announced.trim(sizing.landing(inner.layout.landed).bytes());
        }
        let (frame, forward) = (Frame { sizing, ..self.fixed.frame() }, inner.forward.as_deref());
        inner.report.traffic =
            Traffic::count(&frame, &self.sorted, &inner.layout, forward, &mut self.numbers.scratch);
        inner.report.lanes.clone_from(&self.lane_use);
        self.name(&mut inner, self.calls.number());
        Ok((announced, inner))
    }

    /// Makes a layout that of a handle of this instance.
    pub(super) fn name(&self, inner: &mut Inner, number: u64) {
        (inner.wire, inner.row_bytes) = (self.spec().wire, self.spec().row_bytes());
        (inner.instance, inner.number) = (self.instance, number);
        inner.copied.store(0);
        inner.returned.store(Moved::default());
    }

    /// Second half, by an exchange or an all-gather: what landed, and its layout with what came beside the rows.
    pub(super) fn receive(
        &mut self,
        opened: Opened,
        x: &[u8],
        top_k: u32,
        weights: &[f32],
    ) -> Result<(Extent, Inner), Error> {
        let kind = opened.kind();
        let (extent, mut inner) = match self.gather.take() {
            None => self.land(opened, x, top_k, false)?,
            Some(mut gather) => {
                let landed = gather.land(self, opened, x);
                self.gather = Some(gather);
                landed?
            }
        };
        inner.weights.clear();
        if self.spec().weighted {
            inner.weights.extend_from_slice(weights);
        }
        let landing = self.fixed.sizing(kind).landing(inner.layout.landed);
        let words = extent.slice::<u32>(landing.notes_at(), landing.notes as usize)?;
        let experts = self.spec().map.slots_of(self.rank()).len();
        inner.received.fill(self.spec().notes(), &inner.layout, experts, words);
        Ok((extent, inner))
    }

    pub(super) fn check_handle(&self, inner: &Inner) -> Result<(), Error> {
        if inner.instance != self.instance {
            return Err(CallError::ForeignHandle { seen: inner.instance, expected: self.instance }.into());
        }
        Ok(())
    }
}

impl PendingDispatch<'_> {
    /// Second half: waits for the counts of all, places, moves the rows, and waits for those that come here.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`].
    pub fn finish(self) -> Result<(ExpertRows, Handle), Error> {
        let PendingDispatch { mut begun, x, top_k, weights, opened } = self;
        let ep = begun.finish();
        let (extent, inner) = ep.receive(opened, x, top_k, weights)?;
        let (rows, row_bytes) = (inner.layout.landed, ep.fixed.sizing(CallKind::Dispatch).row_bytes);
        let (record, index) = (ep.record(), inner.received.index.clone());
        Ok((ExpertRows { extent, rows, row_bytes, record, index }, ep.handle_of(inner)))
    }
}
