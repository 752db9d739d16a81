//! What each operation is to the lines of a rank.
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

use sidelane_core::plan::RowSizes;
use sidelane_core::schedule::{Flag, Index, Op, Operand, OperandId, Operands, PutSource, SumTarget, TrackOp};
use sidelane_core::topology::Paths;

use super::hardware::at_rate;
use super::machine::Program;
use super::task::{Line, Task};
use super::{Executor, Hardware, Phase};

/// What moves for one slot, by where it comes from.
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

    fn put(&mut self, operands: &Operands, to: u32, slot: OperandId) {
        let loads = self.loads(operands, to, slot);
        for Load { from, copies, bytes, messages } in loads.into_iter().filter(|load| load.bytes > 0) {
            if !self.paths.same_node(to) {
                self.program.work.messages += messages;
                self.program.work.inter_node_bytes += bytes;
                self.hand(Line::Card, Task::Send { to, messages, bytes, rest: 0 });
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

    /// The host's call that enqueues a batch of copies (0) or a list of words (1): one until the
    /// next wait.
    fn call(&mut self, which: usize) {
        if !std::mem::replace(&mut self.called[which], true) {
            self.busy(self.hardware.engines.per_call);
        }
    }

    fn reduce(&mut self, operands: &Operands, slot: OperandId) {
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

    /// Bytes of a slot, by the rank in whose memory they lie.
    fn loads(&self, operands: &Operands, to: u32, slot: OperandId) -> Vec<Load> {
        let me = self.paths.me();
        let whole = |len: u64| len.div_ceil(self.hardware.nic.message_bytes);
        match operands.table[slot.0 as usize] {
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
