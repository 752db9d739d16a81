//! The requests of a call to the copy engines of a device: the steps of its program, counted.
//!
//! A copy engine neither gathers nor adds. So a kernel first packs rows of the call's own tensors
//! in the order in which they leave, and each run of them is one copy. Relayed rows lie in a block,
//! and each stretch of it is one copy. A stage goes to one stream in groups, each a batch of copies
//! and a list of memory operations behind it:
//!
//! ```text
//!   stage    Put a  Signal a  Put b  Signal b  Wait a  Wait b  Put c  Signal c
//!   stream   | batch: a b | list: signal a, signal b, wait a, wait b | batch: c | list: signal c |
//! ```
//!
//! Not counted are kernels, own rows (the packing kernel leaves them in place) and row metadata (it
//! comes with the counts, through the host). NICs move rows to other nodes: of these only bytes are
//! counted.

use std::ops::AddAssign;

use sidelane_core::error::CallKind;
use sidelane_core::plan::{DispatchLayout, RelayPlan};
use sidelane_core::schedule::Effect;
use sidelane_core::schedule::call::{Action, Engines, RankPrograms, Relays, Role, StageId};
use sidelane_core::schedule::stream::StreamProgram;
use sidelane_core::schedule::{CallerTables, Calls, FillContext, Op, Operands, RelayTables, TrackOp};

/// Requests of one rank to its engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyEngineWork {
    /// Copies to ranks of the same node, and to this rank itself of relayed rows.
    pub copies: u64,
    /// Bytes that these move.
    pub bytes: u64,
    /// Calls that enqueue them, of [`MAX_BATCH`](CopyEngineWork::MAX_BATCH) copies at most.
    pub batches: u64,
    /// Memory operations: words written and awaited.
    pub words: u64,
    /// Calls that enqueue these, of [`MAX_BATCH`](CopyEngineWork::MAX_BATCH) at most.
    pub lists: u64,
    /// Bytes to other nodes.
    pub nic_bytes: u64,
}

impl CopyEngineWork {
    /// A driver takes no more copies, or memory operations, at once.
    pub const MAX_BATCH: u64 = 255;

    /// Of a dispatch, combine or release of slots.
    pub fn of_stream(program: &StreamProgram, me: u32) -> Self {
        Self::of_items(&program.stage().items, &program.operands(), me, |_| true)
    }

    /// Of the rows of a dispatch that is placed so, at a rank that relays `forward`.
    pub fn of_dispatch(at: &FillContext, layout: &DispatchLayout, forward: &RelayPlan) -> Self {
        let (paths, me) = (at.paths, at.paths.me());
        let near = |peer| paths.same_node(peer);
        let mut own = CallerTables::new(paths, at.chunks);
        own.rows(at, layout, false);
        let (row_bytes, calls) = (at.sizing.row_bytes, Calls::new(0));
        let rows = Operands { runs: &layout.runs, rows: &layout.rows, ..own.operands(calls, row_bytes) };
        let mut relayed = RelayTables::new(paths, at.chunks);
        relayed.forward(at, forward, false);
        let blocks =
            Operands { runs: &forward.runs, rows: &forward.rows, row_bytes, ..relayed.operands(calls) };
        let programs = RankPrograms::new(paths, at.chunks, false, Engines::default());
        let mut work = CopyEngineWork::default();
        for step in programs.own(CallKind::Dispatch, Relays::Inline).line(None) {
            // Entries and counts are the host's.
            let (operands, stage, part) = match (step.role, step.action) {
                (Role::Own, Action::Run(StageId::Rows, part)) => (&rows, StageId::Rows, part),
                (Role::Relay, Action::Run(stage @ (StageId::Headers | StageId::RelayRows), part)) => {
                    (&blocks, stage, part)
                }
                _ => continue,
            };
            work += Self::of_items(programs.stages.items(stage, part), operands, me, near);
        }
        work
    }

    /// Groups of consecutive operations of rank `me`. A group begins with the first put behind a
    /// wait.
    fn of_items(items: &[TrackOp], operands: &Operands, me: u32, near: impl Fn(u32) -> bool) -> Self {
        let (mut all, mut group, mut waited) = (CopyEngineWork::default(), CopyEngineWork::default(), false);
        for item in items {
            match item.op {
                Op::Put { to, slot } | Op::PutRows { to, slot } => {
                    let copies = operands.puts(to, slot).into_iter().filter_map(|effect| match effect {
                        Effect::Copy { from, to: bytes } if !bytes.range.is_empty() => {
                            (to != me || from.is_some()).then_some(bytes.range.end - bytes.range.start)
                        }
                        _ => None,
                    });
                    for bytes in copies {
                        if !near(to) {
                            group.nic_bytes += bytes;
                            continue;
                        }
                        if std::mem::take(&mut waited) {
                            all += std::mem::take(&mut group).enqueued();
                        }
                        group.copies += 1;
                        group.bytes += bytes;
                    }
                }
                // A NIC's signal goes with its rows.
                Op::Signal { to, .. } => group.words += u64::from(near(to)),
                Op::Wait { .. } => {
                    group.words += 1;
                    waited = true;
                }
                Op::Reduce { .. } => {}
            }
        }
        all += group.enqueued();
        all
    }

    /// One group, with the calls that it takes.
    fn enqueued(self) -> Self {
        let calls = |number: u64| number.div_ceil(Self::MAX_BATCH);
        CopyEngineWork { batches: calls(self.copies), lists: calls(self.words), ..self }
    }
}

impl AddAssign for CopyEngineWork {
    fn add_assign(&mut self, other: CopyEngineWork) {
        self.copies += other.copies;
        self.bytes += other.bytes;
        self.batches += other.batches;
        self.words += other.words;
        self.lists += other.lists;
        self.nic_bytes += other.nic_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidelane_core::schedule::call::SlotCall;
    use sidelane_core::schedule::stream::Slots;
    use sidelane_core::schedule::{Flag, FlagValue, Operand, OperandId, PutSource, SpanCopy, WindowId};

    /// A stage of rank 9 over spans of 16 bytes.
    fn work(ops: &[Op], near: impl Fn(u32) -> bool) -> CopyEngineWork {
        let from = PutSource::Window { owner: 9, window: WindowId::POOL };
        let span = SpanCopy { from, from_offset: 0, to: WindowId::POOL, to_offset: 0, len: 16 };
        let table = [Operand::Spans { first: 0, count: 1 }];
        let operands = Operands { table: &table, spans: &[span], ..Operands::default() };
        let items: Vec<_> = ops.iter().map(|&op| TrackOp { track: 0, op }).collect();
        CopyEngineWork::of_items(&items, &operands, 9, near)
    }

    fn put(to: u32) -> Op {
        Op::Put { to, slot: OperandId(0) }
    }

    fn signal(to: u32) -> Op {
        Op::Signal { to, of: 9, flag: Flag::Landed, level: FlagValue::Call }
    }

    fn wait(from: u32) -> Op {
        Op::Wait { from, flag: Flag::Landed, level: FlagValue::Call }
    }

    #[test]
    fn a_batch_ends_where_a_copy_has_to_wait() {
        let ops = [put(0), signal(0), put(1), signal(1), wait(0), wait(1), put(2), signal(2)];
        let CopyEngineWork { copies, bytes, batches, words, lists, nic_bytes } = work(&ops, |_| true);
        assert_eq!((copies, bytes, batches, words, lists, nic_bytes), (3, 48, 2, 5, 2, 0));
    }

    #[test]
    fn what_goes_to_other_nodes_is_a_nics_and_its_signal_too() {
        let ops = [put(0), signal(0), put(5), signal(5), wait(5)];
        let CopyEngineWork { copies, words, nic_bytes, .. } = work(&ops, |peer| peer < 5);
        assert_eq!((copies, words, nic_bytes), (1, 2, 16));
    }

    #[test]
    fn a_driver_takes_255_at_once() {
        let ops: Vec<Op> = (0..256).map(put).chain((0..255).map(signal)).collect();
        let CopyEngineWork { copies, batches, words, lists, .. } = work(&ops, |_| true);
        assert_eq!((copies, batches, words, lists), (256, 2, 255, 1));
    }

    #[test]
    fn slots_ask_for_a_copy_and_three_words_a_peer() {
        // The largest group that one list serves.
        let slots = Slots::new(86, 256, 256).unwrap();
        let work = CopyEngineWork::of_stream(&StreamProgram::new(SlotCall::Dispatch, slots, 3).unwrap(), 3);
        assert_eq!((work.copies, work.batches, work.bytes), (85, 1, 85 * 256));
        assert_eq!((work.words, work.lists), (3 * 85, 1));
        let release = CopyEngineWork::of_stream(&StreamProgram::new(SlotCall::Release, slots, 3).unwrap(), 3);
        assert_eq!((release.copies, release.batches, release.words), (0, 0, 3 * 85));
    }
}
