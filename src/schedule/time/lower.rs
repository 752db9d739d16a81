//! From stages and operands to tasks: what each operation is to the lines of a rank.
//!
//! ```text
//!   device   Put, PutRows near   a copy for each span or run            stream
//!            Put, PutRows far    messages                               card
//!            Signal landed, read of a neighbour                         stream, behind its copies
//!            Signal far                                                 card, behind its messages
//!            other signals, waits                                       host
//!            Reduce              a kernel, and the host waits for it    compute
//!   host     everything on the rank's thread, but what crosses          host, card
//! ```
//!
//! The two programs of a rank are one line of tasks, in the launch order of a blocking call: own puts and signals, what is
//! relayed, own waits. So the planner of a device plays them, too.

use super::hardware::at_rate;
use super::machine::Program;
use super::placed::{Placed, Rank};
use super::task::{Line, Task};
use super::{Executor, Hardware, Phase};
use crate::plan::{Arrivals, Chunk, Forward, Sizing};
use crate::schedule::{
    Caller, CallerTables, Calls, Flag, Index, Item, Op, Operand, Operands, Parts, Place, Relay, RelayTables,
    Setting, Slot, Sum, Target, WindowId,
};
use crate::topology::Paths;

/// What moves for one slot, by where it comes from.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    from: u32,
    copies: u64,
    bytes: u64,
    messages: u64,
}

/// One rank's program in the making.
pub(super) struct Lowering<'a> {
    placed: &'a Placed,
    hardware: &'a Hardware,
    rank: &'a Rank,
    paths: Paths<'a>,
    sizing: Sizing,
    calls: Calls,
    program: Program,
    /// Copies or words were handed to the stream, by a call that is paid for, since the last wait.
    called: [bool; 2],
}

/// The call that is timed: the only one.
fn first_call() -> Calls {
    let mut calls = Calls::new(1);
    calls.enter();
    calls
}

impl<'a> Lowering<'a> {
    pub fn new(placed: &'a Placed, me: u32) -> Self {
        let hardware = &placed.hardware;
        let (rank, paths) = (&placed.ranks[me as usize], placed.paths(me));
        let (calls, program) = (first_call(), Program::default());
        let sizing = placed.sizing;
        Lowering { placed, hardware, rank, paths, sizing, calls, program, called: [false; 2] }
    }

    /// Tokens to the ranks of their experts.
    pub fn dispatch(self) -> Program {
        self.out(true)
    }

    /// Gradients of tokens to the rows that were summed: along the layout that is there, with nothing beside them.
    pub fn combine_backward(mut self) -> Program {
        self.sizing.row_bytes = self.sizing.home_bytes;
        self.out(false)
    }

    /// With `plans`, choices are sorted, counted and placed first, and what goes with rows moves, too.
    fn out(mut self, plans: bool) -> Program {
        let (placed, rank, at, sizing) = (self.placed, self.rank, self.setting(), self.sizing);
        let noted = plans && placed.notes;
        let arrive = rank.arrivals.is_some();
        let (caller, relay) = (Caller::new(self.paths, placed.chunks), self.relay());
        let mut tables = CallerTables::new(self.paths, placed.chunks);
        tables.rows(&at, &rank.layout, noted);
        if let Some(first) = rank.arrivals {
            tables.to_arrivals(&at, &rank.layout, first, |rows| sizing.landing(rows));
        }
        let own = own(rank, &tables, self.calls);
        let (mut messages, mut handed, mut forward) = (self.relayed(), self.relayed(), rank.forward.clone());
        messages.messages(&at, plans);
        if arrive {
            let (frame, mut runs) = (placed.frame(self.paths.me()), Arrivals::default());
            let numbers = (&rank.counts, &rank.sizes);
            handed.hand_on(&at, &frame, (&mut forward, &mut runs), numbers, |rows| sizing.landing(rows));
        } else {
            handed.forward(&at, &forward, noted);
        }
        let nothing = (&[][..], &[][..]);
        let told = others(&messages, &forward, nothing, self.calls);
        let others = others(&handed, &forward, nothing, self.calls);

        let skeleton = caller.dispatch();
        // What a token needs of planning alone decides which rows are packed; engines that relay need the placement first.
        let packed = self.packed_bytes();
        let early = !(plans && arrive);
        if early {
            self.kernel(packed, 0);
        }
        if plans {
            self.busy(self.hardware.host.sort * placed.choices / 1000);
        }
        self.stage(skeleton.entry.start(), &own);
        self.meet(&relay, &told);
        self.stage(skeleton.entry.finish(), &own);
        if plans {
            let bins = u64::from(placed.bins.count() + self.paths.ranks());
            let place = self.hardware.host.place * placed.choices + self.hardware.host.per_bin * bins;
            self.busy(place / 1000);
        }
        self.mark(Phase::Plan);
        if !early {
            self.kernel(packed, 0);
        }
        if self.device() {
            self.push(Task::Join(Line::Compute));
            self.mark(Phase::Pack);
        }
        self.stage(skeleton.rows.start(), &own);
        if self.paths.rails() {
            let skeleton = relay.skeleton();
            for stage in [&skeleton.headers, &skeleton.forward, &skeleton.done] {
                self.stage(&stage.items, &others);
            }
        }
        self.stage(skeleton.rows.finish(), &own);
        if self.device() {
            self.push(Task::Join(Line::Stream));
        }
        self.mark(Phase::Move);
        if arrive {
            let landed = u64::from(rank.layout.landed) * self.sizing.row_bytes;
            self.kernel(2 * landed, 0);
            self.push(Task::Join(Line::Compute));
            self.mark(Phase::Regroup);
        }
        self.program
    }

    /// Rows back to their tokens.
    pub fn combine(mut self) -> Program {
        let (placed, rank, at) = (self.placed, self.rank, self.setting());
        let parts = Parts { rows: true, weights: false };
        let (caller, relay) = (Caller::new(self.paths, placed.chunks), self.relay());
        let skeleton = caller.ret();
        // Kernels sum where relays do; else engines bring everything home first.
        let pulls = self.device() && self.sizing.partial_bytes.is_none();
        let mut tables = CallerTables::new(self.paths, placed.chunks);
        match pulls {
            true => tables.pull(&at, &rank.layout, 0),
            false => tables.sum(&at, &rank.layout, parts),
        }
        let own = own(rank, &tables, self.calls);
        let (mut messages, mut homing) = (self.relayed(), self.relayed());
        messages.messages(&at, false);
        homing.home(&at, &rank.forward, &placed.bins, parts, 0);
        // Each rank's chunk lies in its own memory.
        let offers = vec![self.sizing.offer(0); self.paths.ranks() as usize];
        let holders: Vec<u32> = (0..self.paths.ranks()).collect();
        let told = others(&messages, &rank.forward, (&holders, &offers), self.calls);
        let others = others(&homing, &rank.forward, (&holders, &offers), self.calls);

        self.stage(skeleton.entry.start(), &own);
        self.meet(&relay, &told);
        self.stage(skeleton.entry.finish(), &own);
        self.mark(Phase::Plan);
        if self.paths.rails() {
            let skeleton = relay.skeleton();
            for stage in [&skeleton.headers, &skeleton.home, &skeleton.done] {
                self.stage(&stage.items, &others);
            }
        }
        if pulls {
            // Engines pull from neighbours while cards bring home the rest.
            self.stage(&caller.pull().items, &own);
            self.stage(&skeleton.home.items, &own);
            self.mark(Phase::Home);
            self.push(Task::Join(Line::Stream));
            self.mark(Phase::Pull);
            let rows = rank.layout.terms.len() as u64 + u64::from(rank.layout.tokens);
            self.kernel(rows * self.sizing.home_bytes, 0);
            self.push(Task::Join(Line::Compute));
        } else {
            self.stage(&skeleton.home.items, &own);
            self.mark(Phase::Home);
            self.stage(&skeleton.sum.items, &own);
        }
        self.mark(Phase::Sum);
        self.program
    }

    fn meet(&mut self, relay: &Relay, told: &Operands) {
        if self.paths.rails() {
            for stage in relay.skeleton().meeting() {
                self.stage(&stage.items, told);
            }
        }
    }

    /// The operations of a stage, in launch order.
    fn stage(&mut self, items: &[Item], operands: &Operands) {
        for &Item { op, .. } in items {
            match op {
                Op::Put { to, slot } | Op::PutRows { to, slot } => self.put(operands, to, slot),
                Op::Signal { to, of, flag, level } => {
                    let signal = Task::Signal { to, of, flag, value: operands.value(level) };
                    self.signal(to, flag, signal);
                }
                Op::Wait { from, flag, level } => {
                    self.called = [false; 2];
                    self.push(Task::Wait { of: from, flag, value: operands.value(level) });
                }
                Op::Reduce { slot } => self.reduce(operands, slot),
            }
        }
    }

    fn put(&mut self, operands: &Operands, to: u32, slot: Slot) {
        let loads = self.loads(operands, to, slot);
        for Load { from, copies, bytes, messages } in loads.into_iter().filter(|load| load.bytes > 0) {
            if !self.paths.near(to) {
                self.program.work.messages += messages;
                self.program.work.far_bytes += bytes;
                self.hand(Line::Card, Task::Send { to, messages, bytes, rest: 0 });
                continue;
            }
            self.program.work.copies += copies;
            match from == to {
                true => self.program.work.own_bytes += bytes,
                false => self.program.work.near_bytes += bytes,
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
        if !self.paths.near(to) {
            return self.hand(Line::Card, signal);
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

    /// The host's call that enqueues a batch of copies (0) or a list of words (1): one until the next wait.
    fn call(&mut self, which: usize) {
        if !std::mem::replace(&mut self.called[which], true) {
            self.busy(self.hardware.engines.per_call);
        }
    }

    fn reduce(&mut self, operands: &Operands, slot: Slot) {
        let sum = &operands.sum;
        let Operand::SumRows { first, count, to } = operands.table[slot.0 as usize] else { return };
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
            Target::Output => home,
            Target::Partials { .. } => self.sizing.partial_bytes.unwrap_or(home),
        };
        self.kernel(own + u64::from(count) * written, near);
        if self.device() {
            self.push(Task::Join(Line::Compute));
        }
    }

    /// A kernel that reads and writes so many bytes of its own memory, and reads so many of neighbours; on the host, a loop.
    fn kernel(&mut self, bytes: u64, loaded: u64) {
        let Hardware { compute, link, .. } = self.hardware;
        self.program.work.kernel_bytes += bytes;
        self.program.work.loaded_bytes += loaded;
        let (own, near) = (at_rate(bytes, compute.rate), at_rate(loaded, link.load_rate));
        match self.device() {
            true => self.hand(Line::Compute, Task::Busy(compute.launch + own.max(near))),
            false => self.busy(own + near),
        }
    }

    /// Bytes that are read and written to pack what leaves; on the host rows leave from where they are.
    fn packed_bytes(&self) -> u64 {
        let runs = self.rank.layout.runs.iter().map(|run| u64::from(run.count)).sum::<u64>();
        let twice = match self.rank.arrivals {
            // Runs to arrivals are those of neighbours once more.
            Some(first) => {
                self.rank.layout.runs[first as usize..].iter().map(|run| u64::from(run.count)).sum()
            }
            None => 0,
        };
        let bytes = (runs - twice) * self.sizing.row_bytes;
        if self.device() { 2 * bytes } else { 0 }
    }

    /// What a slot moves, by the rank in whose memory it lies.
    fn loads(&self, operands: &Operands, to: u32, slot: Slot) -> Vec<Load> {
        let me = self.paths.me();
        let whole = |len: u64| len.div_ceil(self.hardware.card.message_bytes);
        match operands.table[slot.0 as usize] {
            Operand::Spans { first, count } => {
                let mut loads: Vec<Load> = Vec::new();
                for span in operands.spans[first as usize..][..count as usize].iter().filter(|s| s.len > 0) {
                    let from = match span.from {
                        Place::Window { owner, .. } => owner,
                        Place::Input | Place::Notes => me,
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
                let packed = self.device() && from == Place::Input;
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

    fn device(&self) -> bool {
        self.hardware.executor == Executor::Device
    }

    fn busy(&mut self, ns: u64) {
        self.push(Task::Busy(ns));
    }

    fn mark(&mut self, phase: Phase) {
        self.push(Task::Mark(phase));
    }

    fn hand(&mut self, to: Line, task: Task) {
        self.push(Task::Hand(to, Box::new(task)));
    }

    fn push(&mut self, task: Task) {
        self.program.tasks.push_back(task);
    }

    fn relay(&self) -> Relay<'a> {
        Relay::new(self.paths, self.placed.chunks).summing(self.sizing.partial_bytes.is_some())
    }

    fn relayed(&self) -> RelayTables {
        RelayTables::new(self.paths, self.placed.chunks)
    }

    fn setting(&self) -> Setting<'a> {
        let Placed { control, chunks, .. } = self.placed;
        let (paths, sizing, chunks) = (self.paths, self.sizing, *chunks);
        Setting { paths, control, sizing, chunks, parity: self.calls.parity(), far: WindowId::POOL }
    }
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
        sum: Sum { terms, starts, choices, held_by, chunks, ..Sum::default() },
        call: calls.value(),
        last_return: calls.last_return(),
        ..Operands::default()
    }
}

/// Operands of its relay's.
fn others<'t>(
    tables: &'t RelayTables,
    forward: &'t Forward,
    (held_by, chunks): (&'t [u32], &'t [Chunk]),
    calls: Calls,
) -> Operands<'t> {
    let (terms, starts) = (&forward.partials.terms[..], &forward.partials.starts[..]);
    Operands {
        table: &tables.table,
        spans: &tables.spans,
        runs: &forward.runs,
        rows: &forward.rows,
        sum: Sum { terms, starts, held_by, chunks, ..Sum::default() },
        call: calls.value(),
        last_return: calls.last_return(),
        ..Operands::default()
    }
}
