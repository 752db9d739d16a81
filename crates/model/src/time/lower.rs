//! From a call's stages and operands to the tasks of its ranks.
//!
//! The order is that of the call's program, with the relay's operations interleaved. So the planner
//! of a device performs it, too. Each operation becomes tasks of the lines of its rank:
//!
//! ```text
//!   device   Put, PutRows near   a copy for each span or run            stream
//!            Put, PutRows far    messages                               NIC
//!            Signal landed, read of a local peer                        stream, behind its copies
//!            Signal far                                                 NIC, behind its messages
//!            other signals, waits                                       host
//!            Reduce              a kernel, and the host waits for it    compute
//!   host     everything on the rank's thread, but what crosses          host, NIC
//! ```

use sidelane_core::error::CallKind;
use sidelane_core::plan::{RelayPermutation, RelayPlan, RowBuffer, RowSizes};
use sidelane_core::schedule::call_program::{
    Action, CallStep, Engines, RankPrograms, Relays, Role, StageId, Work,
};
use sidelane_core::schedule::{
    CallerTables, Calls, FillContext, Flag, Index, Op, Operand, OperandId, Operands, PutSource, RelayTables,
    ReturnParts, SumOperands, SumTarget, TrackOp, WindowId,
};
use sidelane_core::topology::Paths;

use super::hardware::at_rate;
use super::machine::{Line, Program, Task};
use super::placed::{Placed, Rank};
use super::{Executor, Hardware, Phase};

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
            relayed.relay_to_arrivals(&at, &frame, (&mut forward, &mut runs), numbers, |rows| {
                sizing.landing(rows)
            });
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

/// Operands of a call's stages.
struct Filled<'t> {
    own: Operands<'t>,
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

/// Bytes that move for one operand, by their source.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    from: u32,
    copies: u64,
    bytes: u64,
    messages: u64,
}

/// One rank's program in the making.
pub(super) struct Lines<'a> {
    hardware: &'a Hardware,
    paths: Paths<'a>,
    sizing: RowSizes,
    program: Program,
    /// Copies or words were handed to the stream, by a call that is paid for, since the last wait.
    called: [bool; 2],
}

impl<'a> Lines<'a> {
    /// Of the rank of these paths, where rows have these sizes.
    pub fn new(hardware: &'a Hardware, paths: Paths<'a>, sizing: RowSizes) -> Self {
        Lines { hardware, paths, sizing, program: Program::default(), called: [false; 2] }
    }

    /// All that was asked for.
    pub fn program(self) -> Program {
        self.program
    }

    /// The operations of a stage, in launch order.
    pub fn stage(&mut self, items: &[TrackOp], operands: &Operands) {
        for &TrackOp { op, .. } in items {
            match op {
                Op::Put { to, operand } | Op::PutRows { to, operand } => self.put(operands, to, operand),
                Op::Signal { to, of, flag, level } => {
                    let signal = Task::Signal { to, of, flag, value: operands.value(level) };
                    self.signal(to, flag, signal);
                }
                Op::Wait { from, flag, level } => {
                    self.called = [false; 2];
                    self.push(Task::Wait { of: from, flag, value: operands.value(level) });
                }
                Op::Reduce { operand } => self.reduce(operands, operand),
            }
        }
    }

    fn put(&mut self, operands: &Operands, to: u32, operand: OperandId) {
        let loads = self.loads(operands, to, operand);
        for Load { from, copies, bytes, messages } in loads.into_iter().filter(|load| load.bytes > 0) {
            if !self.paths.same_node(to) {
                self.program.work.messages += messages;
                self.program.work.inter_node_bytes += bytes;
                self.hand(Line::Nic, Task::Send { to, messages, bytes, rest: 0 });
                continue;
            }
            self.program.work.copies += copies;
            match from == to {
                true => self.program.work.self_bytes += bytes,
                false => self.program.work.intra_node_bytes += bytes,
            }
            let copy = Task::Copy { from, to, copies, bytes };
            match self.device() {
                true => {
                    self.call(0);
                    self.hand(Line::Stream, copy);
                }
                false => self.push(copy),
            }
        }
    }

    fn signal(&mut self, to: u32, flag: Flag, signal: Task) {
        if !self.paths.same_node(to) {
            return self.hand(Line::Nic, signal);
        }
        let behind_copies = to != self.paths.me() && matches!(flag, Flag::Landed | Flag::Read);
        match self.device() && behind_copies {
            true => {
                self.call(1);
                self.hand(Line::Stream, signal);
            }
            false => self.push(signal),
        }
    }

    /// The host's call that enqueues a batch of copies (0) or a list of words (1): one until the
    /// next wait.
    fn call(&mut self, which: usize) {
        if !std::mem::replace(&mut self.called[which], true) {
            self.busy(self.hardware.engines.per_call);
        }
    }

    fn reduce(&mut self, operands: &Operands, operand: OperandId) {
        let sum = &operands.sum;
        let Operand::SumRows { first, count, to } = operands.table[operand.0 as usize] else { return };
        if count == 0 {
            return;
        }
        let at = |row: u32| sum.starts[row as usize] as usize;
        let (home, me) = (self.sizing.home_bytes, self.paths.me());
        let (mut own, mut near) = (0, 0);
        for term in &sum.terms[at(first)..at(first + count)] {
            match sum.held_by[term.owner as usize] == me {
                true => own += sum.chunks[term.owner as usize].row_bytes,
                false => near += sum.chunks[term.owner as usize].row_bytes,
            }
        }
        let written = match to {
            SumTarget::Output => home,
            SumTarget::Partials { .. } => self.sizing.partial_bytes.unwrap_or(home),
        };
        self.kernel(own + u64::from(count) * written, near);
        if self.device() {
            self.push(Task::Join(Line::Compute));
        }
    }

    /// A kernel that reads and writes this many bytes of its own memory, and reads this many of
    /// local peers; on the host, a loop.
    pub fn kernel(&mut self, bytes: u64, loaded: u64) {
        let Hardware { compute, link, .. } = self.hardware;
        self.program.work.kernel_bytes += bytes;
        self.program.work.loaded_bytes += loaded;
        let (own, near) = (at_rate(bytes, compute.rate), at_rate(loaded, link.load_rate));
        match self.device() {
            true => self.hand(Line::Compute, Task::Busy(compute.launch + own.max(near))),
            false => self.busy(own + near),
        }
    }

    /// Bytes of a operand, by the rank in whose memory they lie.
    fn loads(&self, operands: &Operands, to: u32, operand: OperandId) -> Vec<Load> {
        let me = self.paths.me();
        let whole = |len: u64| len.div_ceil(self.hardware.nic.message_bytes);
        match operands.table[operand.0 as usize] {
            Operand::Spans { first, count } => {
                let mut loads: Vec<Load> = Vec::new();
                for span in operands.spans[first as usize..][..count as usize].iter().filter(|s| s.len > 0) {
                    let from = match span.from {
                        PutSource::Window { owner, .. } => owner,
                        PutSource::Input | PutSource::Notes => me,
                    };
                    if loads.last().is_none_or(|load| load.from != from) {
                        loads.push(Load { from, ..Load::default() });
                    }
                    let load = loads.last_mut().expect("pushed above");
                    load.copies += 1;
                    load.bytes += span.len;
                    load.messages += whole(span.len);
                }
                loads
            }
            Operand::Rows { first, count, from, index, row_bytes, .. } => {
                // A kernel packs rows, and leaves own ones at their place.
                let packed = self.device() && from == PutSource::Input;
                if packed && to == me {
                    return Vec::new();
                }
                let mut load = Load { from: me, ..Load::default() };
                for run in &operands.runs[first as usize..][..count as usize] {
                    let bytes = u64::from(run.count + run.pad) * row_bytes;
                    let pieces = match index {
                        Index::Listed if !packed => u64::from(run.count),
                        _ => u64::from(run.count > 0),
                    };
                    load.copies += pieces;
                    load.bytes += bytes;
                    load.messages += pieces.max(whole(bytes));
                }
                vec![load]
            }
            Operand::Empty | Operand::SumRows { .. } | Operand::FetchWeights => Vec::new(),
        }
    }

    pub fn device(&self) -> bool {
        self.hardware.executor == Executor::Device
    }

    pub fn busy(&mut self, ns: u64) {
        self.push(Task::Busy(ns));
    }

    pub fn mark(&mut self, phase: Phase) {
        self.push(Task::Mark(phase));
    }

    fn hand(&mut self, to: Line, task: Task) {
        self.push(Task::Hand(to, Box::new(task)));
    }

    pub fn push(&mut self, task: Task) {
        self.program.tasks.push_back(task);
    }
}
