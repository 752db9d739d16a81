//! Slots on a stream: dispatch and combine of one node that streams carry out alone.

use sidelane_core::error::PlanError;
use sidelane_core::plan::SlotShape;
use sidelane_core::schedule::call_program::{Action, Part, SlotCall, Work};
use sidelane_core::schedule::stream_program::{PeerCopy, Slots, StreamProgram};
use sidelane_core::schedule::{FlagValue, Op, TrackOp, copy_batches};

use super::events::{Line, Machine, Program, Ring, Task};
use super::hardware::{Place, at_rate};
use super::{Hardware, Phase, Timing};

/// Times a dispatch and a combine of `ranks` ranks of one node, whose slots have this shape;
/// returned rows take `return_bytes`.
///
/// ```
/// use sidelane_core::plan::SlotShape;
/// use sidelane_model::time::slots;
///
/// let [dispatch, _] = slots(8, SlotShape::new(128, 8, 7168 * 2)?, 7168 * 2, &"h100-cx7".parse()?)?;
/// assert_eq!(dispatch.max.copies, 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`PlanError::BadParameter`] for an invalid group or size of slots, or for
/// [hardware](Hardware::check) that cannot be timed.
pub fn slots(
    ranks: u32,
    shape: SlotShape,
    return_bytes: u64,
    hardware: &Hardware,
) -> Result<[Timing; 2], PlanError> {
    hardware.check()?;
    let slots = Slots::new(ranks, shape.bytes(), u64::from(shape.max_tokens()) * return_bytes)?;
    let rows = u64::from(shape.max_tokens()) * u64::from(ranks);
    // Packed: tokens are read, all slots written. Summed: a partial of each rank is read, tokens
    // written.
    let packed = (u64::from(shape.max_tokens()) + rows) * shape.row_bytes();
    let summed = (rows + u64::from(shape.max_tokens())) * return_bytes;
    let ring = Ring { nodes: 1, members: ranks, whole: true };
    let time = |call: SlotCall, kernel_bytes| {
        let mut machine = Machine::new(ring, hardware);
        for me in 0..ranks {
            let program = StreamProgram::new(call, slots, me)?;
            machine.load(me, enqueued(call, &program, me, kernel_bytes, hardware));
        }
        Ok(machine.run())
    };
    Ok([time(SlotCall::Dispatch, packed)?, time(SlotCall::Combine, summed)?])
}

/// A call on a stream, by its program. A kernel packs or sums so many bytes.
fn enqueued(
    call: SlotCall,
    stream: &StreamProgram,
    me: u32,
    kernel_bytes: u64,
    hardware: &Hardware,
) -> Program {
    let mut program = Program::default();
    program.work.kernel_bytes = kernel_bytes;
    let steps = call.program();
    for step in steps.line(None) {
        let (phase, bytes) = match step.action {
            Action::Run(_, part) => {
                move_part(&mut program, stream, part, me, hardware);
                continue;
            }
            Action::Compute(Work::Pack) => (Phase::Pack, kernel_bytes),
            Action::Compute(Work::Check) => (Phase::Regroup, 0),
            Action::Compute(Work::Sum) => (Phase::Sum, kernel_bytes),
            // Experts leave partial rows where they are sent from.
            _ => continue,
        };
        program.work.kernels += 1;
        let kernel = Task::Busy(hardware.compute.launch + at_rate(bytes, hardware.compute.rate));
        let hand = Task::Hand(Line::Caller, Box::new(kernel));
        program.tasks.extend([hand, Task::Join(Line::Caller), Task::Mark(phase)]);
    }
    program
}

/// Operations that a stream takes at once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Piece {
    Batch,
    List,
}

/// One half of the stage, or both: batches of copies, and lists of words. The second ends when the
/// stream has done all of it.
fn move_part(program: &mut Program, stream: &StreamProgram, part: Part, me: u32, hardware: &Hardware) {
    let (engines, mut under_way) = (&hardware.engines, None);
    // Sizes of the batches to come, and copies that the one in flight still takes.
    let (mut sizes, mut room) = (copy_batches(usize::MAX), 0);
    let mut hand = |program: &mut Program, piece, task| {
        let is_batch = piece == Piece::Batch;
        let is_new = under_way.replace(piece) != Some(piece);
        if is_batch && is_new {
            (sizes, room) = (copy_batches(usize::MAX), 0);
        }
        if is_new || is_batch && room == 0 {
            room = if is_batch { sizes.next().unwrap_or(0) } else { 0 };
            program.work.batches += u64::from(is_batch);
            let begins = if is_batch { engines.per_batch } else { engines.per_list };
            program.tasks.push_back(Task::Hand(Line::Stream, Box::new(Task::Busy(begins))));
        }
        room = room.saturating_sub(1);
        program.tasks.push_back(Task::Hand(Line::Stream, Box::new(task)));
    };
    for TrackOp { op, .. } in stream.stage().part(part) {
        for PeerCopy { to, span } in stream.copies(op) {
            program.work.count(Place::Peer, 1, span.len);
            let copy = Task::Copy { place: Place::Peer, from: me, to, copies: 1, bytes: span.len };
            hand(program, Piece::Batch, copy);
        }
        let word = match *op {
            Op::Signal { to, of, flag, level: FlagValue::Credit } => Task::Signal { to, of, flag, value: 1 },
            // No rank sees a word that is reset in the timed call.
            Op::Signal { .. } => Task::Busy(engines.per_word),
            Op::Wait { from, flag, .. } => Task::Wait { of: from, flag, value: 1 },
            Op::Put { .. } | Op::PutRows { .. } | Op::Reduce { .. } => continue,
        };
        program.work.memory_ops += 1;
        hand(program, Piece::List, word);
    }
    if part != Part::Start {
        program.tasks.extend([Task::Join(Line::Stream), Task::Mark(Phase::Move)]);
    }
}
