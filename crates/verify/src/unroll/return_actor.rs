//! The returns of a scenario: what each rank's planners and caller do in them.

use std::rc::Rc;

use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::schedule::call_program::{Action, Role, StageId, StageOperands, Work};
use sidelane_core::schedule::{
    CallerTables, FillContext, Flag, RelayTables, ReturnParts, SumMemory, Tag, WindowId,
};

use super::call_sequence::{
    Extent, FilledOperands, Handle, SampledCall, TABLE, Table, Tables, Unroller, Until,
};
use super::stage_runs::{Actor, SentTable};
use super::{Bytes, HostAccess, SeededBug};

/// Contribution of a rank to a return.
struct Offer {
    chunk: Extent,
    /// Where a kernel leaves sums by rank, if these return.
    sums: Option<Extent>,
    /// Where what returns begins.
    base: u64,
    /// For rows that relays return and, behind them, for sums that are to be sent; or for rows that
    /// engines bring.
    staging: Extent,
    /// Where a relay's kernels sum, if they do; their tables lie at its end.
    node_sums: Option<Extent>,
    /// Where sums are made and wait.
    memory: SumMemory,
    tags: Vec<Tag>,
    /// Where what each relay brings has its place.
    bases: Vec<u64>,
}

/// A return, as all ranks have entered it.
struct Returning<'s> {
    handle: &'s Handle,
    number: usize,
    parts: ReturnParts,
    copied: bool,
    until: Until,
    offers: &'s [Offer],
}

impl Unroller<'_> {
    pub(super) fn ret(
        &mut self,
        handle: usize,
        parts: ReturnParts,
        copied: bool,
        until: Until,
    ) -> Result<Vec<SampledCall>, PlanError> {
        // A stream copies rows that lie elsewhere before it says that it is ready.
        let copied = copied && !self.scenario.enqueues;
        let found = self.handle(handle)?;
        let known = found.clone();
        found.kept = None;
        let offers: Vec<Offer> =
            self.ranks().map(|me| self.offer(me, handle, &known, (parts, copied))).collect();
        let call = Returning { handle: &known, number: handle, parts, copied, until, offers: &offers };
        let bring = |me| self.sampled_call(me, (CallKind::Combine, until), &self.returner(me, &call));
        let sampled = self.ranks().map(bring).collect();
        let reads = self.reads_late();
        for (member, offer) in self.members.iter_mut().zip(offers) {
            if !self.scenario.enqueues {
                member.pool.give(&offer.staging);
            }
            // No rank reads the memory that a refused call offered.
            let free = until < Until::End && !reads || self.scenario.seeded == Some(SeededBug::FreeBeforeAck);
            for extent in [Some(offer.chunk), offer.sums, offer.node_sums].into_iter().flatten() {
                if free { member.pool.give(&extent) } else { member.offered.push(extent) }
            }
            if until == Until::End {
                member.calls.returned();
            }
        }
        Ok(sampled)
    }

    /// Takes the memory of a return, around the release.
    fn offer(
        &mut self,
        me: u32,
        number: usize,
        handle: &Handle,
        (parts, copied): (ReturnParts, bool),
    ) -> Offer {
        let (paths, reads) = (self.paths(me), self.reads_late());
        if self.reclaims(me) {
            self.members[me as usize].free_offered();
        }
        let layout = &handle.placed.layouts[me as usize];
        let offered = self.sizing.offer(layout.landed);
        let size = offered.bytes();
        let returned = CallerTables::return_bytes(&paths, layout);
        let at = self.return_setting(me, parts);
        let wait = RelayTables::outbox_bytes(&at, &handle.placed.forwards[me as usize]);
        let partial_bytes = at.sizing.partial_bytes;
        let pulled = RelayTables::pulled_bytes(&at, &handle.placed.forwards[me as usize]);
        let summed = (at.sizing.rank_sums && parts.rows)
            .then(|| u64::from(layout.received()) * at.sizing.return_bytes);
        let member = &mut self.members[me as usize];
        if let Some(kept) = &handle.kept {
            match reads {
                true => member.offered.push(kept[me as usize].clone()),
                false => member.pool.give(&kept[me as usize]),
            }
        }
        let early = (!copied).then(|| member.pool.take(size));
        let sums = summed.map(|bytes| member.pool.take(bytes));
        let by_node = self.scenario.pulls && partial_bytes.is_some();
        let node_sums = by_node.then(|| member.pool.take(pulled + wait + TABLE));
        // A host that runs ahead frees nothing here.
        if paths.is_multi_node() || !self.scenario.enqueues {
            member.free_offered();
        }
        let chunk = early.unwrap_or_else(|| member.pool.take(size));
        let brought =
            if self.scenario.pulls { layout.terms.len() as u64 * self.sizing.return_bytes } else { 0 };
        let staging = match self.scenario.enqueues {
            // All calls return rows to one place.
            true => member.staging.clone(),
            false => member.pool.take(returned + wait + brought),
        };
        let (at, (mut tables, _)) = (self.return_setting(me, parts), self.tables(me));
        match self.scenario.pulls {
            true => tables.stage_rows(&at, layout, staging.start),
            false => tables.stage(&paths, layout, staging.start),
        }
        if self.scenario.seeded == Some(SeededBug::ShareReturned) {
            paths.relays().for_each(|relay| tables.bases[relay as usize] = staging.start);
        }
        let shared = self.scenario.seeded == Some(SeededBug::ShareOutbox);
        let in_staging = staging.start + if shared { 0 } else { returned };
        let over_rows = self.scenario.seeded == Some(SeededBug::SumOverRows);
        let memory = match &node_sums {
            Some(sums) if !shared => {
                let outbox = sums.start + if over_rows { 0 } else { pulled };
                SumMemory { outbox, pulled: Some(sums.start) }
            }
            sums => SumMemory { outbox: in_staging, pulled: sums.as_ref().map(|sums| sums.start) },
        };
        // Engines return weights as rows.
        let behind = if self.scenario.pulls && !parts.rows { offered.metadata_at() } else { 0 };
        let base = sums.as_ref().map_or(chunk.start + behind, |sums| sums.start);
        tables.offer(&paths, self.tag(CallKind::Combine, number as u64, 0), base);
        Offer { chunk, sums, base, staging, node_sums, memory, tags: tables.tags, bases: tables.bases }
    }

    /// Whether memory for the outputs of a return may be that of the return before. On one node
    /// streams alone know who has read that, and a later call has it.
    fn reclaims(&self, me: u32) -> bool {
        self.scenario.enqueues && self.scenario.read_early && self.paths(me).is_multi_node()
    }

    /// Constants of all operands of a return.
    fn return_setting(&self, me: u32, parts: ReturnParts) -> FillContext<'_> {
        let setting = self.setting(me, 0);
        match self.scenario.pulls && !parts.rows {
            true => FillContext { sizing: setting.sizing.of_weights(), ..setting },
            false => setting,
        }
    }

    fn returner<'s>(&'s self, me: u32, call: &'s Returning<'s>) -> Returner<'s, 's> {
        let (paths, layout) = (self.paths(me), &call.handle.placed.layouts[me as usize]);
        let Offer { staging, tags, bases, memory, .. } = &call.offers[me as usize];
        let (mut tables, _) = self.tables(me);
        tables.tags.clone_from(tags);
        tables.bases.clone_from(bases);
        for near in paths.local_peers().chain([me]) {
            tables.bases[near as usize] = call.offers[near as usize].base;
        }
        let setting = self.return_setting(me, call.parts);
        if self.scenario.pulls {
            tables.pull(&setting, layout, staging.start);
        } else {
            tables.sum(&setting, layout, call.parts);
        }
        let row_bytes = self.scenario.row_bytes;
        let own = self.filled(me, Tables::Caller { tables, layout: Rc::clone(layout), row_bytes });
        let returned = paths.is_multi_node().then(|| {
            let forward = &call.handle.placed.forwards[me as usize];
            let (_, mut tables) = self.tables(me);
            tables.bases = call.offers.iter().map(|offer| offer.base).collect();
            tables.offers = call.offers.iter().map(|offer| offer.tags[me as usize].base).collect();
            let parts =
                if self.scenario.pulls { ReturnParts { rows: true, weights: false } } else { call.parts };
            tables.return_rows(&setting, forward, &self.bins, parts, *memory);
            self.filled(me, self.relayed(me, tables, forward))
        });
        Returner { unroller: self, me, call, own, messages: self.messages(me, false), returned }
    }
}

/// One rank in a return.
struct Returner<'s, 'a> {
    unroller: &'s Unroller<'a>,
    me: u32,
    call: &'s Returning<'s>,
    own: Rc<FilledOperands>,
    /// The relay's messages, and the rows that it returns.
    messages: Rc<FilledOperands>,
    returned: Option<Rc<FilledOperands>>,
}

impl Returner<'_, '_> {
    fn chunk_written(&self) -> Vec<HostAccess> {
        let Returner { unroller, me, call, .. } = *self;
        let layout = &call.handle.placed.layouts[me as usize];
        unroller.chunk_written(me, layout, &call.offers[me as usize].chunk, call.parts)
    }

    /// A kernel makes the sums that return.
    fn summed(&self) -> Vec<HostAccess> {
        let Returner { unroller, me, call, .. } = *self;
        let Offer { chunk, sums, .. } = &call.offers[me as usize];
        let layout = &call.handle.placed.layouts[me as usize];
        sums.as_ref().map_or(Vec::new(), |sums| {
            // It reads how many rows each expert has.
            let counts = unroller.table_read(me, Table::Sums, (call.number, call.handle.call));
            let summed = unroller.summed_by_rank(me, layout, chunk, sums);
            std::iter::once(counts).chain(summed).collect()
        })
    }

    fn sums_late(&self) -> bool {
        self.unroller.scenario.seeded == Some(SeededBug::SumLate)
    }

    /// A kernel adds up what returned.
    fn added(&self) -> Vec<HostAccess> {
        let Returner { unroller, me, call, .. } = *self;
        if call.until < Until::End {
            return Vec::new();
        }
        let row_bytes = unroller.return_setting(me, call.parts).sizing.return_bytes;
        let offer = &call.offers[me as usize];
        let layout = &call.handle.placed.layouts[me as usize];
        let places = (offer.staging.start, offer.base);
        let mut touches = if self.sums_late() { self.summed() } else { Vec::new() };
        if unroller.scenario.enqueues {
            touches.push(unroller.table_read(me, Table::Sums, (call.number, call.handle.call)));
        }
        touches.extend(match offer.sums {
            Some(_) => unroller.rank_sums_added(me, layout, places, row_bytes),
            None if unroller.return_setting(me, call.parts).sizing.partial_bytes.is_some() => {
                unroller.node_sums_added(me, layout, places, row_bytes)
            }
            None => unroller.summed(me, layout, (places, layout.terms.len() as u32), row_bytes),
        });
        touches
    }
}

impl Actor for Returner<'_, '_> {
    fn begin(&self) -> Vec<HostAccess> {
        let Returner { unroller, me, call, .. } = *self;
        let layout = &call.handle.placed.layouts[me as usize];
        let kept = call.handle.kept.as_ref();
        let mut touches = kept.map_or(Vec::new(), |kept| {
            let (kept, of) = (&kept[me as usize], call.handle.call);
            let metadata = unroller.metadata_read(me, layout, kept, (call.number, of));
            vec![unroller.landed_read(me, layout, kept, of), metadata]
        });
        // Experts write their outputs before the call; what lies elsewhere is copied amid it.
        touches.extend(if call.copied { Vec::new() } else { self.chunk_written() });
        touches
    }

    fn footprint(&self, role: Role, action: Action) -> Vec<HostAccess> {
        let Returner { unroller, me, call, .. } = *self;
        match (role, action) {
            (Role::Own, Action::Compute(Work::Offer)) if call.copied => self.chunk_written(),
            (Role::Own, Action::Compute(Work::Partials)) if !self.sums_late() => self.summed(),
            (Role::Own, Action::Compute(Work::Sum)) => self.added(),
            (Role::Relay, Action::Compute(Work::FillReturn)) => {
                unroller.tags_read(me, Flag::Block, unroller.paths(me).sources())
            }
            _ => unroller.verdict(me, role, action, (false, true)),
        }
    }

    fn sent(&self, work: Work) -> Vec<SentTable> {
        let Returner { unroller, me, call, .. } = *self;
        let node_sums = call.offers[me as usize].node_sums.as_ref().filter(|_| work == Work::SendNodeSums);
        let to = |sums: &Extent| Bytes::new(me, WindowId::POOL, sums.end - TABLE, TABLE);
        node_sums.map(|sums| unroller.table_sent_to(me, Table::NodeSums, to(sums))).into_iter().collect()
    }

    fn filled(&self, stage: StageId) -> &Rc<FilledOperands> {
        match stage.operands() {
            StageOperands::Messages => &self.messages,
            StageOperands::Relayed => self.returned.as_ref().unwrap_or(&self.messages),
            StageOperands::Own | StageOperands::BroughtIn => &self.own,
        }
    }

    fn finds_raised(&self, work: Work) -> Option<StageId> {
        let asks = self.unroller.scenario.seeded != Some(SeededBug::FreeBeforeAck);
        let finds = asks && self.unroller.reclaims(self.me);
        (finds && work == Work::Reclaim).then_some(StageId::Release)
    }
}
