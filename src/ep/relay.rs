//! What a rank does for others: in the thread of its caller, of its planner, or in one of its own (`proxy`).
//!
//! Whoever plays a relay brings what steps its program ([`Run`]): the host stepper, or a planner's engine.

use std::sync::Arc;

use super::fixed::Fixed;
use super::meeting::Numbers;
use crate::error::{CallKind, Cause, Error};
use crate::exec::Moved;
use crate::plan::{Arrivals, Chunk, Forward};
use crate::rows::Stores;
use crate::schedule::{
    Calls, Flag, Item, Operands, Parts, Refusal, RelaySkeleton, RelayTables, Stage, Sum, WindowId,
};
use crate::topology::Route;

/// What a relay is to do in one call.
#[derive(Debug)]
pub(super) struct Errand {
    pub calls: Calls,
    pub kind: CallKind,
    /// Return: what comes home.
    pub parts: Parts,
    /// Return: rows are multiplied with their weights where they are summed.
    pub weighted: bool,
    /// Return: where sums wait until they have been sent.
    pub outbox: u64,
    /// What is known of the blocks; a dispatch with counts learns it.
    pub forward: Arc<Forward>,
    pub stores: Stores,
    /// What was moved.
    pub moved: Moved,
    /// Nothing is to be moved: some rank refuses.
    pub refused: bool,
}

impl Errand {
    pub fn new(calls: Calls, kind: CallKind, forward: Arc<Forward>) -> Self {
        Errand {
            calls,
            kind,
            parts: Parts::default(),
            weighted: false,
            outbox: 0,
            forward,
            stores: Stores::Cached,
            moved: Moved::default(),
            refused: false,
        }
    }
}

/// Runs operations of a stage, in order, to the end.
pub(super) type Run<'a> = dyn FnMut(&[Item], &Operands<'_>) -> Result<(), Error> + 'a;

/// The relay of one `ExpertParallel`, or of one planner.
#[derive(Debug)]
pub(super) struct Relay {
    fixed: Arc<Fixed>,
    skeleton: RelaySkeleton,
    tables: RelayTables,
    numbers: Numbers,
    arrivals: Arrivals,
    /// Whose pool holds the chunk of each rank: its own.
    everybody: Vec<u32>,
    /// The chunks of this node's ranks in a return.
    chunks: Vec<Chunk>,
}

impl Relay {
    pub fn new(fixed: Arc<Fixed>) -> Self {
        let paths = fixed.paths();
        Relay {
            skeleton: crate::schedule::Relay::new(paths, fixed.chunks)
                .summing(fixed.partial_bytes().is_some())
                .skeleton(),
            tables: RelayTables::new(paths, fixed.chunks),
            numbers: Numbers::new(&fixed),
            arrivals: Arrivals::default(),
            everybody: (0..paths.ranks()).collect(),
            chunks: vec![Chunk::default(); paths.ranks() as usize],
            fixed,
        }
    }

    /// The first part: this node is told to others, all nodes are heard.
    ///
    /// # Errors
    /// Those that end the world. A refusal is none: the errand is then as good as done.
    pub fn meet(&mut self, errand: &mut Errand, run: &mut Run<'_>) -> Result<(), Error> {
        let fixed = Arc::clone(&self.fixed);
        let meeting = fixed.meeting(errand.calls, errand.kind);
        let placed = errand.kind.places();
        let counted = placed && fixed.spec.mode.slots().is_none();
        self.run(errand, run, |s| &s.met)?;
        let own = meeting.tag_of(fixed.lanes.rank)?;
        for source in fixed.paths().told() {
            meeting.compose(source, counted.then_some(&mut self.numbers))?;
        }
        self.tables.messages(&meeting.setting, counted);
        self.run(errand, run, |s| &s.told)?;
        self.run(errand, run, |s| &s.heard)?;
        errand.refused = own.refusal != Refusal::None || meeting.agree(own).is_err();
        for rank in fixed.lanes.nodes.members(fixed.lanes.nodes.node_of(fixed.lanes.rank)) {
            self.tables.bases[*rank as usize] = meeting.tag_of(*rank)?.base;
        }
        if placed && !errand.refused {
            errand.refused = meeting.judge(own, &mut self.numbers).is_err();
        }
        self.run(errand, run, |s| &s.agreed)
    }

    /// The second part: what crosses is handed on, or brought home.
    ///
    /// # Errors
    /// Those that end the world; [`Cause::Protocol`] if a header makes no sense.
    pub fn carry(&mut self, errand: &mut Errand, run: &mut Run<'_>) -> Result<(), Error> {
        if errand.refused {
            return Ok(());
        }
        let fixed = Arc::clone(&self.fixed);
        let setting = fixed.meeting(errand.calls, errand.kind).setting;
        self.run(errand, run, |s| &s.headers)?;
        match errand.kind {
            CallKind::Dispatch | CallKind::Prepare | CallKind::CachedDispatch | CallKind::CombineBackward => {
                let noted = errand.kind.places();
                if noted {
                    self.learn(errand)?;
                }
                match fixed.arrives() {
                    true => self.hand_on(errand),
                    false => self.tables.forward(&setting, &errand.forward, noted),
                }
                self.run(errand, run, |s| &s.forward)?;
            }
            CallKind::ExpertMap
            | CallKind::AllReduce
            | CallKind::Broadcast
            | CallKind::AllToAll
            | CallKind::AllGather
            | CallKind::Send
            | CallKind::Receive
            | CallKind::Unknown => {}
            CallKind::Combine | CallKind::DispatchBackward | CallKind::WeightsHome => {
                for source in fixed.paths().sources() {
                    let tag = fixed.port.flag(source, Flag::Block)?.tag(errand.calls.value());
                    self.tables.offers[source as usize] = tag.base;
                }
                if let Some(block) = errand.forward.blocks.first() {
                    let served = fixed.paths().served_by(fixed.lanes.rank);
                    for (&rank, &landed) in served.iter().zip(&block.landed) {
                        self.chunks[rank as usize] = setting.sizing.offer(landed);
                    }
                }
                self.tables.home(&setting, &errand.forward, &fixed.bins, errand.parts, errand.outbox);
                self.run(errand, run, |s| &s.home)?;
            }
        }
        self.run(errand, run, |s| &s.done)
    }

    /// Reads the headers of all sources.
    fn learn(&mut self, errand: &mut Errand) -> Result<(), Error> {
        let fixed = &self.fixed;
        let (paths, me) = (fixed.paths(), fixed.lanes.rank);
        let setting = fixed.meeting(errand.calls, errand.kind).setting;
        let (control, served) = (setting.control, paths.served_by(me));
        let bins = served.iter().map(|&rank| fixed.bins.of(rank).len()).sum();
        if Arc::get_mut(&mut errand.forward).is_none() {
            errand.forward = Arc::default();
        }
        let Some(forward) = Arc::get_mut(&mut errand.forward) else { return Ok(()) };
        forward.weights.clear();
        forward.spans = fixed.spec.spans || fixed.spec.gathers;
        forward.blocks.resize_with(paths.sources().count(), Default::default);
        for (source, block) in paths.sources().zip(&mut forward.blocks) {
            let at = control.header_in(paths.of(source).place_at(me), setting.parity);
            let mut head = [0u32; 3];
            fixed.port.read(me, WindowId::CONTROL, at, &mut head)?;
            let [rows, entries, first] = head;
            (block.rows, block.first) = (rows, first);
            block.landed.resize(served.len(), 0);
            block.segments.resize(bins, Default::default());
            fixed.port.read(
                me,
                WindowId::CONTROL,
                at + crate::schedule::Control::LANDED,
                &mut block.landed,
            )?;
            fixed.port.read(me, WindowId::CONTROL, at + control.segments(), &mut block.segments)?;
            let bound = u64::from(entries) <= control.max_entries() && rows <= entries;
            block.index.resize(if bound { entries as usize } else { 0 }, 0);
            match setting.paths.route() {
                Route::Pxn => {
                    fixed.port.read(me, WindowId::CONTROL, at + control.index(), &mut block.index)?
                }
                Route::Direct => (0..).zip(&mut block.index).for_each(|(row, entry)| *entry = row),
            }
            if !bound || !block.is_sound(entries, !fixed.arrives()) {
                return Err(Cause::Protocol { rank: fixed.lanes.world_ranks[source as usize] }.into());
            }
            if fixed.spec.weighted && setting.sizing.partial_bytes.is_some() {
                // The weight comes first in every note.
                let (words, notes) = (setting.sizing.words_out as usize, &mut self.numbers.scratch);
                notes.resize(entries as usize * words, 0);
                fixed.port.read(me, WindowId::CONTROL, at + control.notes(entries), notes)?;
                forward.weights.extend(notes.iter().step_by(words).map(|&word| f32::from_bits(word)));
            }
        }
        if !fixed.arrives() {
            forward.fill(&fixed.bins, served, fixed.chunks, setting.sizing.partial_bytes.is_some());
        }
        Ok(())
    }

    /// Finds the runs in which engines hand on, and fills in the operands.
    fn hand_on(&mut self, errand: &mut Errand) {
        let fixed = Arc::clone(&self.fixed);
        let setting = fixed.meeting(errand.calls, errand.kind).setting;
        let Numbers { counts, sizes, .. } = &self.numbers;
        if let Some(forward) = Arc::get_mut(&mut errand.forward) {
            let rows = (forward, &mut self.arrivals);
            self.tables.hand_on(&setting, &fixed.frame(), rows, (counts, sizes), |rows| fixed.landing(rows));
        }
    }

    fn run(
        &self,
        errand: &Errand,
        run: &mut Run<'_>,
        stage: impl Fn(&RelaySkeleton) -> &Stage,
    ) -> Result<(), Error> {
        let (tables, partials) = (&self.tables, &errand.forward.partials);
        let sum = Sum {
            terms: &partials.terms,
            starts: &partials.starts,
            choices: &partials.entries,
            wire: self.fixed.spec.wire,
            held_by: &self.everybody,
            bases: &tables.bases,
            chunks: &self.chunks,
            weights: if errand.weighted { &errand.forward.weights } else { &[] },
            ..Sum::default()
        };
        let operands = Operands {
            table: &tables.table,
            spans: &tables.spans,
            runs: &errand.forward.runs,
            rows: &errand.forward.rows,
            row_bytes: self.fixed.spec.row_bytes(),
            sum,
            tags: &[],
            call: errand.calls.value(),
            last_return: errand.calls.last_return(),
        };
        run(&stage(&self.skeleton).items, &operands)
    }
}
