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
    Bins, Chunk, Everyone, ExpertMap, Frame, Layout, Mode, Order, Regroup, RowLayout, Sizing,
};
use sidelane_core::schedule::call::{Action, Role, StageId, Work};
use sidelane_core::schedule::{Operand, WindowId};

use super::Bytes;
use super::calls::Dispatched;
use super::filled::{Filled, Tables};
use super::sample::Told;
use super::tell::{Extent, Teller, Until, bad, sizing};
use super::touch::chunk;
use super::walk::Actor;
use super::{Script, Touch};

/// What the instance that gathers for another is to do.
pub(super) fn gathering<'s>(script: &Script<'s>, map: &'s ExpertMap) -> Script<'s> {
    Script {
        gathers: true,
        map,
        align: 1,
        order: Order::default(),
        layout: RowLayout::default(),
        mode: Mode::Eager,
        spans: false,
        ..script.clone()
    }
}

/// The instance that another gathers for.
pub(super) struct Exchange<'a> {
    script: &'a Script<'a>,
    bins: Bins,
    sizing: Sizing,
}

/// The copies of one rank, and what it has then.
struct Own {
    regroup: Regroup,
    landing: Chunk,
}

impl<'a> Exchange<'a> {
    pub fn new(script: &'a Script<'a>) -> Self {
        let bins = Bins::of_layout(script.layout, script.map, script.order, script.nodes);
        Exchange { script, bins, sizing: sizing(script) }
    }
}

impl Teller<'_> {
    /// A dispatch by all-gather, as far as `until`: ranks may leave when they have sorted the
    /// choices. Tells the gathering dispatch, and returns what each rank does behind it.
    pub(super) fn gather(
        &mut self,
        routing: usize,
        keep: bool,
        until: Until,
    ) -> Result<Vec<Told>, PlanError> {
        let all = self.owned(routing)?;
        // A call that is refused has no room for the rows.
        let behind = all.iter().map(|own| if until == Until::End { own.landing.bytes() } else { 0 });
        let behind: Vec<u64> = behind.collect();
        let Dispatched { told, placed, ground } = self.dispatched(routing, Until::End, &behind)?;
        self.add(told);
        let gathered: Vec<Chunk> = placed.layouts.iter().map(|layout| self.landing(layout.landed)).collect();
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
        let Script { map, align, chunks, mode, .. } = **script;
        let frame = Frame { bins, paths: self.paths(0), align, chunks, sizing: *sizing, mode };
        let top_k = set.iter().map(Routing::top_k).max().unwrap_or(1);
        let max_tokens = set.iter().map(Routing::tokens).max().unwrap_or(0);
        let mut everyone = Everyone::default();
        everyone.sort(&frame, top_k, |rank, sorted| {
            sorted.fill(map, bins, script.notes(), rank, &set[rank as usize])
        })?;
        let own = |&rows: &u32| Own { regroup: Regroup::default(), landing: sizing.landing(rows) };
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
        gathered: &Chunk,
    ) -> Regrouping {
        let start = extent.start + gathered.bytes();
        let Own { regroup: Regroup { runs, rows, .. }, landing } = own;
        let row_bytes = self.script.row_bytes;
        let (mut tables, _) = self.tables(me);
        tables.table = vec![Operand::regroup(me, runs.len() as u32, row_bytes, (extent.start, start))];
        let mut layout = Layout::default();
        (layout.runs, layout.rows) = (runs, rows);
        let layout = Rc::new(layout);
        let dispatch = self.call - 1;
        let read = |what, bytes| self.read(what, bytes);
        let [_, choices] = chunk(me, *gathered, extent);
        let notes = Bytes::new(me, WindowId::POOL, start + landing.notes_at(), landing.notes * 4);
        let rows = Bytes::new(me, WindowId::POOL, start, u64::from(landing.rows) * row_bytes);
        Regrouping {
            filled: self.filled_from(Some(dispatch), me, Tables::Caller { tables, layout, row_bytes }),
            choices: Touch { of: dispatch, ..read("choices of all", choices) },
            notes: [self.write("notes", notes.clone()), read("landed notes", notes)],
            rows: (until == Until::End).then(|| read("landed rows", rows)),
        }
    }
}

/// One rank behind a dispatch by all-gather.
struct Regrouping {
    filled: Rc<Filled>,
    choices: Touch,
    notes: [Touch; 2],
    /// What the caller reads, unless the call is refused.
    rows: Option<Touch>,
}

impl Actor for Regrouping {
    fn footprint(&self, _: Role, action: Action) -> Vec<Touch> {
        match action {
            Action::Compute(Work::SortAll) => vec![self.choices.clone()],
            Action::Compute(Work::Metadata) => self.notes.to_vec(),
            _ => Vec::new(),
        }
    }

    fn filled(&self, _: StageId) -> &Rc<Filled> {
        &self.filled
    }

    fn end(&self) -> Vec<Touch> {
        self.rows.iter().cloned().collect()
    }
}
