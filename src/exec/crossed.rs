//! What a stream program has a proxy put on rails: lowered once, the same in every call but for the
//! number of the call.

use super::Enqueued;
use super::outbox::Step;
use crate::error::Error;
use crate::lane::Port;
use crate::schedule::stream::StreamProgram;
use crate::schedule::{Level, Op, Operand, Place, WindowId};

/// Puts and signals to other nodes, in order.
#[derive(Debug)]
pub(crate) struct Crossed {
    steps: Vec<Step>,
}

impl Crossed {
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
                        Place::Window { window: WindowId::TWIN, .. } => Step::Span { to, span },
                        _ => Step::Straight { to, span },
                    }));
                }
                Op::Signal { to, of, flag, level: level @ Level::Credit } => {
                    steps.push(Step::Word { to, of, flag, value: operands.value(level) });
                }
                Op::Signal { to, of, flag, .. } => {
                    steps.push(Step::Signal { to, of, flag, value: 0, tag: None });
                }
                _ => {}
            }
        }
        Crossed { steps }
    }

    /// Puts and signals all of it in a call of this number. Returns when nothing is read here any
    /// more.
    ///
    /// # Errors
    /// Of the rails, if a partner takes nothing; the world's cause of death.
    pub fn perform(&self, port: &Port, call: u64) -> Result<(), Error> {
        let mut done = Enqueued::default();
        for &step in &self.steps {
            let step = match step {
                Step::Signal { to, of, flag, tag, .. } => Step::Signal { to, of, flag, value: call, tag },
                other => other,
            };
            step.perform(port, &[], &mut done)?;
        }
        port.settle()
    }

    /// What one call asks of rails, beside what it asks of a stream.
    pub fn counts(&self, beside: Enqueued) -> Enqueued {
        self.steps.iter().fold(beside, |mut counts, step| {
            step.count(&mut counts);
            counts
        })
    }
}
