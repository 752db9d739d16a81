//! What a stream program has a proxy put on rails: lowered once, the same in every call but for the
//! number of the call.

use super::EnqueueCounts;
use super::outbox::NetOp;
use crate::error::Error;
use crate::lane::Port;
use crate::schedule::stream::StreamProgram;
use crate::schedule::{FlagValue, Op, Operand, PutSource, WindowId};

/// Puts and signals to other nodes, in order.
#[derive(Debug)]
pub(crate) struct ProxyOps {
    steps: Vec<NetOp>,
}

impl ProxyOps {
    /// Those of a program; none if there is one node.
    pub fn of(program: &StreamProgram) -> Self {
        let operands = program.operands();
        let mut steps = Vec::new();
        for item in program.proxied().iter().flat_map(|proxied| &proxied.out.items) {
            match item.op {
                Op::Put { to, slot } => {
                    let Operand::Spans { first, count } = operands.table[slot.0 as usize] else { continue };
                    let spans = &operands.spans[first as usize..][..count as usize];
                    steps.extend(spans.iter().map(|&span| match span.from {
                        PutSource::Window { window: WindowId::HOST_STAGING, .. } => NetOp::Span { to, span },
                        _ => NetOp::Straight { to, span },
                    }));
                }
                Op::Signal { to, of, flag, level: level @ FlagValue::Credit } => {
                    steps.push(NetOp::Word { to, of, flag, value: operands.value(level) });
                }
                Op::Signal { to, of, flag, .. } => {
                    steps.push(NetOp::Signal { to, of, flag, value: 0, tag: None });
                }
                _ => {}
            }
        }
        ProxyOps { steps }
    }

    /// Puts and signals all of it in a call of this number. Returns when nothing is read here any
    /// more.
    ///
    /// # Errors
    /// Of the rails, if a partner takes nothing; the world's cause of death.
    pub fn perform(&self, port: &Port, call: u64) -> Result<(), Error> {
        let mut done = EnqueueCounts::default();
        for &step in &self.steps {
            let step = match step {
                NetOp::Signal { to, of, flag, tag, .. } => NetOp::Signal { to, of, flag, value: call, tag },
                other => other,
            };
            step.perform(port, &[], &mut done)?;
        }
        port.settle()
    }

    /// What one call asks of rails, beside what it asks of a stream.
    pub fn counts(&self, beside: EnqueueCounts) -> EnqueueCounts {
        self.steps.iter().fold(beside, |mut counts, step| {
            step.count(&mut counts);
            counts
        })
    }
}
