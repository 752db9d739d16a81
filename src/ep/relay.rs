//! A rank's work for others: in the thread of its caller, or in one of its own
//! (`ep::host::relay_thread`).
//!
//! A relay performs the steps of its program ([`RelayCall`]). Its driver supplies the executor of
//! its operations ([`Run`]): the host stepper, or the enqueuer's engine.

use std::ops::Deref;
use std::sync::Arc;

use super::call_agreement::GroupCounts;
use super::state::EpState;
use crate::error::{CallError, CallKind, Cause, Error, PlanError};
use crate::exec::{StepExecutor, TransferCounts};
use crate::plan::{Counts, PulledSums, ReceiveSizes, RelayPermutation, RelayPlan, RowBuffer};
use crate::rows::Stores;
use crate::schedule::call_program::{Part, RankPrograms, Role, StageId, Work};
use crate::schedule::{
    Calls, Flag, Operands, Refusal, RelayTables, ReturnParts, SumMemory, SumOperands, TrackOp, WindowId,
};
use crate::topology::Route;

/// Work of a relay in one call.
#[derive(Debug)]
pub(in crate::ep) struct RelayTask {
    pub calls: Calls,
    pub kind: CallKind,
    /// Return: the rows that go back.
    pub parts: ReturnParts,
    /// Return: rows are multiplied with their weights where they are summed.
    pub weighted: bool,
    /// Return: where rows are summed until they have been sent.
    pub memory: SumMemory,
    pub stores: Stores,
    /// Counts of moved bytes.
    pub moved: TransferCounts,
}

impl RelayTask {
    pub fn new(calls: Calls, kind: CallKind) -> Self {
        RelayTask {
            calls,
            kind,
            parts: ReturnParts::default(),
            weighted: false,
            memory: SumMemory::default(),
            stores: Stores::Cached,
            moved: TransferCounts::default(),
        }
    }
}

/// The blocks that a relay copies in a call.
#[derive(Debug)]
pub(in crate::ep) enum CallPlan<'p> {
    /// A dispatch with counts reads them from headers; engines find the runs of every call anew.
    Own(&'p mut RelayPlan),
    /// Those of the handle that the call follows.
    Known(&'p RelayPlan),
}

impl Deref for CallPlan<'_> {
    type Target = RelayPlan;

    fn deref(&self) -> &RelayPlan {
        match self {
            CallPlan::Own(plan) => plan,
            CallPlan::Known(plan) => plan,
        }
    }
}

/// Runs operations of a stage, in order, to the end.
pub(in crate::ep) type Run<'a> = dyn FnMut(&[TrackOp], &Operands<'_>) -> Result<(), Error> + 'a;

/// The relay of one `ExpertParallel`.
#[derive(Debug)]
pub(in crate::ep) struct Relay {
    fixed: Arc<EpState>,
    tables: RelayTables,
    numbers: GroupCounts,
    arrivals: RelayPermutation,
    /// Rank whose pool holds the chunk of each rank: its own.
    everybody: Vec<u32>,
    /// The chunks of this node's ranks in a return.
    chunks: Vec<RowBuffer>,
}

impl Relay {
    pub fn new(fixed: Arc<EpState>) -> Self {
        let paths = fixed.paths();
        Relay {
            tables: RelayTables::new(paths, fixed.chunks),
            numbers: GroupCounts::new(&fixed),
            arrivals: RelayPermutation::default(),
            everybody: (0..paths.ranks()).collect(),
            chunks: vec![RowBuffer::default(); paths.ranks() as usize],
            fixed,
        }
    }

    /// Adds up the counts of this node, and writes the messages to other nodes.
    fn compose(&mut self, task: &RelayTask) -> Result<(), Error> {
        let agreement = self.fixed.agreement(task.calls, task.kind);
        let counted = task.kind.places() && self.fixed.spec.mode.slots().is_none();
        for source in self.fixed.paths().count_receivers() {
            agreement.compose(source, counted.then_some(&mut self.numbers))?;
        }
        self.tables.messages(&agreement.setting, counted);
        Ok(())
    }

    /// Reads where the memory of this node's ranks begins.
    fn bases(&mut self, task: &RelayTask) -> Result<(), Error> {
        let (fixed, agreement) = (&self.fixed, self.fixed.agreement(task.calls, task.kind));
        for rank in fixed.lanes.nodes.members(fixed.lanes.nodes.node_of(fixed.lanes.rank)) {
            self.tables.bases[*rank as usize] = agreement.tag_of(*rank)?.base;
        }
        Ok(())
    }

    /// Reads the headers of all sources.
    fn learn(&mut self, task: &RelayTask, plan: &mut CallPlan<'_>) -> Result<(), Error> {
        let CallPlan::Own(forward) = plan else { return Ok(()) };
        let fixed = &self.fixed;
        let (paths, me) = (fixed.paths(), fixed.lanes.rank);
        let setting = fixed.agreement(task.calls, task.kind).setting;
        let (control, served) = (setting.control, paths.served_by(me));
        let bins = served.iter().map(|&rank| fixed.bins.of(rank).len()).sum();
        forward.weights.clear();
        forward.spans = fixed.spec.coalesce_relays || fixed.spec.gathers;
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
                at + crate::schedule::ControlLayout::LANDED,
                &mut block.landed,
            )?;
            if fixed.spec.rank_sums {
                block.rank_sums.resize(served.len(), Default::default());
                fixed.port.read(me, WindowId::CONTROL, at + control.rank_sums(), &mut block.rank_sums)?;
            }
            fixed.port.read(me, WindowId::CONTROL, at + control.segments(), &mut block.segments)?;
            let bound = u64::from(entries) <= control.max_entries() && rows <= entries;
            block.index.resize(if bound { entries as usize } else { 0 }, 0);
            if setting.paths.route() == Route::Pxn {
                fixed.port.read(me, WindowId::CONTROL, at + control.index(), &mut block.index)?;
            } else {
                (0..).zip(&mut block.index).for_each(|(row, entry)| *entry = row);
            }
            if !bound || !block.is_sound(entries, !fixed.arrives()) {
                return Err(Cause::Protocol { rank: fixed.lanes.world_ranks[source as usize] }.into());
            }
            if fixed.spec.weighted && setting.sizing.partial_bytes.is_some() {
                // The weight comes first in all metadata.
                let (words, metadata) = (setting.sizing.words_out as usize, &mut self.numbers.scratch);
                metadata.resize(entries as usize * words, 0);
                fixed.port.read(me, WindowId::CONTROL, at + control.metadata(entries), metadata)?;
                forward.weights.extend(metadata.iter().step_by(words).map(|&word| f32::from_bits(word)));
            }
        }
        let sums = setting.sizing.partial_bytes.is_some();
        match fixed.arrives() {
            false => forward.fill(&fixed.bins, served, fixed.chunks, sums),
            true if sums => {
                let most = PulledSums::most_chunks(fixed.chunks, setting.paths);
                forward.fill_pulled(&fixed.bins, served, most, &setting.sizing);
            }
            true => {}
        }
        Ok(())
    }

    /// Fills the operands by which rows are relayed; engines do so in runs, which are found first.
    fn fill_rows(
        &mut self,
        task: &RelayTask,
        plan: &mut CallPlan<'_>,
        judged: Option<(&Counts, &ReceiveSizes)>,
    ) {
        let (fixed, kind) = (&self.fixed, task.kind);
        let setting = fixed.agreement(task.calls, kind).setting;
        if !fixed.arrives() {
            return self.tables.forward(&setting, plan, kind.places());
        }
        let (counts, sizes) = judged.unwrap_or((&self.numbers.counts, &self.numbers.sizes));
        if let CallPlan::Own(forward) = plan {
            let rows = (&mut **forward, &mut self.arrivals);
            self.tables.relay_to_arrivals(&setting, &fixed.frame(), rows, (counts, sizes), |rows| {
                fixed.landing(kind, rows)
            });
        }
    }

    /// Reads where sources want their rows, and fills the operands by which they get them.
    fn fill_return(&mut self, task: &RelayTask, plan: &RelayPlan) -> Result<(), Error> {
        let (fixed, setting) = (&self.fixed, self.fixed.agreement(task.calls, task.kind).setting);
        for source in fixed.paths().sources() {
            let tag = fixed.port.flag(source, Flag::Block)?.tag(task.calls.value());
            self.tables.offers[source as usize] = tag.base;
        }
        if let Some(block) = plan.blocks.first() {
            let served = fixed.paths().served_by(fixed.lanes.rank);
            for (&rank, &landed) in served.iter().zip(&block.landed) {
                self.chunks[rank as usize] = setting.sizing.offer(landed);
            }
        }
        self.tables.return_rows(&setting, plan, &fixed.bins, task.parts, task.memory);
        Ok(())
    }

    fn operands<'t>(&'t self, task: &RelayTask, plan: &'t RelayPlan) -> Operands<'t> {
        let (tables, partials) = (&self.tables, &plan.partials);
        let weights = if task.weighted { &plan.weights[..] } else { &[] };
        let sum = SumOperands::of_partials(partials, &tables.bases, &self.everybody, &self.chunks);
        Operands {
            runs: &plan.runs,
            rows: &plan.rows,
            row_bytes: self.fixed.spec.row_bytes(),
            sum: SumOperands { wire: self.fixed.spec.partial_dtype, weights, ..sum },
            ..tables.operands(task.calls)
        }
    }
}

/// A relay amid one call.
pub(in crate::ep) struct RelayCall<'r, 'f> {
    pub relay: &'r mut Relay,
    pub programs: &'r RankPrograms,
    pub task: &'r RelayTask,
    pub plan: CallPlan<'r>,
    /// Counts that its rank knows, where one thread judges for both; else the relay judges for
    /// itself.
    pub judged: Option<(&'r Counts, &'r ReceiveSizes)>,
    /// Runs the operations of a stage.
    pub run: &'r mut Run<'f>,
}

impl StepExecutor for RelayCall<'_, '_> {
    fn run(&mut self, _: Role, stage: StageId, part: Part) -> Result<(), Error> {
        (self.run)(self.programs.stages.items(stage, part), &self.relay.operands(self.task, &self.plan))
    }

    fn compute(&mut self, _: Role, work: Work) -> Result<(), Error> {
        let RelayCall { relay, task, plan, judged, .. } = self;
        match work {
            Work::Compose => relay.compose(task),
            Work::Bases => relay.bases(task),
            Work::Judge => {
                let Relay { fixed, numbers, .. } = &mut **relay;
                fixed.agreement(task.calls, task.kind).judge(numbers)
            }
            Work::Learn => relay.learn(task, plan),
            Work::FillRelay => {
                relay.fill_rows(task, plan, *judged);
                Ok(())
            }
            Work::FillReturn => relay.fill_return(task, plan),
            _ => Err(CallError::unknown_step(task.kind, &work).into()),
        }
    }

    fn agree(&mut self, _: Role) -> Result<(), Error> {
        let Relay { fixed, .. } = &*self.relay;
        let agreement = fixed.agreement(self.task.calls, self.task.kind);
        let own = agreement.tag_of(fixed.lanes.rank)?;
        // Why its rank refuses the call, only the rank knows.
        let refused = (own.refusal != Refusal::None).then(|| PlanError::RefusedHere.into());
        agreement.agree(own, refused)
    }

    fn admit(&mut self, _: Role) -> Result<(), Error> {
        let Relay { fixed, numbers, .. } = &mut *self.relay;
        let agreement = fixed.agreement(self.task.calls, self.task.kind);
        let own = agreement.tag_of(fixed.lanes.rank)?;
        agreement.check_space(own, numbers)
    }
}
