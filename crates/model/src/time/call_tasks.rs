//! From a call's stages and operands to the tasks of its ranks.
//!
//! The order is that of the call's program, with the relay's operations interleaved. So the thread
//! that enqueues for a device performs it, too. Kernels of the caller's stream are steps of it, and
//! the one that places own rows is an operation of the stage of rows:
//!
//! ```text
//!   caller's stream   dispatch   plan, called | status, pack | reached | own choices | own rows | done | choices apart
//!                     by the host   choices -> host, called | status, sort, pack | reached | own rows | done | choices apart
//!                     pxn        choices -> host, called | status, list | done | pack | reached | own rows | done | regroup
//!                     gradient   status, pack | called (several nodes) | reached | own rows ....... done | regroup (pxn)
//!                     combine    sums by rank | called (several nodes) | reached, status .......... done | sum
//!   stream of copies             reached | mark | tables, rows, metadata, words | awaited words | done
//! ```

use sidelane_core::error::CallKind;
use sidelane_core::plan::{RelayPermutation, RelayPlan, RowBuffer, RowRun, RowSizes};
use sidelane_core::schedule::call_program::{
    Action, CallStep, Engines, RankPrograms, Relays, Role, StageOperands, Work,
};
use sidelane_core::schedule::{
    CallProperties, CallerTables, Calls, Class, FillContext, Flag, Op, Operands, RelayTables, ReturnParts,
    SumMemory, SumOperands, TrackOp, WindowId,
};
use sidelane_core::topology::Paths;

use super::Phase;
use super::events::{Line, Program, Task};
use super::hardware::Place;
use super::host_tasks::Lines;
use super::placement::{Placed, Rank};

/// A call of one rank.
pub(super) struct Lowering<'a> {
    placed: &'a Placed,
    rank: &'a Rank,
    paths: Paths<'a>,
    sizing: RowSizes,
    calls: Calls,
}

/// The call that is timed: the only one.
fn first_call() -> Calls {
    let mut calls = Calls::new(1);
    calls.enter();
    calls
}

impl<'a> Lowering<'a> {
    pub fn new(placed: &'a Placed, me: u32) -> Self {
        let (rank, paths) = (&placed.ranks[me as usize], placed.paths(me));
        Lowering { placed, rank, paths, sizing: placed.sizing, calls: first_call() }
    }

    /// Tokens to the ranks of their experts.
    pub fn dispatch(self) -> Program {
        self.out(CallKind::Dispatch)
    }

    /// Gradients of tokens to the rows that were summed: along the existing layout, without
    /// metadata.
    pub fn combine_backward(mut self) -> Program {
        self.sizing.row_bytes = self.sizing.return_bytes;
        self.out(CallKind::CombineBackward)
    }

    /// A dispatch; one that places has its choices sorted, counted and placed first, and metadata
    /// moves, too.
    fn out(self, kind: CallKind) -> Program {
        let (placed, rank, at, sizing) = (self.placed, self.rank, self.setting(), self.sizing);
        let plans = kind.places();
        let noted = plans && placed.metadata;
        let mut tables = CallerTables::new(self.paths, placed.chunks);
        tables.rows(&at, &rank.layout, noted);
        let (mut messages, mut relayed, mut forward) = (self.relayed(), self.relayed(), rank.forward.clone());
        let mut brought = CallerTables::new(self.paths, placed.chunks);
        messages.messages(&at, plans);
        if let Some(first) = rank.arrivals {
            tables.to_arrivals(&at, &rank.layout, first, |rows| sizing.landing(rows));
            let (frame, mut runs) = (placed.frame(self.paths.me()), RelayPermutation::default());
            let numbers = (&rank.counts, &rank.sizes);
            relayed.relay_to_arrivals(&at, &frame, (&mut forward, &mut runs), numbers, |rows| {
                sizing.landing(rows)
            });
            let landed = if noted { placed.landed_from_other_nodes(self.paths.me()) } else { Vec::new() };
            brought.bring_metadata_in(&at, &landed, rank.layout.landed, (0, 0));
        } else {
            relayed.forward(&at, &forward, noted);
        }
        let nothing = (&[][..], &[][..]);
        let operands = Filled {
            own: own(rank, &tables, self.calls),
            brought: brought.operands(self.calls, 0),
            messages: others(&messages, &forward, nothing, self.calls),
            relayed: others(&relayed, &forward, nothing, self.calls),
        };
        let mut lines = self.lines();
        self.walk(&mut lines, kind, &operands);
        if lines.is_device() {
            lines.push(Task::Join(Line::Caller));
            lines.mark(Phase::Regroup);
        } else {
            lines.mark(Phase::Move);
        }
        lines.program()
    }

    /// Rows back to their tokens.
    pub fn combine(self) -> Program {
        let (placed, rank, at) = (self.placed, self.rank, self.setting());
        let parts = ReturnParts { rows: true, weights: false };
        let mut tables = CallerTables::new(self.paths, placed.chunks);
        let pulls = self.lines().is_device();
        match pulls {
            true => tables.pull(&at, &rank.layout, 0),
            false => tables.sum(&at, &rank.layout, parts),
        }
        let (mut messages, mut returned) = (self.relayed(), self.relayed());
        messages.messages(&at, false);
        let memory = SumMemory { outbox: 0, pulled: pulls.then_some(0) };
        returned.return_rows(&at, &rank.forward, &placed.bins, parts, memory);
        // Each rank's chunk lies in its own memory.
        let offers = vec![self.sizing.offer(0); self.paths.ranks() as usize];
        let holders: Vec<u32> = (0..self.paths.ranks()).collect();
        let operands = Filled {
            own: own(rank, &tables, self.calls),
            brought: Operands::default(),
            messages: others(&messages, &rank.forward, (&holders, &offers), self.calls),
            relayed: others(&returned, &rank.forward, (&holders, &offers), self.calls),
        };
        let mut lines = self.lines();
        self.walk(&mut lines, CallKind::Combine, &operands);
        if pulls {
            lines.push(Task::Join(Line::Caller));
        }
        lines.mark(Phase::Sum);
        lines.program()
    }

    /// The steps of a call's program, in its order.
    fn walk(&self, lines: &mut Lines<'a>, kind: CallKind, operands: &Filled) {
        let sums = self.sizing.partial_bytes.is_some();
        let device = lines.is_device();
        let brings_in = device && self.rank.arrivals.is_some();
        let engines = Engines { pulls: device, brings_in, enqueues: device };
        let programs = RankPrograms::new(self.paths, self.placed.chunks, sums, engines);
        for CallStep { role, action } in programs.own(kind, Relays::Inline).line(None) {
            match action {
                Action::Run(stage, part) => {
                    let filled = match stage.operands() {
                        StageOperands::Own => &operands.own,
                        StageOperands::BroughtIn => &operands.brought,
                        StageOperands::Messages => &operands.messages,
                        StageOperands::Relayed => &operands.relayed,
                    };
                    let items = programs.stages.items(stage, part);
                    lines.stage(items, filled);
                    let hears = |item: &TrackOp| matches!(item.op, Op::Wait { flag: Flag::Returned, .. });
                    if returns(kind) && items.iter().any(hears) {
                        lines.mark(Phase::Return);
                    }
                }
                Action::Compute(work) if role == Role::Own => self.plan(lines, work, kind),
                Action::Compute(Work::SendNodeSums) => self.send_node_sums(lines),
                Action::Round(_) | Action::Compute(_) | Action::Agree | Action::Admit => {}
            }
        }
    }

    /// The host's planning between two stages, and the ends of phases.
    fn plan(&self, lines: &mut Lines, work: Work, kind: CallKind) {
        let (placed, host) = (self.placed, &self.placed.hardware.host);
        match work {
            Work::Bring => self.bring(lines),
            Work::Pack => self.pack(lines, kind),
            Work::Partials => self.partials(lines),
            Work::PackPlaced => self.pack_placed(lines),
            Work::Follow => lines.follow(),
            Work::Join => self.join(lines, kind),
            Work::Metadata => self.lay_choices_apart(lines),
            Work::Regroup => self.regroup(lines),
            Work::Sum => self.sum(lines),
            Work::Sort => lines.busy(host.sort * self.choices_of_host() / 1000),
            Work::Place => {
                let bins = u64::from(placed.bins.count() + self.paths.ranks());
                let place = host.place * self.choices_of_host() + host.per_bin * bins;
                lines.busy(place / 1000);
            }
            Work::SendTables => self.send_tables(lines),
            Work::PlaceOwn => self.place_own(lines),
            Work::FillRows | Work::Bases => lines.mark(Phase::Plan),
            _ => {}
        }
    }

    /// Choices go to where they are planned.
    fn bring(&self, lines: &mut Lines) {
        match (self.choices(), self.placed.device_plans) {
            (0, true) => {}
            (choices, true) => lines.sort(choices),
            (choices, false) => (0..2).for_each(|_| lines.copy_of_caller(choices * 4)),
        }
    }

    /// The host finds the order of rows that a dispatch packs where engines relay.
    fn packs_later(&self, kind: CallKind) -> bool {
        kind.places() && self.rank.arrivals.is_some()
    }

    fn pack(&self, lines: &mut Lines, kind: CallKind) {
        lines.clear_status();
        if kind.places() && !self.packs_later(kind) && !self.placed.device_plans && self.choices() > 0 {
            lines.sort(self.choices());
        }
        if !self.packs_later(kind) {
            self.pack_rows(lines);
            lines.record_packed();
        }
    }

    /// A kernel reads the rows of this rank, and writes the sums that return from it, if they do.
    fn partials(&self, lines: &mut Lines) {
        if self.sizing.rank_sums {
            let sums = self.placed.rank_sums_at(self.paths.me());
            let rows = u64::from(self.rank.layout.received());
            lines.kernel((rows + sums) * self.sizing.return_bytes, 0);
        }
        lines.record_packed();
    }

    /// Where engines relay, the host says how rows are packed.
    fn pack_placed(&self, lines: &mut Lines) {
        if self.rank.arrivals.is_some() {
            let me = self.paths.me();
            lines.copy(Place::Host, (me, me), self.choices() * 4);
            lines.precede();
            self.pack_rows(lines);
            lines.record_packed();
        }
    }

    fn join(&self, lines: &mut Lines, kind: CallKind) {
        lines.settle();
        if returns(kind) {
            lines.clear_status();
        }
        lines.precede();
        lines.push(Task::Join(Line::Stream));
        lines.mark(if returns(kind) { Phase::Pull } else { Phase::Move });
    }

    fn lay_choices_apart(&self, lines: &mut Lines) {
        if lines.is_device() && self.placed.metadata && (self.placed.per_rank || self.sizing.rank_sums) {
            lines.lay_apart(u64::from(self.rank.layout.landed) * self.sizing.metadata_bytes());
        }
    }

    /// A kernel puts what arrived into visible order.
    fn regroup(&self, lines: &mut Lines) {
        if self.rank.layout.landed > 0 {
            lines.kernel(2 * u64::from(self.rank.layout.landed) * self.sizing.row_bytes, 0);
        }
    }

    /// A kernel sums what returned.
    fn sum(&self, lines: &mut Lines) {
        let layout = &self.rank.layout;
        if layout.tokens > 0 {
            let sums: u32 = layout.rank_sums.iter().map(|run| run.count).sum();
            let (terms, ..) = layout.summands();
            let terms = if self.sizing.rank_sums { sums as usize } else { terms.len() };
            lines.kernel((terms as u64 + u64::from(layout.tokens)) * self.sizing.return_bytes, 0);
        }
    }

    /// Tables and metadata that the caller's stream finds next to the rows.
    fn send_tables(&self, lines: &mut Lines) {
        let (me, choices) = (self.paths.me(), self.choices() * 4);
        // Where each choice's row lies, its place in the order of the sum, and the row of its sum.
        let sums = self.sizing.rank_sums || self.sizing.partial_bytes.is_some();
        let tables = if sums { 3 } else { 2 };
        if !self.placed.device_plans {
            (0..tables).for_each(|_| lines.copy(Place::Host, (me, me), choices));
        }
        if !self.placed.per_rank {
            // Rows of each expert, without and with pads, in 64 bits.
            lines.copy(Place::Host, (me, me), self.placed.bins.of(me).len() as u64 * 16);
        }
    }

    /// Where own rows go: four words for each run. Where the device plans, a kernel reads and
    /// writes rows of choices, and moves the metadata of own rows.
    fn place_own(&self, lines: &mut Lines) {
        let (runs, choices) = (self.own_runs(), self.choices() * 4);
        if runs.iter().any(|run| run.count > 0) {
            lines.copy_of_caller(runs.len() as u64 * 16);
            if self.placed.device_plans {
                let rows: u64 = runs.iter().map(|run| u64::from(run.count + run.pad)).sum();
                lines.kernel(2 * (choices + rows * self.sizing.metadata_bytes()), 0);
            }
        }
    }

    /// The rows of each sum that this rank's relay makes.
    fn send_node_sums(&self, lines: &mut Lines) {
        let (me, sums) = (self.paths.me(), u64::from(self.rank.forward.partials.count()));
        lines.copy(Place::Host, (me, me), sums * u64::from(self.placed.top_k) * 4);
    }

    /// On a device a kernel packs the rows to send, if there are other ranks: it reads each token
    /// once, the rest from its cache.
    fn pack_rows(&self, lines: &mut Lines) {
        if self.choices() > 0 && self.paths.ranks() > 1 {
            let read = u64::from(self.rank.layout.tokens) * self.sizing.row_bytes;
            lines.kernel(read + self.packed_bytes(), 0);
        }
    }

    /// The runs of own rows.
    fn own_runs(&self) -> &[RowRun] {
        let (layout, me) = (&self.rank.layout, self.paths.me());
        let runs = match self.rank.arrivals {
            Some(first) => {
                let run = first + (0..me).filter(|&rank| self.paths.same_node(rank)).count() as u32;
                run..run + 1
            }
            None => layout.runs_to(me),
        };
        &layout.runs[runs.start as usize..runs.end as usize]
    }

    /// Bytes that a kernel packs, to leave.
    fn packed_bytes(&self) -> u64 {
        let runs = &self.rank.layout.runs;
        // Runs to arrivals repeat those of local peers.
        let once = self.rank.arrivals.map_or(runs.len(), |first| first as usize);
        runs[..once].iter().map(|run| u64::from(run.count)).sum::<u64>() * self.sizing.row_bytes
    }

    /// Choices that the host sorts and places.
    fn choices_of_host(&self) -> u64 {
        if self.placed.device_plans { 0 } else { self.choices() }
    }

    /// Choices of the rank.
    fn choices(&self) -> u64 {
        u64::from(self.rank.layout.tokens) * u64::from(self.placed.top_k)
    }

    fn lines(&self) -> Lines<'a> {
        let (Placed { hardware, device_plans, .. }, tokens) = (self.placed, self.rank.layout.tokens);
        Lines { device_plans: *device_plans, tokens, ..Lines::new(hardware, self.paths, self.sizing) }
    }

    fn relayed(&self) -> RelayTables {
        RelayTables::new(self.paths, self.placed.chunks)
    }

    fn setting(&self) -> FillContext<'a> {
        let Placed { control, chunks, .. } = self.placed;
        let (paths, sizing, chunks) = (self.paths, self.sizing, *chunks);
        FillContext {
            paths,
            control,
            sizing,
            chunks,
            parity: self.calls.parity(),
            far: WindowId::POOL,
            metadata: None,
        }
    }
}

fn returns(kind: CallKind) -> bool {
    CallProperties::of(kind).class == Class::Return
}

/// Operands of a call's stages.
struct Filled<'t> {
    own: Operands<'t>,
    /// Of what is brought in at the end of a dispatch.
    brought: Operands<'t>,
    messages: Operands<'t>,
    relayed: Operands<'t>,
}

/// Operands of the rank's own program.
fn own<'t>(rank: &'t Rank, tables: &'t CallerTables, calls: Calls) -> Operands<'t> {
    let layout = &rank.layout;
    Operands {
        runs: &layout.runs,
        rows: &layout.rows,
        sum: SumOperands::of_layout(layout, &tables.bases),
        ..tables.operands(calls, 0)
    }
}

/// Operands of its relay's.
fn others<'t>(
    tables: &'t RelayTables,
    forward: &'t RelayPlan,
    (held_by, chunks): (&'t [u32], &'t [RowBuffer]),
    calls: Calls,
) -> Operands<'t> {
    Operands {
        runs: &forward.runs,
        rows: &forward.rows,
        sum: SumOperands::of_partials(&forward.partials, &tables.bases, held_by, chunks),
        ..tables.operands(calls)
    }
}
