//! Dispatches by all-gather: behind each one of the instance that gathers, every rank copies its
//! own rows to their places.
//!
//! ```text
//!   extent      | gathered rows | their notes | rows of my experts | their notes |
//!                                             | blocks that are taken to be handed on |
//!
//!   call n      dispatch of the instance that gathers
//!   call n + 1  | read notes | regroup: gathered -> rows of my experts | write notes | read
//! ```
//!
//! The copies are a call of the story of their own: they write where relays of the dispatch have
//! read.

use std::rc::Rc;

use sidelane_core::error::PlanError;
use sidelane_core::gate::Routing;
use sidelane_core::plan::{
    DispatchLayout, ExpertMap, GroupRouting, LocalPermutation, PlanContext, ReceiveMode, RowBuffer,
    RowLayout, SumOrder,
};
use sidelane_core::schedule::call::{Action, Role, StageId, Work};
use sidelane_core::schedule::{Operand, WindowId};

use super::Bytes;
use super::calls::Dispatched;
use super::filled::{FilledOperands, Tables};
use super::state::{Exchange, Extent, SampledCall, Unroller, Until, bad};
use super::touch::chunk;
use super::walk::Actor;
use super::{HostAccess, ProofScenario};

/// Work of the instance that gathers for another.
pub(super) fn gathering<'s>(script: &ProofScenario<'s>, map: &'s ExpertMap) -> ProofScenario<'s> {
    ProofScenario {
        gathers: true,
        map,
        align: 1,
        order: SumOrder::default(),
        layout: RowLayout::default(),
        mode: ReceiveMode::Exact,
        spans: false,
        ..script.clone()
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
        let Dispatched { told, placed, ground } = self.dispatched(routing, Until::End, &behind)?;
        self.add(told);
        let gathered: Vec<RowBuffer> =
            placed.layouts.iter().map(|layout| self.landing(layout.landed)).collect();
        let regroup = |((me, own), (extent, chunk))| {
            self.regrouped(me, until, &self.regrouping((me, until), own, extent, chunk))
        };
        let told = (0..).zip(all).zip(ground.iter().zip(&gathered)).map(regroup).collect();
        for ((member, bytes), (extent, chunk)) in
            self.members.iter_mut().zip(behind).zip(ground.iter().zip(&gathered))
        {
            let start = extent.start + chunk.bytes();
            match keep {
                true => drop(member.pool.keep(extent, start..start + bytes)),
                false => member.pool.give(extent),
            }
        }
        Ok(told)
    }

    /// What each rank copies, as every rank finds it from the choices of all.
    fn owned(&self, routing: usize) -> Result<Vec<Own>, PlanError> {
        let Some(Exchange { script, bins, sizing }) = &self.exchange else { return Ok(Vec::new()) };
        let set = script.routings.get(routing).ok_or(bad("set of routings", routing, "one that exists"))?;
        let ProofScenario { map, align, chunks, mode, .. } = **script;
        let frame = PlanContext { bins, paths: self.paths(0), align, chunks, sizing: *sizing, mode };
        let top_k = set.iter().map(Routing::top_k).max().unwrap_or(1);
        let max_tokens = set.iter().map(Routing::tokens).max().unwrap_or(0);
        let mut everyone = GroupRouting::default();
        everyone.sort(&frame, top_k, |rank, sorted| {
            sorted.fill(map, bins, script.notes(), rank, &set[rank as usize])
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
        let row_bytes = self.script.row_bytes;
        let (mut tables, _) = self.tables(me);
        tables.table = vec![Operand::regroup(me, runs.len() as u32, row_bytes, (extent.start, start))];
        let mut layout = DispatchLayout::default();
        (layout.runs, layout.rows) = (runs, rows);
        let layout = Rc::new(layout);
        let dispatch = self.call - 1;
        let read = |what, bytes| self.read(what, bytes);
        let [_, choices] = chunk(me, *gathered, extent);
        let notes = Bytes::new(me, WindowId::POOL, start + landing.notes_at(), landing.notes * 4);
        let rows = Bytes::new(me, WindowId::POOL, start, u64::from(landing.rows) * row_bytes);
        Regrouping {
            filled: self.filled_from(Some(dispatch), me, Tables::Caller { tables, layout, row_bytes }),
            choices: HostAccess { of: dispatch, ..read("choices of all", choices) },
            notes: [self.write("notes", notes.clone()), read("landed notes", notes)],
            rows: (until == Until::End).then(|| read("landed rows", rows)),
        }
    }
}

/// One rank behind a dispatch by all-gather.
struct Regrouping {
    filled: Rc<FilledOperands>,
    choices: HostAccess,
    notes: [HostAccess; 2],
    /// Reads of the caller, unless the call is refused.
    rows: Option<HostAccess>,
}

impl Actor for Regrouping {
    fn footprint(&self, _: Role, action: Action) -> Vec<HostAccess> {
        match action {
            Action::Compute(Work::SortAll) => vec![self.choices.clone()],
            Action::Compute(Work::Metadata) => self.notes.to_vec(),
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
