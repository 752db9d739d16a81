//! Plants one bug in a call program: a bug of the driver, as
//! [`schedule::mutate`](crate::schedule::mutate) plants bugs of the skeleton.

use super::{CallProgram, CallStep, RankPrograms, Relays};
use crate::error::CallKind;

/// Change of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallChange {
    /// A step is left out.
    Drop,
    /// A step changes places with the next.
    Swap,
    /// One rank goes on where all others find that the call is refused.
    GoOn {
        /// The rank.
        rank: u32,
    },
}

/// A program of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramId {
    /// The rank's own for calls of this kind, with the steps woven into it.
    Own(CallKind),
    /// The offloaded relay's.
    Relay(CallKind),
    /// Steps behind a dispatch by all-gather.
    Regroup,
}

/// One bug of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallMutation {
    /// Index of the step.
    pub at: u16,
    /// The action.
    pub change: CallChange,
}

impl CallMutation {
    /// All mutations of a program, where a group has this many ranks.
    pub fn all(program: &CallProgram, ranks: u32) -> Vec<CallMutation> {
        let mut all = Vec::new();
        let mut add = |at: usize, change| all.push(CallMutation { at: at as u16, change });
        for at in 0..program.steps.len() {
            add(at, CallChange::Drop);
            if at + 1 < program.steps.len() {
                add(at, CallChange::Swap);
            }
        }
        for cut in &program.cuts {
            (0..ranks).for_each(|rank| add(usize::from(cut.at), CallChange::GoOn { rank }));
        }
        all
    }

    /// The step, and the one behind it.
    pub fn steps(&self, program: &CallProgram) -> (CallStep, Option<CallStep>) {
        let at = usize::from(self.at);
        (program.steps[at], program.steps.get(at + 1).copied())
    }

    /// A program with this bug.
    pub fn plant(&self, program: &CallProgram) -> CallProgram {
        let (at, mut program) = (usize::from(self.at), program.clone());
        match self.change {
            CallChange::Drop => {
                let kept = |&(nth, _): &(usize, &CallStep)| nth != at;
                program.steps =
                    program.steps.iter().enumerate().filter(kept).map(|(_, step)| *step).collect();
                program.half -= u16::from(self.at < program.half);
                let cuts = program.cuts.into_iter().filter(|cut| cut.at != self.at);
                program.cuts = cuts.collect();
                for cut in &mut program.cuts {
                    cut.at -= u16::from(cut.at > self.at);
                }
            }
            CallChange::Swap => {
                program.steps.swap(at, at + 1);
                for cut in &mut program.cuts {
                    match cut.at {
                        nth if nth == self.at => cut.at += 1,
                        nth if nth == self.at + 1 => cut.at -= 1,
                        _ => {}
                    }
                }
            }
            // Only at one rank: see `GoOn` where calls are unrolled.
            CallChange::GoOn { .. } => {}
        }
        program
    }
}

impl RankPrograms {
    /// Plants a bug in the rank's own program for calls of this kind, with what it relays.
    pub fn plant(&mut self, kind: CallKind, bug: CallMutation) {
        let program = bug.plant(self.own(kind, Relays::Inline));
        self.replace(kind, program);
    }

    /// The programs for calls of this kind: the rank's own, and its relay's where that is not woven
    /// in.
    pub fn of(&self, kind: CallKind, relays: Relays) -> Vec<(ProgramId, &CallProgram)> {
        let mut all = vec![(ProgramId::Own(kind), self.own(kind, relays))];
        if self.rails && relays == Relays::Thread {
            all.push((ProgramId::Relay(kind), self.relay.of(kind)));
        }
        all
    }
}
