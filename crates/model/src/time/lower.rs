//! From a call's stages and operands to the tasks of its ranks.
//!
//! The order is that of the call's program, with the relay's operations interleaved. So the planner
//! of a device performs it, too. [`Lines`] define each operation.

use sidelane_core::error::CallKind;
use sidelane_core::plan::{RelayPermutation, RelayPlan, RowBuffer, RowSizes};
use sidelane_core::schedule::call::{Action, CallStep, Engines, RankPrograms, Relays, Role, StageId, Work};
use sidelane_core::schedule::{
    CallerTables, Calls, FillContext, Operands, RelayTables, ReturnParts, SumOperands, WindowId,
};
use sidelane_core::topology::Paths;

use super::Phase;
use super::lines::Lines;
use super::machine::Program;
use super::placed::{Placed, Rank};
use super::task::{Line, Task};

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
        self.sizing.row_bytes = self.sizing.home_bytes;
        self.out(CallKind::CombineBackward)
    }

    /// A dispatch; one that places has its choices sorted, counted and placed first, and metadata
    /// moves, too.
    fn out(self, kind: CallKind) -> Program {
        let (placed, rank, at, sizing) = (self.placed, self.rank, self.setting(), self.sizing);
        let (plans, arrive) = (kind.places(), rank.arrivals.is_some());
        let noted = plans && placed.notes;
        let mut tables = CallerTables::new(self.paths, placed.chunks);
        tables.rows(&at, &rank.layout, noted);
        if let Some(first) = rank.arrivals {
            tables.to_arrivals(&at, &rank.layout, first, |rows| sizing.landing(rows));
        }
        let (mut messages, mut relayed, mut forward) = (self.relayed(), self.relayed(), rank.forward.clone());
        messages.messages(&at, plans);
        if arrive {
            let (frame, mut runs) = (placed.frame(self.paths.me()), RelayPermutation::default());
            let numbers = (&rank.counts, &rank.sizes);
            relayed.hand_on(&at, &frame, (&mut forward, &mut runs), numbers, |rows| sizing.landing(rows));
        } else {
            relayed.forward(&at, &forward, noted);
        }
        let nothing = (&[][..], &[][..]);
        let operands = Filled {
            own: own(rank, &tables, self.calls),
            messages: others(&messages, &forward, nothing, self.calls),
            relayed: others(&relayed, &forward, nothing, self.calls),
        };
        let mut lines = self.walk(kind, &operands);
        if lines.device() {
            lines.push(Task::Join(Line::Stream));
        }
        lines.mark(Phase::Move);
        if arrive {
            let landed = u64::from(rank.layout.landed) * self.sizing.row_bytes;
            lines.kernel(2 * landed, 0);
            lines.push(Task::Join(Line::Compute));
            lines.mark(Phase::Regroup);
        }
        lines.program()
    }

    /// Rows back to their tokens.
    pub fn combine(self) -> Program {
        let (placed, rank, at) = (self.placed, self.rank, self.setting());
        let parts = ReturnParts { rows: true, weights: false };
        let mut tables = CallerTables::new(self.paths, placed.chunks);
        match self.pulls() {
            true => tables.pull(&at, &rank.layout, 0),
            false => tables.sum(&at, &rank.layout, parts),
        }
        let (mut messages, mut returned) = (self.relayed(), self.relayed());
        messages.messages(&at, false);
        returned.home(&at, &rank.forward, &placed.bins, parts, 0);
        // Each rank's chunk lies in its own memory.
        let offers = vec![self.sizing.offer(0); self.paths.ranks() as usize];
        let holders: Vec<u32> = (0..self.paths.ranks()).collect();
        let operands = Filled {
            own: own(rank, &tables, self.calls),
            messages: others(&messages, &rank.forward, (&holders, &offers), self.calls),
            relayed: others(&returned, &rank.forward, (&holders, &offers), self.calls),
        };
        let mut lines = self.walk(CallKind::Combine, &operands);
        if self.pulls() {
            lines.push(Task::Join(Line::Stream));
            lines.mark(Phase::Pull);
            let rows = rank.layout.terms.len() as u64 + u64::from(rank.layout.tokens);
            lines.kernel(rows * self.sizing.home_bytes, 0);
            lines.push(Task::Join(Line::Compute));
        }
        lines.mark(Phase::Sum);
        lines.program()
    }

    /// The steps of a call's program, in its order.
    fn walk(&self, kind: CallKind, operands: &Filled) -> Lines<'a> {
        let sums = self.sizing.partial_bytes.is_some();
        let engines = Engines { pulls: self.pulls(), ..Engines::default() };
        let programs = RankPrograms::new(self.paths, self.placed.chunks, sums, engines);
        let mut lines = self.lines();
        // Only a token's own planning decides which rows are packed; engines that relay need the
        // placement first.
        let program = programs.own(kind, Relays::Inline);
        let goes_out = program.steps().iter().any(|step| step.action == Action::Compute(Work::FillRows));
        let late = kind.places() && self.rank.arrivals.is_some();
        if goes_out && !late {
            self.pack(&mut lines);
        }
        for CallStep { role, action } in program.line(None) {
            match action {
                // Nothing was offered before the first call.
                Action::Run(StageId::Release, _) => {}
                Action::Run(stage, part) => {
                    let filled = match (role, stage) {
                        (Role::Own, _) => &operands.own,
                        (
                            _,
                            StageId::Headers | StageId::RelayRows | StageId::ReturnRows | StageId::RelayDone,
                        ) => &operands.relayed,
                        _ => &operands.messages,
                    };
                    lines.stage(programs.stages.items(stage, part), filled);
                    if stage == StageId::Home {
                        lines.mark(Phase::Home);
                    }
                }
                Action::Compute(work) if role == Role::Own => self.plan(&mut lines, work, late),
                Action::Round(_) | Action::Compute(_) | Action::Agree | Action::Admit => {}
            }
        }
        lines
    }

    /// The host's planning between two stages, and the ends of phases.
    fn plan(&self, lines: &mut Lines, work: Work, late: bool) {
        let (placed, host) = (self.placed, &self.placed.hardware.host);
        match work {
            Work::Sort => lines.busy(host.sort * placed.choices / 1000),
            Work::Place => {
                let bins = u64::from(placed.bins.count() + self.paths.ranks());
                let place = host.place * placed.choices + host.per_bin * bins;
                lines.busy(place / 1000);
            }
            Work::FillRows => {
                lines.mark(Phase::Plan);
                if late {
                    self.pack(lines);
                }
                if lines.device() {
                    lines.push(Task::Join(Line::Compute));
                    lines.mark(Phase::Pack);
                }
            }
            Work::Bases => lines.mark(Phase::Plan),
            _ => {}
        }
    }

    /// On a device a kernel packs the rows to send; on the host rows leave from where they are.
    fn pack(&self, lines: &mut Lines) {
        let packed = if lines.device() { 2 * self.packed_bytes() } else { 0 };
        lines.kernel(packed, 0);
    }

    /// Kernels sum where relays do; else engines bring everything here first.
    fn pulls(&self) -> bool {
        self.lines().device() && self.sizing.partial_bytes.is_none()
    }

    /// Bytes that a kernel packs, to leave; on the host rows leave from where they are.
    fn packed_bytes(&self) -> u64 {
        let runs = &self.rank.layout.runs;
        // Runs to arrivals repeat those of local peers.
        let once = self.rank.arrivals.map_or(runs.len(), |first| first as usize);
        runs[..once].iter().map(|run| u64::from(run.count)).sum::<u64>() * self.sizing.row_bytes
    }

    fn lines(&self) -> Lines<'a> {
        Lines::new(&self.placed.hardware, self.paths, self.sizing)
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
            notes: None,
        }
    }
}

/// Operands of the slots of a call's stages.
struct Filled<'t> {
    own: Operands<'t>,
    messages: Operands<'t>,
    relayed: Operands<'t>,
}

/// Operands of the rank's own program.
fn own<'t>(rank: &'t Rank, tables: &'t CallerTables, calls: Calls) -> Operands<'t> {
    let layout = &rank.layout;
    let (terms, starts, choices) = layout.summands();
    let (held_by, chunks) = (&layout.held_by[..], &layout.chunks[..]);
    Operands {
        table: &tables.table,
        spans: &tables.spans,
        runs: &layout.runs,
        rows: &layout.rows,
        sum: SumOperands { terms, starts, choices, held_by, chunks, ..SumOperands::default() },
        call: calls.value(),
        last_return: calls.last_return(),
        ..Operands::default()
    }
}

/// Operands of its relay's.
fn others<'t>(
    tables: &'t RelayTables,
    forward: &'t RelayPlan,
    (held_by, chunks): (&'t [u32], &'t [RowBuffer]),
    calls: Calls,
) -> Operands<'t> {
    let (terms, starts) = (&forward.partials.terms[..], &forward.partials.starts[..]);
    Operands {
        table: &tables.table,
        spans: &tables.spans,
        runs: &forward.runs,
        rows: &forward.rows,
        sum: SumOperands { terms, starts, held_by, chunks, ..SumOperands::default() },
        call: calls.value(),
        last_return: calls.last_return(),
        ..Operands::default()
    }
}
