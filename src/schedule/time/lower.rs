//! From a call's stages and operands to the tasks of its ranks.
//!
//! The two programs of a rank are one line of tasks, in the launch order of a blocking call: own puts and signals, what is
//! relayed, own waits. So the planner of a device plays them, too. What each operation is, [`Lines`] say.

use super::Phase;
use super::lines::Lines;
use super::machine::Program;
use super::placed::{Placed, Rank};
use super::task::{Line, Task};
use crate::plan::{Arrivals, Chunk, Forward, Sizing};
use crate::schedule::{
    Caller, CallerTables, Calls, Operands, Parts, Relay, RelayTables, Setting, Sum, WindowId,
};
use crate::topology::Paths;

/// A call of one rank.
pub(super) struct Lowering<'a> {
    placed: &'a Placed,
    rank: &'a Rank,
    paths: Paths<'a>,
    sizing: Sizing,
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
        self.out(true)
    }

    /// Gradients of tokens to the rows that were summed: along the layout that is there, with nothing beside them.
    pub fn combine_backward(mut self) -> Program {
        self.sizing.row_bytes = self.sizing.home_bytes;
        self.out(false)
    }

    /// With `plans`, choices are sorted, counted and placed first, and what goes with rows moves, too.
    fn out(self, plans: bool) -> Program {
        let (placed, rank, at, sizing) = (self.placed, self.rank, self.setting(), self.sizing);
        let (mut lines, host) = (self.lines(), &placed.hardware.host);
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
        let packed = if lines.device() { 2 * self.packed_bytes() } else { 0 };
        let early = !(plans && arrive);
        if early {
            lines.kernel(packed, 0);
        }
        if plans {
            lines.busy(host.sort * placed.choices / 1000);
        }
        lines.stage(skeleton.entry.start(), &own);
        self.meet(&mut lines, &relay, &told);
        lines.stage(skeleton.entry.finish(), &own);
        if plans {
            let bins = u64::from(placed.bins.count() + self.paths.ranks());
            let place = host.place * placed.choices + host.per_bin * bins;
            lines.busy(place / 1000);
        }
        lines.mark(Phase::Plan);
        if !early {
            lines.kernel(packed, 0);
        }
        if lines.device() {
            lines.push(Task::Join(Line::Compute));
            lines.mark(Phase::Pack);
        }
        lines.stage(skeleton.rows.start(), &own);
        if self.paths.rails() {
            let skeleton = relay.skeleton();
            for stage in [&skeleton.headers, &skeleton.forward, &skeleton.done] {
                lines.stage(&stage.items, &others);
            }
        }
        lines.stage(skeleton.rows.finish(), &own);
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
        let mut lines = self.lines();
        let parts = Parts { rows: true, weights: false };
        let (caller, relay) = (Caller::new(self.paths, placed.chunks), self.relay());
        let skeleton = caller.ret();
        // Kernels sum where relays do; else engines bring everything home first.
        let pulls = lines.device() && self.sizing.partial_bytes.is_none();
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

        lines.stage(skeleton.entry.start(), &own);
        self.meet(&mut lines, &relay, &told);
        lines.stage(skeleton.entry.finish(), &own);
        lines.mark(Phase::Plan);
        if self.paths.rails() {
            let skeleton = relay.skeleton();
            for stage in [&skeleton.headers, &skeleton.home, &skeleton.done] {
                lines.stage(&stage.items, &others);
            }
        }
        if pulls {
            // Engines pull from neighbours while cards bring home the rest.
            lines.stage(&caller.pull().items, &own);
            lines.stage(&skeleton.home.items, &own);
            lines.mark(Phase::Home);
            lines.push(Task::Join(Line::Stream));
            lines.mark(Phase::Pull);
            let rows = rank.layout.terms.len() as u64 + u64::from(rank.layout.tokens);
            lines.kernel(rows * self.sizing.home_bytes, 0);
            lines.push(Task::Join(Line::Compute));
        } else {
            lines.stage(&skeleton.home.items, &own);
            lines.mark(Phase::Home);
            lines.stage(&skeleton.sum.items, &own);
        }
        lines.mark(Phase::Sum);
        lines.program()
    }

    fn meet(&self, lines: &mut Lines, relay: &Relay, told: &Operands) {
        if self.paths.rails() {
            for stage in relay.skeleton().meeting() {
                lines.stage(&stage.items, told);
            }
        }
    }

    /// Bytes that a kernel packs, to leave; on the host rows leave from where they are.
    fn packed_bytes(&self) -> u64 {
        let runs = &self.rank.layout.runs;
        // Runs to arrivals are those of neighbours once more.
        let once = self.rank.arrivals.map_or(runs.len(), |first| first as usize);
        runs[..once].iter().map(|run| u64::from(run.count)).sum::<u64>() * self.sizing.row_bytes
    }

    fn lines(&self) -> Lines<'a> {
        Lines::new(&self.placed.hardware, self.paths, self.sizing)
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
