//! Effect of one step of a stream on the windows, flag words included.

use std::rc::Rc;

use sidelane_core::schedule::stream::StreamProgram;
use sidelane_core::schedule::{Flag, FlagValue, LINE, Op, WindowId};

use super::turns::Turns;
use crate::unroll::effect::Effects;
use crate::unroll::{Bytes, Effect, UnrolledOp};

/// Operands of the slots of one program, and where its microbatch has its windows.
#[derive(Debug)]
pub struct Filled {
    pub program: StreamProgram,
    pub me: u32,
    pub set: u32,
    pub turns: Rc<Turns>,
}

impl Filled {
    fn word(&self, owner: u32, of: u32, flag: Flag) -> Bytes {
        let slots = self.program.slots();
        let at = u64::from(self.set) * slots.flag_bytes() + slots.flag(of, flag);
        Bytes::new(owner, WindowId::CONTROL, at, LINE)
    }
}

/// The value of the words of a call.
pub fn value(call: usize) -> u64 {
    call as u64 + 1
}

/// The call that says it.
fn call_of(value: u64) -> usize {
    (value as usize).saturating_sub(1)
}

impl Effects for Filled {
    fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        let first = u64::from(self.set) * self.program.slots().bytes();
        let shift = |to: Bytes| {
            Bytes::new(to.owner, to.window, first + to.range.start, to.range.end - to.range.start)
        };
        match step.op {
            Op::Put { to, slot } => self
                .program
                .operands()
                .puts(to, slot)
                .into_iter()
                .map(|effect| match effect {
                    Effect::Copy { from, to } => Effect::Copy { from: from.map(shift), to: shift(to) },
                    other => other,
                })
                .collect(),
            Op::Signal { to, of, flag, level: FlagValue::Reset } => {
                vec![Effect::SetsBack { word: self.word(to, of, flag), call: call_of(step.value) }]
            }
            Op::Signal { to, of, flag, level: FlagValue::Credit } => {
                let call = call_of(step.value);
                let after = if of == to { self.turns.rung(call) } else { self.turns.before(call, flag) };
                vec![Effect::Raises { word: self.word(to, of, flag), call, after }]
            }
            Op::Wait { from, flag, level: FlagValue::Credit } => {
                vec![Effect::Awaits { word: self.word(self.me, from, flag), call: call_of(step.value) }]
            }
            _ => Vec::new(),
        }
    }
}
