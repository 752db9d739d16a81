//! Slots on a stream: dispatch and combine of one node that streams carry out alone.

use super::machine::{Machine, Program};
use super::ring::Ring;
use super::task::{Line, Task};
use super::{Hardware, Phase, Timing};
use crate::error::PlanError;
use crate::plan::SlotShape;
use crate::schedule::stream::{Piece, Slots, StreamProgram};
use crate::schedule::{Level, Op};

use super::hardware::at_rate;

/// Times a dispatch and a combine of `ranks` ranks of one node, whose slots have this shape; rows come home in `home_bytes`.
///
/// ```
/// use sidelane::plan::SlotShape;
/// use sidelane::schedule::time::slots;
///
/// let [dispatch, _] = slots(8, SlotShape::new(128, 8, 7168 * 2)?, 7168 * 2, &"h100-cx7".parse()?)?;
/// assert_eq!(dispatch.most.copies, 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`PlanError::BadParameter`] for a group or sizes that slots cannot have, or [hardware](Hardware::check) that nothing is
/// timed on.
pub fn slots(
    ranks: u32,
    shape: SlotShape,
    home_bytes: u64,
    hardware: &Hardware,
) -> Result<[Timing; 2], PlanError> {
    hardware.check()?;
    let slots = Slots::new(ranks, shape.bytes(), u64::from(shape.max_tokens()) * home_bytes)?;
    let rows = u64::from(shape.max_tokens()) * u64::from(ranks);
    // Packed: tokens are read, all slots written. Summed: a partial of each rank is read, tokens written.
    let packed = (u64::from(shape.max_tokens()) + rows) * shape.row_bytes();
    let summed = (rows + u64::from(shape.max_tokens())) * home_bytes;
    let ring = Ring { nodes: 1, members: ranks, whole: true };
    let time = |program: fn(Slots, u32) -> Result<StreamProgram, PlanError>, before, after| {
        let mut machine = Machine::new(ring, hardware);
        for me in 0..ranks {
            machine.load(me, enqueued(&program(slots, me)?, me, (before, after), hardware));
        }
        Ok(machine.run())
    };
    Ok([time(StreamProgram::dispatch, packed, 0)?, time(StreamProgram::combine, 0, summed)?])
}

/// A stream: a kernel, copies, words, a kernel.
fn enqueued(stream: &StreamProgram, me: u32, (before, after): (u64, u64), hardware: &Hardware) -> Program {
    let mut program = Program::default();
    let kernel = |bytes| Task::Busy(hardware.compute.launch + at_rate(bytes, hardware.compute.rate));
    let hand = |line, task| Task::Hand(line, Box::new(task));
    let tasks = &mut program.tasks;
    if before > 0 {
        tasks.extend([
            hand(Line::Compute, kernel(before)),
            Task::Join(Line::Compute),
            Task::Mark(Phase::Pack),
        ]);
    }
    let copies = stream.start().into_iter().chain(stream.finish()).filter_map(|piece| match piece {
        Piece::Copies(copies) => Some(copies),
        Piece::Words(_) => None,
    });
    for copy in copies.flatten() {
        program.work.copies += 1;
        program.work.near_bytes += copy.span.len;
        tasks.push_back(hand(
            Line::Stream,
            Task::Copy { from: me, to: copy.to, copies: 1, bytes: copy.span.len },
        ));
    }
    for item in &stream.stage().items {
        match item.op {
            Op::Signal { to, of, flag, level: Level::Credit } => {
                tasks.push_back(hand(Line::Stream, Task::Signal { to, of, flag, value: 1 }));
            }
            // A word set back is one more that is written; nobody is to see it in the call that is timed.
            Op::Signal { .. } => tasks.push_back(hand(Line::Stream, Task::Busy(hardware.engines.per_word))),
            Op::Wait { from, flag, .. } => {
                tasks.push_back(hand(Line::Stream, Task::Wait { of: from, flag, value: 1 }));
            }
            Op::Put { .. } | Op::PutRows { .. } | Op::Reduce { .. } => {}
        }
    }
    tasks.extend([Task::Join(Line::Stream), Task::Mark(Phase::Move)]);
    // What arrived is checked by a kernel, or summed by one.
    let last = if after > 0 { Phase::Sum } else { Phase::Regroup };
    tasks.extend([hand(Line::Compute, kernel(after)), Task::Join(Line::Compute), Task::Mark(last)]);
    program.work.kernel_bytes = before + after;
    program
}
