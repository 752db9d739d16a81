//! The tasks of one rank in the making: those of a host executor, and what both executors share.
//!
//! A host does everything on the rank's thread, but what crosses: that its NIC does. What a device
//! does has a [file of its own](super::driver_calls).

use sidelane_core::plan::RowSizes;
use sidelane_core::schedule::{
    FlagValue, Index, Op, Operand, OperandId, Operands, PutSource, SumTarget, TrackOp,
};
use sidelane_core::topology::Paths;

use super::device_tasks::Collected;
use super::events::{Line, Program, Task};
use super::hardware::{Place, at_rate};
use super::{Executor, Hardware, Phase};

/// Bytes that move for one operand from one rank.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    from: u32,
    rows: u64,
    bytes: u64,
    messages: u64,
}

/// One rank's program in the making.
pub(super) struct Lines<'a> {
    pub(super) hardware: &'a Hardware,
    pub(super) paths: Paths<'a>,
    pub(super) sizing: RowSizes,
    pub(super) program: Program,
    /// Device: work that the next call of the driver enqueues.
    pub(super) collected: Collected,
    /// Device: it plans dispatches, and has the metadata of packed rows.
    pub(super) device_plans: bool,
    /// Tokens of the rank.
    pub(super) tokens: u32,
}

impl<'a> Lines<'a> {
    /// Of the rank of these paths, where rows have these sizes.
    pub fn new(hardware: &'a Hardware, paths: Paths<'a>, sizing: RowSizes) -> Self {
        let (program, collected) = (Program::default(), Collected::default());
        Lines { hardware, paths, sizing, program, collected, device_plans: false, tokens: 0 }
    }

    /// All that was asked for.
    pub fn program(self) -> Program {
        self.program
    }

    /// The operations of a stage, in launch order.
    pub fn stage(&mut self, items: &[TrackOp], operands: &Operands) {
        if self.is_device() {
            return self.enqueue_stage(items, operands);
        }
        for &TrackOp { op, .. } in items {
            match op {
                Op::Put { to, operand } | Op::PutRows { to, operand } => self.put(operands, to, operand),
                Op::Signal { to, of, flag, level } => {
                    let signal = Task::Signal { to, of, flag, value: operands.value(level) };
                    match self.paths.same_node(to) {
                        true => self.push(signal),
                        false => self.hand(Line::Nic, signal),
                    }
                }
                // Nothing was offered before the first call.
                Op::Wait { level: FlagValue::LastReturn, .. } => {}
                Op::Wait { from, flag, level } => {
                    self.push(Task::Wait { of: from, flag, value: operands.value(level) });
                }
                Op::Reduce { operand } => self.reduce(operands, operand),
            }
        }
    }

    fn put(&mut self, operands: &Operands, to: u32, operand: OperandId) {
        let loads = self.loads(operands, operand);
        for Load { from, rows, bytes, messages } in loads.into_iter().filter(|load| load.bytes > 0) {
            if !self.paths.same_node(to) {
                self.program.work.messages += messages;
                self.program.work.inter_node_bytes += bytes;
                self.hand(Line::Nic, Task::Send { to, messages, bytes, rest: 0 });
                continue;
            }
            let place = self.place(from, to);
            self.program.work.count(place, rows, bytes);
            self.push(Task::Copy { place, from, to, copies: rows, bytes });
        }
    }

    /// Where a copy between memory of two ranks is.
    pub(super) fn place(&self, from: u32, to: u32) -> Place {
        if from == to { Place::Own } else { Place::Peer }
    }

    /// Sums of outputs, or of partials that return.
    pub(super) fn reduce(&mut self, operands: &Operands, operand: OperandId) {
        let sum = &operands.sum;
        let Operand::SumRows { first, count, to } = operands.table[operand.0 as usize] else { return };
        if count == 0 {
            return;
        }
        let at = |row: u32| sum.starts[row as usize] as usize;
        let (row_bytes, me) = (self.sizing.return_bytes, self.paths.me());
        let (mut own, mut near) = (0, 0);
        for term in &sum.terms[at(first)..at(first + count)] {
            match sum.held_by[term.owner as usize] == me {
                true => own += sum.chunks[term.owner as usize].row_bytes,
                false => near += sum.chunks[term.owner as usize].row_bytes,
            }
        }
        let written = match to {
            SumTarget::Output => row_bytes,
            SumTarget::Partials { .. } => self.sizing.partial_bytes.unwrap_or(row_bytes),
        };
        self.kernel(own + u64::from(count) * written, near);
    }

    /// A kernel that reads and writes this many bytes of its own memory, and reads this many of
    /// local peers; on the host, a loop.
    pub fn kernel(&mut self, bytes: u64, loaded: u64) {
        let Hardware { compute, link, .. } = self.hardware;
        self.program.work.kernel_bytes += bytes;
        self.program.work.loaded_bytes += loaded;
        let (own, near) = (at_rate(bytes, compute.rate), at_rate(loaded, link.load_rate));
        match self.is_device() {
            true => self.launch(own.max(near)),
            false => self.busy(own + near),
        }
    }

    /// Bytes of an operand, by the rank in whose memory they lie.
    fn loads(&self, operands: &Operands, operand: OperandId) -> Vec<Load> {
        let me = self.paths.me();
        match operands.table[operand.0 as usize] {
            Operand::Spans { first, count } => {
                let mut loads: Vec<Load> = Vec::new();
                for span in operands.spans[first as usize..][..count as usize].iter().filter(|s| s.len > 0) {
                    let from = match span.from {
                        PutSource::Window { owner, .. } => owner,
                        PutSource::Input | PutSource::Metadata => me,
                    };
                    if loads.last().is_none_or(|load| load.from != from) {
                        loads.push(Load { from, ..Load::default() });
                    }
                    let load = loads.last_mut().expect("pushed above");
                    load.rows += 1;
                    load.bytes += span.len;
                    load.messages += self.messages(span.len);
                }
                loads
            }
            Operand::Rows { first, count, index, row_bytes, .. } => {
                let mut load = Load { from: me, ..Load::default() };
                for run in &operands.runs[first as usize..][..count as usize] {
                    let bytes = u64::from(run.count + run.pad) * row_bytes;
                    let pieces = match index {
                        Index::Listed => u64::from(run.count),
                        _ => u64::from(run.count > 0),
                    };
                    load.rows += pieces;
                    load.bytes += bytes;
                    load.messages += pieces.max(self.messages(bytes));
                }
                vec![load]
            }
            Operand::Empty | Operand::SumRows { .. } | Operand::SumPulled { .. } | Operand::FetchWeights => {
                Vec::new()
            }
        }
    }

    /// Messages of so many bytes.
    pub(super) fn messages(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.hardware.nic.message_bytes)
    }

    pub fn is_device(&self) -> bool {
        self.hardware.executor == Executor::Device
    }

    pub fn busy(&mut self, ns: u64) {
        self.push(Task::Busy(ns));
    }

    pub fn mark(&mut self, phase: Phase) {
        self.push(Task::Mark(phase));
    }

    pub(super) fn hand(&mut self, to: Line, task: Task) {
        self.push(Task::Hand(to, Box::new(task)));
    }

    pub fn push(&mut self, task: Task) {
        self.program.tasks.push_back(task);
    }
}
