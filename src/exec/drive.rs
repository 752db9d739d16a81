//! Drives a call: a loop over the steps of its program.
//!
//! Executors differ in what a step is to them. The host moves bytes, an offloaded relay does so in
//! a thread of its own. None knows the order of steps: that is the program's.

use crate::error::{CallError, CallKind, Error};
use crate::memory::access::in_stage;
use crate::schedule::call_program::{Action, CallMachine, CallProgram, Part, Role, StageId, Work};

/// Performs the steps of a call.
pub trait StepExecutor {
    /// Runs a stage, or a part of it.
    ///
    /// # Errors
    /// Those that end the world.
    fn run(&mut self, role: Role, stage: StageId, part: Part) -> Result<(), Error>;

    /// Runs a stage of a collective's skeleton.
    ///
    /// # Errors
    /// Those that end the world; [`CallError::UnknownStep`] where calls have no such stages.
    fn round(&mut self, nth: u8) -> Result<(), Error> {
        Err(CallError::unknown_step(CallKind::Unknown, &Action::Round(nth)).into())
    }

    /// Plans or computes.
    ///
    /// # Errors
    /// Those that end the world. What only this rank cannot do, its tag refuses.
    fn compute(&mut self, role: Role, work: Work) -> Result<(), Error>;

    /// Compares the tags of all ranks.
    ///
    /// # Errors
    /// Why the call is refused: every rank finds that it is.
    fn agree(&mut self, role: Role) -> Result<(), Error>;

    /// Checks that every rank has room.
    ///
    /// # Errors
    /// As [`StepExecutor::agree`].
    fn admit(&mut self, role: Role) -> Result<(), Error>;
}

/// How far a call is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// To the first step that waits for other ranks.
    Half,
    /// To its end.
    End,
}

/// Drives a call; returns why it was refused, if it was.
///
/// # Errors
/// Those that end the world. The call is then incomplete.
pub fn drive(
    machine: &mut CallMachine,
    program: &CallProgram,
    executor: &mut impl StepExecutor,
    until: Until,
) -> Result<Option<Error>, Error> {
    let mut refusal = None;
    while let Some(step) = machine.next(program) {
        if until == Until::Half && machine.at_half(program) {
            break;
        }
        let verdict = match step.action {
            Action::Run(stage, part) => {
                in_stage(stage.name(), || executor.run(step.role, stage, part)).map(Ok)?
            }
            Action::Round(nth) => executor.round(nth).map(Ok)?,
            Action::Compute(work) => executor.compute(step.role, work).map(Ok)?,
            Action::Agree => executor.agree(step.role),
            Action::Admit => executor.admit(step.role),
        };
        match verdict {
            Ok(()) => machine.done(),
            Err(error) => {
                machine.refused(program);
                refusal = Some(error);
            }
        }
    }
    Ok(refusal)
}
