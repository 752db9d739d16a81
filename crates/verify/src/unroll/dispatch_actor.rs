//! The dispatches of a scenario: places of their rows, and accesses of each rank's planners and
//! caller.
//!
//! Behind each dispatch by all-gather, of the instance that gathers, every rank copies its own rows
//! to their places:
//!
//! ```text
//!   extent      | gathered rows | their metadata | rows of my experts | their metadata |
//!                                             | blocks to relay                        |
//!
//!   call n      dispatch of the instance that gathers
//!   call n + 1  | read metadata | regroup: gathered -> rows of my experts | write metadata | read
//! ```
//!
//! The copies are a call of their own in the unrolled program: they write where relays of the
//! dispatch have read.

use std::rc::Rc;

use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::gate::Routing;
use sidelane_core::plan::{
    DispatchLayout, GroupRouting, LocalPermutation, PlanContext, PulledSums, RankRouting, RankSums,
    RelayPermutation, RelayPlan, RelaySorter, RowBuffer,
};
use sidelane_core::schedule::call_program::{Action, Role, StageId, StageOperands, Work};
use sidelane_core::schedule::{
    CallerTables, Flag, Index, Operand, PutSource, RelayTables, ReturnParts, WindowId,
};

use super::call_sequence::{
    Exchange, Extent, FilledOperands, Handle, Member, RowPlaces, SampledCall, Table, Tables, Unroller, Until,
    bad,
};
use super::host_access::chunk;
use super::stage_runs::{Actor, SentTable};
use super::{Bytes, HostAccess, ProofScenario, SeededBug, TokenPlace};

/// A dispatch, or one along a known layout.
struct Sending<'s> {
    kind: CallKind,
    handle: u64,
    /// The call of the layout, existing or coming; and the call that brings metadata.
    layout_of: (usize, usize),
    /// Rows are placed anew: with headers, and metadata next to the rows.
    noted: bool,
    until: Until,
    placed: &'s RowPlaces,
    /// Memory that each rank takes: for the rows that land and their metadata, behind it for the
    /// blocks that it relays.
    ground: &'s [Extent],
    /// The rank that makes another call.
    odd: Option<u32>,
}

/// An unrolled dispatch, and its memory.
struct Dispatched {
    sampled: Vec<SampledCall>,
    placed: Rc<RowPlaces>,
    ground: Vec<Extent>,
}

/// One rank in a dispatch.
struct Sender<'s, 'a> {
    unroller: &'s Unroller<'a>,
    me: u32,
    call: &'s Sending<'s>,
    own: Rc<FilledOperands>,
    /// Where copy engines bring in the rows that landed elsewhere; the bytes that they find there
    /// first.
    brought_in: Option<(Rc<FilledOperands>, Vec<HostAccess>)>,
    /// The relay's messages, and the rows that it passes on.
    messages: Rc<FilledOperands>,
    relayed: Option<Rc<FilledOperands>>,
}

impl Unroller<'_> {
    pub(super) fn dispatch(
        &mut self,
        routing: usize,
        keep: bool,
        until: Until,
    ) -> Result<Vec<SampledCall>, PlanError> {
        let Dispatched { sampled, placed, ground } = self.dispatched(routing, until, &[])?;
        let kept = self.leave(ground, &placed, keep);
        if until == Until::End {
            self.handles.push(Handle { call: self.call, placed, kept });
        }
        Ok(sampled)
    }

    /// A dispatch that keeps its memory. Behind what lands at each rank there is room for `behind`
    /// bytes.
    fn dispatched(&mut self, routing: usize, until: Until, behind: &[u64]) -> Result<Dispatched, PlanError> {
        self.members.iter_mut().for_each(|member| member.dispatches += 1);
        let placed = Rc::new(self.place(routing)?);
        let ground = self.land(&placed, behind, true);
        let handle = self.members[0].calls.number();
        let (kind, odd) = (CallKind::Dispatch, (until == Until::Tags).then_some(0));
        let (layout_of, noted) = ((self.handles.len(), self.call), true);
        let sending =
            Sending { kind, handle, layout_of, noted, until, placed: &placed, ground: &ground, odd };
        let sampled = self.ranks().map(|me| self.send(me, &sending)).collect();
        Ok(Dispatched { sampled, placed, ground })
    }

    pub(super) fn cached(&mut self, handle: usize, until: Until) -> Result<Vec<SampledCall>, PlanError> {
        let Handle { call, placed, .. } = self.handle(handle)?.clone();
        let ground = self.land(&placed, &[], false);
        let kind = CallKind::CachedDispatch;
        let (placed, layout_of, handle) = (&*placed, (handle, call), handle as u64);
        let (noted, odd) = (false, None);
        let sending = Sending { kind, handle, layout_of, noted, until, placed, ground: &ground, odd };
        let sampled = self.ranks().map(|me| self.send(me, &sending)).collect();
        self.leave(ground, placed, false);
        Ok(sampled)
    }

    /// A call in which nothing moves.
    pub(super) fn agree(&mut self) -> Vec<SampledCall> {
        self.members.iter_mut().for_each(Member::free_offered);
        let ranks = self.members.len();
        let (layouts, forwards, arrivals) = (vec![Rc::default(); ranks], Vec::new(), Vec::new());
        let placed = RowPlaces { layouts, forwards, arrivals, numbers: Default::default() };
        let (kind, until, ground) = (CallKind::ExpertMap, Until::Tags, vec![0..0; ranks]);
        let (placed, ground) = (&placed, &ground[..]);
        let (layout_of, noted, odd) = ((0, 0), false, None);
        let sending = Sending { kind, handle: 0, layout_of, noted, until, placed, ground, odd };
        self.ranks().map(|me| self.send(me, &sending)).collect()
    }

    /// Rank 0 enters a return, the others a dispatch. Until it has read the tags, a rank acts as if
    /// all made its call. So both calls are unrolled, and each rank takes its part of one.
    pub(super) fn mixed(&mut self, routing: usize, handle: usize) -> Result<Vec<SampledCall>, PlanError> {
        if self.handle(handle)?.kept.is_some() {
            return Err(bad("handle", handle, "one whose rows the caller does not keep"));
        }
        let before = self.members.clone();
        let mut sampled = self.dispatch(routing, false, Until::Tags)?;
        let dispatched = std::mem::replace(&mut self.members, before);
        let returned = self.ret(handle, ReturnParts { rows: true, weights: false }, false, Until::Tags)?;
        self.members.splice(1.., dispatched.into_iter().skip(1));
        sampled.splice(..1, returned.into_iter().take(1));
        Ok(sampled)
    }

    fn send(&self, me: u32, call: &Sending) -> SampledCall {
        // A call's transfers are known, also where it is refused: a rank that continues performs
        // them.
        let moves = !call.placed.forwards.is_empty();
        let sender = Sender {
            unroller: self,
            me,
            call,
            own: self.own_rows(me, call),
            brought_in: (moves && self.brings_in()).then(|| self.brought_in(me, call)),
            messages: self.messages(me, self.counted(call)),
            relayed: (moves && self.paths(me).is_multi_node()).then(|| self.relayed_rows(me, call)),
        };
        self.sampled_call(me, (call.kind, call.until), &sender)
    }

    fn own_rows(&self, me: u32, call: &Sending) -> Rc<FilledOperands> {
        let (layout, ground) = (&call.placed.layouts[me as usize], call.ground);
        let (mut tables, _) = self.tables(me);
        tables.tags.fill(self.tag(call.kind, call.handle, ground[me as usize].start));
        tables.landing = ground.iter().map(|extent| extent.start).collect();
        if !call.placed.forwards.is_empty() {
            let setting = self.rows_setting(me, self.parity(me, SeededBug::OneHeader), call.layout_of.0);
            tables.rows(&setting, layout, call.noted);
            if self.arrives() {
                let first = call.placed.arrivals[me as usize];
                tables.to_arrivals(&setting, layout, first, |rows| self.landing(rows));
            }
            if self.scenario.enqueues {
                self.send_packed(me, &mut tables);
            }
        }
        let (layout, row_bytes) = (Rc::clone(layout), self.scenario.row_bytes);
        self.filled(me, Tables::Caller { tables, layout, row_bytes })
    }

    /// Rows for other ranks leave from where they lie packed, and so does the metadata of all rows.
    fn send_packed(&self, me: u32, tables: &mut CallerTables) {
        let Member { staging, packed_metadata, .. } = &self.members[me as usize];
        for (nth, operand) in (0..).zip(&mut tables.table) {
            let Operand::Rows { from, from_offset, index, .. } = operand else { continue };
            *from_offset = match from {
                PutSource::Input if nth != me => staging.start,
                PutSource::Metadata => packed_metadata.start,
                _ => continue,
            };
            *from = PutSource::Window { owner: me, window: WindowId::POOL };
            *index = Index::Contiguous;
        }
    }

    /// A kernel packs rows. Those that go as they lie were written to memory of their caller, for
    /// which the same place stands: it is written in each call, and left by the same copies.
    fn packed(&self, me: u32, layout: &DispatchLayout) -> Vec<HostAccess> {
        let place = &self.members[me as usize].staging;
        vec![self.packed_at(me, layout, "packed rows", (place, self.sizing.row_bytes))]
    }

    /// The host or a kernel writes the metadata of packed rows.
    fn packed_metadata(&self, me: u32, layout: &DispatchLayout) -> HostAccess {
        let place = &self.members[me as usize].packed_metadata;
        self.packed_at(me, layout, "packed metadata", (place, self.sizing.metadata_bytes()))
    }

    fn packed_at(
        &self,
        me: u32,
        layout: &DispatchLayout,
        what: &'static str,
        (place, row_bytes): (&Extent, u64),
    ) -> HostAccess {
        let rows = layout.runs.iter().map(|run| run.first + run.count).max().unwrap_or(0);
        let bytes = u64::from(rows) * row_bytes;
        debug_assert!(bytes <= place.end - place.start, "packed rows fit their place");
        self.write(what, Bytes::new(me, WindowId::POOL, place.start, bytes))
    }

    /// Rows that engines bring in, and the planner's accesses before.
    fn brought_in(&self, me: u32, call: &Sending) -> (Rc<FilledOperands>, Vec<HostAccess>) {
        let (layout, forward) = (&call.placed.layouts[me as usize], &call.placed.forwards[me as usize]);
        let (mut tables, _) = self.tables(me);
        tables.landing = call.ground.iter().map(|extent| extent.start).collect();
        let (setting, rows) = (self.rows_setting(me, 0, call.layout_of.0), layout.landed);
        let mut touches = Vec::new();
        if self.arrives() {
            let landed = if call.noted { self.far_segments(me, call.placed) } else { Vec::new() };
            let scratch = self.scratch(me, rows, &call.ground[me as usize], call.layout_of.0);
            tables.bring_metadata_in(&setting, &landed, rows, scratch);
            if call.noted {
                touches = self.arrivals_found(me, call.placed, &landed, scratch.1);
            }
            touches.push(self.index_written(me, call.placed, scratch.0));
        } else {
            tables.bring_in(&setting, forward, rows, call.noted);
        }
        let (layout, row_bytes) = (Rc::clone(layout), self.scenario.row_bytes);
        (self.filled(me, Tables::Caller { tables, layout, row_bytes }), touches)
    }

    /// The messages of a relay.
    pub(super) fn messages(&self, me: u32, counts: bool) -> Rc<FilledOperands> {
        let (_, mut tables) = self.tables(me);
        tables.messages(&self.setting(me, self.parity(me, SeededBug::OneMessage)), counts);
        self.filled(me, self.relayed(me, tables, &Rc::default()))
    }

    /// The rows that a relay passes on.
    fn relayed_rows(&self, me: u32, call: &Sending) -> Rc<FilledOperands> {
        let mut forward = Rc::clone(&call.placed.forwards[me as usize]);
        let (_, mut tables) = self.tables(me);
        tables.bases = call.ground.iter().map(|extent| extent.start).collect();
        let setting = self.setting(me, self.parity(me, SeededBug::OneHeader));
        if self.arrives() {
            let ProofScenario { align, chunks, mode, .. } = *self.scenario;
            let (bins, sizing, paths) = (&self.bins, self.sizing, self.paths(me));
            let frame = PlanContext { bins, paths, align, chunks, sizing, mode };
            let (counts, sizes) = &call.placed.numbers;
            let mut runs = RelayPermutation::default();
            let own = (Rc::make_mut(&mut forward), &mut runs);
            tables.relay_to_arrivals(&setting, &frame, own, (counts, sizes), |rows| self.landing(rows));
        } else {
            tables.forward(&setting, &forward, call.noted);
        }
        self.filled(me, self.relayed(me, tables, &forward))
    }

    /// Reads and writes of a relay and its rank until they agree, in any call. `counts`: its rank
    /// counts; `alike`: so do its local peers.
    pub(super) fn verdict(
        &self,
        me: u32,
        role: Role,
        action: Action,
        (counts, alike): (bool, bool),
    ) -> Vec<HostAccess> {
        let paths = self.paths(me);
        let members = || paths.local_peers().chain([me]);
        let mut tags = self.tags_read(me, Flag::Entry, paths.local_peers());
        if role == Role::Relay {
            tags.extend(self.tags_read(me, Flag::Block, [me]));
        }
        match action {
            Action::Compute(Work::Publish) if counts => self.counts_written(me),
            // A relay without sources elsewhere composes no message.
            Action::Compute(Work::Compose) if paths.count_receivers().next().is_none() => Vec::new(),
            Action::Compute(Work::Compose) => {
                if counts && alike {
                    tags.extend(self.counts_read(me, members()));
                }
                tags.extend(self.messages_written(me, counts));
                tags
            }
            Action::Agree | Action::Admit | Action::Compute(Work::Grow) => {
                tags.extend(self.messages_read(me, false));
                tags
            }
            Action::Compute(Work::Judge) if counts => {
                let mut counted = self.counts_read(me, members());
                counted.extend(self.messages_read(me, true));
                counted
            }
            Action::Compute(Work::Landings) => {
                tags.extend(self.messages_read(me, false));
                tags
            }
            Action::Compute(Work::Bases) => tags,
            _ => Vec::new(),
        }
    }

    /// Whether ranks count: they do unless all sizes are fixed.
    fn counted(&self, call: &Sending) -> bool {
        call.noted && self.scenario.mode.slots().is_none()
    }

    /// Tables of a relay that knows these blocks.
    pub(super) fn relayed(&self, me: u32, tables: RelayTables, forward: &Rc<RelayPlan>) -> Tables {
        let mut chunks = vec![RowBuffer::default(); self.members.len()];
        let landed = forward.blocks.first().map_or(&[][..], |block| &block.landed);
        for (&rank, &landed) in self.paths(me).served_by(me).iter().zip(landed) {
            chunks[rank as usize] = self.sizing.offer(landed);
        }
        Tables::Relay { tables, forward: Rc::clone(forward), chunks, held_by: self.ranks().collect() }
    }

    /// After the release: takes extents of the exact size at every rank. Landing memory has room
    /// for `behind` more bytes, where relays take blocks, too. A host that runs ahead frees nothing
    /// unless the call `counts`.
    fn land(&mut self, placed: &RowPlaces, behind: &[u64], counts: bool) -> Vec<Extent> {
        let held = self.handles.iter().rev().find_map(|handle| handle.kept.clone());
        let held = held.filter(|_| self.scenario.seeded == Some(SeededBug::AnnounceHeld));
        let (mut all, arrives, enqueues) = (Vec::new(), self.arrives(), self.scenario.enqueues);
        let frees = counts || !enqueues || self.paths(0).is_multi_node();
        let landings: Vec<RowBuffer> =
            placed.layouts.iter().map(|layout| self.landing(layout.landed)).collect();
        for (me, (member, layout)) in self.members.iter_mut().zip(&placed.layouts).enumerate() {
            if frees {
                member.free_offered();
            }
            let landing = landings[me];
            if let Some(held) = &held {
                member.pool.give(&held[me]);
            }
            let staged =
                if self.scenario.seeded == Some(SeededBug::StageUnasked) { 0 } else { layout.staged };
            let bytes = match arrives {
                true => landing.staging() + u64::from(staged) * self.sizing.row_bytes,
                false if enqueues => landing.bytes(),
                false => self.sizing.extent_bytes(layout.landed, staged),
            };
            let behind = landing.bytes() + behind.get(me).copied().unwrap_or(0);
            all.push(member.pool.take(bytes.max(behind)));
        }
        all
    }

    /// Frees the staged memory. The caller gives the landed rows back, or keeps them.
    fn leave(&mut self, ground: Vec<Extent>, placed: &RowPlaces, keep: bool) -> Option<Vec<Extent>> {
        let (mut kept, arrives, reads) = (Vec::new(), self.arrives(), self.reads_late());
        let landings: Vec<RowBuffer> =
            placed.layouts.iter().map(|layout| self.landing(layout.landed)).collect();
        for ((member, extent), landing) in self.members.iter_mut().zip(ground).zip(landings) {
            match keep {
                true => {
                    let len = if arrives { landing.arrivals().1 } else { landing.bytes() };
                    kept.push(member.pool.keep(&extent, extent.start..extent.start + len));
                }
                false if reads => member.offered.push(extent),
                false => member.pool.give(&extent),
            }
        }
        keep.then_some(kept)
    }
}

impl Sender<'_, '_> {
    /// The step by which rows lie where they leave from. They are packed when they have places
    /// where engines relay, so that their order is not known before, and where they might have
    /// gone as they lie. Rows that do were written before the call.
    fn packs_at(&self) -> Work {
        match self.unroller.scenario.tokens {
            _ if !self.call.noted => Work::Pack,
            TokenPlace::InRuns => Work::Bring,
            TokenPlace::Scattered => Work::PackPlaced,
            TokenPlace::Elsewhere if self.unroller.arrives() => Work::PackPlaced,
            TokenPlace::Elsewhere => Work::Pack,
        }
    }

    /// Whether the host finds the order of rows in this call.
    fn orders(&self) -> bool {
        self.unroller.arrives() && self.call.noted
    }

    /// A kernel finds the order of rows, if the host does not.
    fn ordered(&self, by_kernel: bool) -> Option<HostAccess> {
        let Sender { unroller, me, call, .. } = *self;
        let finds = by_kernel && call.noted && !self.orders();
        finds.then(|| unroller.table_written(me, Table::Order, call.layout_of.0))
    }

    /// In its step a kernel packs rows by their order, or their caller has written those that go
    /// as they lie.
    fn packed(&self, work: Work) -> Vec<HostAccess> {
        let Sender { unroller, me, call, .. } = *self;
        if self.packs_at() != work {
            return Vec::new();
        }
        let gathers = unroller.scenario.tokens != TokenPlace::InRuns;
        let order = gathers.then(|| unroller.table_read(me, Table::Order, call.layout_of));
        order.into_iter().chain(unroller.packed(me, &call.placed.layouts[me as usize])).collect()
    }
}

impl Actor for Sender<'_, '_> {
    fn footprint(&self, role: Role, action: Action) -> Vec<HostAccess> {
        let Sender { unroller, me, call, .. } = *self;
        let moves = !call.placed.forwards.is_empty();
        match (role, action) {
            (Role::Own, Action::Compute(Work::Pack)) if moves => {
                let order = self.ordered(!unroller.plans_on_device());
                order.into_iter().chain(self.packed(Work::Pack)).collect()
            }
            (Role::Own, Action::Compute(Work::PackPlaced)) if moves => self.packed(Work::PackPlaced),
            (Role::Own, Action::Compute(Work::Bring)) if moves => {
                let mut touches = self.packed(Work::Bring);
                touches.push(unroller.host_table_written(me, Table::Choices));
                if unroller.plans_on_device() {
                    touches.extend(self.ordered(true));
                    touches.push(unroller.packed_metadata(me, &call.placed.layouts[me as usize]));
                }
                touches
            }
            (Role::Own, Action::Compute(Work::Sort)) if moves && unroller.scenario.enqueues => {
                vec![unroller.host_table_read(me, Table::Choices)]
            }
            (Role::Own, Action::Compute(Work::Publish)) if moves && unroller.scenario.enqueues => {
                let mut written = unroller.counts_written(me);
                if !unroller.plans_on_device() {
                    written.push(unroller.packed_metadata(me, &call.placed.layouts[me as usize]));
                }
                written
            }
            (Role::Own, Action::Compute(Work::Describe)) if call.noted => {
                unroller.headers_written(me, &call.placed.layouts[me as usize])
            }
            (Role::Relay, Action::Compute(Work::Learn)) => {
                unroller.headers_read(me, &call.placed.forwards[me as usize])
            }
            (Role::Own, Action::Compute(Work::FillBringIn)) => {
                self.brought_in.as_ref().map_or(Vec::new(), |(_, touches)| touches.clone())
            }
            (Role::Own, Action::Compute(Work::Regroup)) if unroller.arrives() && call.until == Until::End => {
                unroller.arrivals_regrouped(me, call.placed, &call.ground[me as usize])
            }
            _ => {
                let alike = call.odd.is_none_or(|odd| !unroller.paths(me).same_node(odd));
                unroller.verdict(me, role, action, (unroller.counted(call), alike))
            }
        }
    }

    fn sent(&self, work: Work) -> Vec<SentTable> {
        let Sender { unroller, me, call, .. } = *self;
        let table = match work {
            Work::PackPlaced if self.orders() => Table::Order,
            Work::SendTables => Table::Sums,
            Work::PlaceOwn => Table::OwnRuns,
            _ => return Vec::new(),
        };
        let mut sent = unroller.table_sent(me, table, call.layout_of.0);
        if work == Work::SendTables && !unroller.plans_on_device() {
            // Weights lie where the caller's stream has brought them.
            sent.copied.push(unroller.host_table_read(me, Table::Choices));
        }
        vec![sent]
    }

    fn own_placed(&self) -> Vec<HostAccess> {
        let tables = [Table::Order, Table::OwnRuns];
        tables.map(|table| self.unroller.table_read(self.me, table, self.call.layout_of)).into()
    }

    fn filled(&self, stage: StageId) -> &Rc<FilledOperands> {
        match stage.operands() {
            StageOperands::Own => &self.own,
            StageOperands::BroughtIn => self.brought_in.as_ref().map_or(&self.own, |(filled, _)| filled),
            StageOperands::Messages => &self.messages,
            StageOperands::Relayed => self.relayed.as_ref().unwrap_or(&self.messages),
        }
    }

    fn end(&self) -> Vec<HostAccess> {
        let Sender { unroller, me, call, .. } = *self;
        let (layout, ground) = (&call.placed.layouts[me as usize], &call.ground[me as usize]);
        // Gathered rows are not the caller's: the following step reads them. Calls other than
        // dispatches land no rows.
        if call.until < Until::End || unroller.exchange.is_some() {
            return Vec::new();
        }
        // Where engines relay, the call itself has read what arrived.
        let rows = || unroller.landed_read(me, layout, ground, unroller.call);
        let mut touches = if unroller.arrives() { Vec::new() } else { vec![rows()] };
        // Where it lies with the handle, metadata is read along a known layout, too.
        if call.noted || unroller.scenario.enqueues {
            touches.push(unroller.metadata_read(me, layout, ground, call.layout_of));
        }
        touches
    }
}

impl Unroller<'_> {
    /// Where everything goes, if all ranks dispatch this set of routings.
    fn place(&self, routing: usize) -> Result<RowPlaces, PlanError> {
        let ProofScenario { routings, map, align, chunks, mode, spans, gathers, .. } = *self.scenario;
        let set = routings.get(routing).filter(|set| set.len() == self.members.len()).ok_or(bad(
            "set of routings",
            routing,
            "one that exists, with a routing per rank",
        ))?;
        let (bins, sizing) = (&self.bins, self.sizing);
        let frame = PlanContext { bins, paths: self.paths(0), align, chunks, sizing, mode };
        let top_k = set.iter().map(Routing::top_k).max().unwrap_or(1);
        let mut everyone = GroupRouting::default();
        everyone.sort(&frame, top_k, |me, sorted| {
            let routing = &set[me as usize];
            if gathers {
                sorted.fill_gathered(bins, me, self.gathered(routing), Some(routing));
                return Ok(());
            }
            sorted.fill(map, bins, self.scenario.metadata(), me, routing)
        })?;
        let max_tokens = routings.iter().flatten().map(|routing| routing.tokens()).max().unwrap_or(0);
        let (mut layouts, mut arrivals, mut numbers) = (Vec::new(), Vec::new(), Default::default());
        everyone.each(&frame, (top_k, max_tokens), |frame, known, _| {
            let RankRouting { sorted, crossing, counts, sizes } = known;
            if self.scenario.seeded == Some(SeededBug::ShareStaging) {
                counts.below[bins.count() as usize..].fill(0);
            }
            if spans {
                RelaySorter::default().arrange(frame, (&mut *sorted, &mut *crossing), counts, sizes);
            }
            let top_k = set[frame.paths.me() as usize].top_k();
            let mut layout = DispatchLayout::default();
            let mut own = RelayPermutation::default();
            if self.arrives() {
                own.arrange(frame, sorted, crossing);
                own.pack(frame, sorted, crossing);
            }
            let mut sums = RankSums::default();
            if sizing.rank_sums {
                sums.number(frame, sorted, top_k, (counts, sizes));
            }
            layout.fill(frame, (&*sorted, &*crossing), top_k, counts, sizes);
            if sizing.rank_sums {
                sums.describe(frame, &mut layout);
            }
            if self.arrives() {
                own.add_runs(frame, sorted, &mut layout, (counts, sizes));
            }
            arrivals.push(own.first_run);
            numbers = (counts.clone(), sizes.clone());
            layouts.push(Rc::new(layout));
        });
        let forwards = self.ranks().map(|me| Rc::new(self.forward(me, &layouts))).collect();
        Ok(RowPlaces { layouts, forwards, arrivals, numbers })
    }

    /// Rows that a rank gathers: as many of its tokens as make equal segments.
    fn gathered(&self, routing: &Routing) -> u32 {
        let segments = self.bins.count() / self.bins.ranks();
        routing.tokens() / segments * segments
    }

    /// Which of a source's relays this one is.
    pub(super) fn nth_relay(&self, source: u32, relay: u32) -> usize {
        self.paths(source).relays().take_while(|&other| other != relay).count()
    }

    /// Knowledge of a rank's relay when it has read its headers.
    fn forward(&self, me: u32, layouts: &[Rc<DispatchLayout>]) -> RelayPlan {
        let ProofScenario { align, chunks, mode, spans, gathers, .. } = *self.scenario;
        let (bins, sizing, paths) = (&self.bins, self.sizing, self.paths(me));
        let frame = PlanContext { bins, paths, align, chunks, sizing, mode };
        let mut forward = RelayPlan::default();
        forward.spans = spans || gathers;
        let sums = self.sizing.partial_bytes.is_some();
        if self.arrives() {
            let of = |source| &layouts[source as usize].blocks[self.nth_relay(source, me)];
            forward.blocks = paths.sources().map(|source| of(source).clone()).collect();
            if sums {
                let most = PulledSums::most_chunks(chunks, paths);
                forward.fill_pulled(bins, paths.served_by(me), most, &sizing);
            }
            return forward;
        }
        forward.know(&frame, sums, |source, nth| layouts[source as usize].blocks[nth].clone());
        forward
    }
}

/// The copies of one rank, and the rows that it has then.
struct Own {
    regroup: LocalPermutation,
    landing: RowBuffer,
}

impl Unroller<'_> {
    /// A dispatch by all-gather, as far as `until`: ranks may leave when they have sorted the
    /// choices. Unrolls the gathering dispatch, and returns each rank's next steps.
    pub(super) fn gather(
        &mut self,
        routing: usize,
        keep: bool,
        until: Until,
    ) -> Result<Vec<SampledCall>, PlanError> {
        let all = self.owned(routing)?;
        // A call that is refused has no room for the rows.
        let behind = all.iter().map(|own| if until == Until::End { own.landing.bytes() } else { 0 });
        let behind: Vec<u64> = behind.collect();
        let Dispatched { sampled, placed, ground } = self.dispatched(routing, Until::End, &behind)?;
        self.add(sampled);
        let gathered: Vec<RowBuffer> =
            placed.layouts.iter().map(|layout| self.landing(layout.landed)).collect();
        let regroup = |((me, own), (extent, chunk))| {
            self.regrouped(me, until, &self.regrouping((me, until), own, extent, chunk))
        };
        let sampled = (0..).zip(all).zip(ground.iter().zip(&gathered)).map(regroup).collect();
        for ((member, bytes), (extent, chunk)) in
            self.members.iter_mut().zip(behind).zip(ground.iter().zip(&gathered))
        {
            let start = extent.start + chunk.bytes();
            match keep {
                true => drop(member.pool.keep(extent, start..start + bytes)),
                false => member.pool.give(extent),
            }
        }
        Ok(sampled)
    }

    /// Copies of each rank, as every rank finds them from the choices of all.
    fn owned(&self, routing: usize) -> Result<Vec<Own>, PlanError> {
        let Some(Exchange { scenario, bins, sizing }) = &self.exchange else { return Ok(Vec::new()) };
        let set = scenario.routings.get(routing).ok_or(bad("set of routings", routing, "one that exists"))?;
        let ProofScenario { map, align, chunks, mode, .. } = **scenario;
        let frame = PlanContext { bins, paths: self.paths(0), align, chunks, sizing: *sizing, mode };
        let top_k = set.iter().map(Routing::top_k).max().unwrap_or(1);
        let max_tokens = set.iter().map(Routing::tokens).max().unwrap_or(0);
        let mut everyone = GroupRouting::default();
        everyone.sort(&frame, top_k, |rank, sorted| {
            sorted.fill(map, bins, scenario.metadata(), rank, &set[rank as usize])
        })?;
        let own = |&rows: &u32| Own { regroup: LocalPermutation::default(), landing: sizing.landing(rows) };
        let mut all: Vec<Own> = everyone.sizes().rows.iter().map(own).collect();
        let mut first = 0;
        everyone.each(&frame, (top_k, max_tokens), |frame, known, _| {
            for (me, own) in (0..).zip(&mut all) {
                own.regroup.add(frame, &known, me, first);
            }
            first += set[frame.paths.me() as usize].tokens();
        });
        Ok(all)
    }

    fn regrouping(
        &self,
        (me, until): (u32, Until),
        own: Own,
        extent: &Extent,
        gathered: &RowBuffer,
    ) -> Regrouping {
        let start = extent.start + gathered.bytes();
        let Own { regroup: LocalPermutation { runs, rows, .. }, landing } = own;
        let row_bytes = self.scenario.row_bytes;
        let (mut tables, _) = self.tables(me);
        tables.table = vec![Operand::regroup(me, runs.len() as u32, row_bytes, (extent.start, start))];
        let mut layout = DispatchLayout::default();
        (layout.runs, layout.rows) = (runs, rows);
        let layout = Rc::new(layout);
        let dispatch = self.call - 1;
        let read = |what, bytes| self.read(what, bytes);
        let [_, choices] = chunk(me, *gathered, extent);
        let metadata = Bytes::new(me, WindowId::POOL, start + landing.metadata_at(), landing.metadata * 4);
        let rows = Bytes::new(me, WindowId::POOL, start, u64::from(landing.rows) * row_bytes);
        Regrouping {
            filled: self.filled_from(Some(dispatch), me, Tables::Caller { tables, layout, row_bytes }),
            choices: HostAccess { of: dispatch, ..read("choices of all", choices) },
            metadata: [self.write("metadata", metadata.clone()), read("landed metadata", metadata)],
            rows: (until == Until::End).then(|| read("landed rows", rows)),
        }
    }
}

/// One rank behind a dispatch by all-gather.
struct Regrouping {
    filled: Rc<FilledOperands>,
    choices: HostAccess,
    metadata: [HostAccess; 2],
    /// Reads of the caller, unless the call is refused.
    rows: Option<HostAccess>,
}

impl Actor for Regrouping {
    fn footprint(&self, _: Role, action: Action) -> Vec<HostAccess> {
        match action {
            Action::Compute(Work::SortAll) => vec![self.choices.clone()],
            Action::Compute(Work::Metadata) => self.metadata.to_vec(),
            _ => Vec::new(),
        }
    }

    fn filled(&self, _: StageId) -> &Rc<FilledOperands> {
        &self.filled
    }

    fn end(&self) -> Vec<HostAccess> {
        self.rows.iter().cloned().collect()
    }
}
