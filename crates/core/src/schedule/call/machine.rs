//! Steps a call program. No I/O, no clock, no allocation: drivers ask for the next step and say
//! what became of it.

use super::{CallProgram, CallStep};

/// Position of one rank in one call.
///
/// A pending call is a machine that stopped at the half of its program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallMachine {
    at: u16,
    /// Position in [`CallProgram::cuts`] of the cut that was taken.
    cut: Option<u16>,
}

impl CallMachine {
    /// The step to perform now; `None` when the call is over.
    pub fn next(&self, program: &CallProgram) -> Option<CallStep> {
        let steps = match self.cut {
            None => &program.steps,
            Some(cut) => &program.cuts.get(usize::from(cut))?.tail,
        };
        steps.get(usize::from(self.at)).copied()
    }

    /// The step was performed.
    pub fn done(&mut self) {
        self.at += 1;
    }

    /// The step found that the call is refused: what remains is the tail of its cut.
    pub fn refused(&mut self, program: &CallProgram) {
        let cut = program.cuts.iter().position(|cut| self.cut.is_none() && cut.at == self.at);
        // A step that is not a cut ends the call.
        *self = CallMachine { at: 0, cut: Some(cut.map_or(u16::MAX, |cut| cut as u16)) };
    }

    /// Whether the next step is the first of `finish`.
    pub fn at_half(&self, program: &CallProgram) -> bool {
        self.cut.is_none() && self.at == program.half
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Action, CallShape, Engines, Relays};
    use super::*;

    fn steps(program: &CallProgram, refuse: Option<Action>) -> Vec<CallStep> {
        let (mut machine, mut seen) = (CallMachine::default(), Vec::new());
        while let Some(step) = machine.next(program) {
            seen.push(step);
            if refuse == Some(step.action) { machine.refused(program) } else { machine.done() }
        }
        seen
    }

    #[test]
    fn every_straight_line_is_walked_of_a_program() {
        let shape = CallShape { rails: true, relays: Relays::Inline, engines: Engines::default() };
        let program = shape.dispatch();
        assert_eq!(steps(&program, None), program.steps());
        for cut in program.cuts() {
            let action = program.steps()[usize::from(cut.at)].action;
            assert_eq!(steps(&program, Some(action)), program.line(Some(cut)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn calls_have_one_half() {
        let shape = CallShape { rails: false, relays: Relays::Inline, engines: Engines::default() };
        let program = shape.ret();
        let mut machine = CallMachine::default();
        let halves = std::iter::from_fn(|| {
            machine.next(&program)?;
            let half = machine.at_half(&program);
            machine.done();
            Some(half)
        });
        assert_eq!(halves.filter(|half| *half).count(), 1);
    }
}
