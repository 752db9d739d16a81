//! Streams of a rank on the queues of its device: what blocks what, when a wait is blocked.
//!
//! ```text
//!   rank 0, one queue    dispatch a: signal a, wait a | dispatch b: signal b, wait b
//!   rank 1, one queue    dispatch b: signal b, wait b | dispatch a: signal a, wait a
//!                                              ^ rank 0 signals b behind its wait for a, rank 1 signals a behind this one
//! ```
//!
//! If all ranks enqueue in one order, no rank waits forever, whatever streams share a queue at each
//! rank. To see this, take the first call in that order that is not over everywhere. All earlier
//! calls are done, so each rank has enqueued and run its puts and signals, which come before its
//! waits. If two ranks differ, take the first place in a queue where they do: each waits there for
//! an operation that the other has behind its own wait.

use std::collections::HashMap;
use std::rc::Rc;

use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::schedule::stream::{Slots, StreamProgram};
use sidelane_core::schedule::{Flag, Op};

use super::StreamCall;
use crate::unroll::effect::Effects;
use crate::unroll::{ActorCall, Effect, Role, StageRun, UnrolledOp, UnrolledProgram};

/// Signals and waits alone: the bytes that they guard do not matter here.
#[derive(Debug)]
struct Bare;

impl Effects for Bare {
    fn effects(&self, _: &UnrolledOp) -> Vec<Effect> {
        Vec::new()
    }
}

/// Each rank enqueues its calls in an order of its own, each microbatch on a stream of its own: a
/// track.
pub(in crate::unroll) fn fold(
    slots: Slots,
    orders: &[Vec<StreamCall>],
) -> Result<UnrolledProgram, PlanError> {
    let parts = (0..).zip(orders).map(|(rank, order)| {
        let mut turns: HashMap<(u32, Flag), u64> = HashMap::new();
        let mut steps = Vec::new();
        for &call in order {
            let (track, program) = (call.microbatch(), StreamProgram::new(call.call(), slots, rank)?);
            let turn = turns.entry((track, call.call().flag())).or_default();
            *turn += 1;
            let ops = program.stage().items.iter().map(|item| item.op);
            let step = |op| UnrolledOp { track, set: track, op, value: *turn };
            steps.extend(ops.filter(|op| !matches!(op, Op::Put { .. })).map(step).filter(|s| !s.sets_back()));
        }
        let scene = StageRun { name: "queue", first: 0, touches: Vec::new(), steps, filled: Rc::new(Bare) };
        Ok(ActorCall { rank, role: Role::Own, call: 0, kind: CallKind::Unknown, scenes: vec![scene] })
    });
    Ok(UnrolledProgram {
        ranks: slots.ranks(),
        actors: orders.len() as u32,
        control_bytes: 0,
        pool_bytes: 0,
        calls: vec![parts.collect::<Result<_, _>>()?],
        assumed: Vec::new(),
    })
}
