//! Plants one bug in a call program: a bug of the driver, as
//! [`mutate`](crate::mutate) plants bugs of the skeleton.

use sidelane_core::error::CallKind;
use sidelane_core::schedule::call::{CallProgram, CallStep, RankPrograms, Relays};

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
        for at in 0..program.steps().len() {
            add(at, CallChange::Drop);
            if at + 1 < program.steps().len() {
                add(at, CallChange::Swap);
            }
        }
        for cut in program.cuts() {
            (0..ranks).for_each(|rank| add(usize::from(cut.at), CallChange::GoOn { rank }));
        }
        all
    }

    /// The step, and the one behind it.
    pub fn steps(&self, program: &CallProgram) -> (CallStep, Option<CallStep>) {
        let at = usize::from(self.at);
        (program.steps()[at], program.steps().get(at + 1).copied())
    }

    /// A program with this bug.
    pub fn plant(&self, program: &CallProgram) -> CallProgram {
        let at = usize::from(self.at);
        let (mut steps, mut half) = (program.steps().to_vec(), program.half() as u16);
        let mut cuts = program.cuts().to_vec();
        match self.change {
            CallChange::Drop => {
                steps.remove(at);
                half -= u16::from(self.at < half);
                cuts.retain(|cut| cut.at != self.at);
                for cut in &mut cuts {
                    cut.at -= u16::from(cut.at > self.at);
                }
            }
            CallChange::Swap => {
                steps.swap(at, at + 1);
                for cut in &mut cuts {
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
        CallProgram::new(steps, half, cuts)
    }
}

/// Plants a bug in the rank's own program for calls of this kind, with its relay.
pub fn plant(programs: &mut RankPrograms, kind: CallKind, bug: CallMutation) {
    let program = bug.plant(programs.own(kind, Relays::Inline));
    programs.replace(kind, program);
}

/// The programs for calls of this kind: the rank's own, and its relay's where that is not woven in.
pub fn programs_of(
    programs: &RankPrograms,
    kind: CallKind,
    relays: Relays,
) -> Vec<(ProgramId, &CallProgram)> {
    let mut all = vec![(ProgramId::Own(kind), programs.own(kind, relays))];
    if programs.rails && relays == Relays::Thread {
        all.push((ProgramId::Relay(kind), programs.relay.of(kind)));
    }
    all
}
