//! Walks the straight lines of call programs, and records a scene for each stage.
//!
//! ```text
//!   thread    own      release | publish | entry | agree, judge, describe | rows | metadata
//!             relay    node entered | compose | counts sent | all entered | agree, judge | agreed | headers | ..
//!
//!   inline    release | publish | entry.. | node entered .. agreed | ..entry | agree, judge, describe | rows.. | ..
//! ```
//!
//! The order comes from the [program](crate::schedule::call) that the real call follows. What planners touch in windows
//! between two stages is the footprint of the steps between them.

use std::rc::Rc;

use super::filled::Filled;
use super::tell::Until;
use super::{Scene, Step, Touch};
use crate::schedule::call::{Action, CallProgram, Part, RankPrograms, Role, StageId};
use crate::schedule::{Item, Op};

/// Accesses and operands of one rank in one call. The order comes from the program.
pub(super) trait Actor {
    /// Accesses of the caller before the call.
    fn begin(&self) -> Vec<Touch> {
        Vec::new()
    }

    /// Reads and writes of a step in windows.
    fn footprint(&self, role: Role, action: Action) -> Vec<Touch>;

    /// Operands of a stage.
    fn filled(&self, stage: StageId) -> &Rc<Filled>;

    /// Accesses of the caller after the call.
    fn end(&self) -> Vec<Touch>;
}

/// The scenes of one program of a rank, driven as far as `until`.
pub(super) fn walk(
    programs: &RankPrograms,
    (program, role, until): (&CallProgram, Role, Until),
    actor: &impl Actor,
) -> Vec<Scene> {
    let cut = match until {
        Until::Tags => program.cut_at(Action::Agree),
        Until::Counts => program.cut_at(Action::Admit),
        Until::End => None,
    };
    let mut scenes: Vec<Scene> = Vec::new();
    let mut touches = if role == Role::Own { actor.begin() } else { Vec::new() };
    for step in program.line(cut) {
        let Action::Run(stage, part) = step.action else {
            touches.extend(actor.footprint(step.role, step.action));
            continue;
        };
        let filled = actor.filled(stage);
        let steps = steps(filled, programs.stages.items(stage, part));
        match scenes.last_mut() {
            // Halves with nothing between them are one stage: an executor need not join its tracks there.
            Some(scene) if part == Part::Finish && scene.name == stage.name() && touches.is_empty() => {
                scene.steps.extend(steps);
            }
            _ => {
                let first = if part == Part::Finish { programs.stages.of(stage).start().len() } else { 0 };
                let (name, filled) = (stage.name(), Rc::clone(filled) as Rc<_>);
                scenes.push(Scene { name, first, touches: std::mem::take(&mut touches), steps, filled });
            }
        }
    }
    if role == Role::Own {
        touches.extend(actor.end());
    }
    let filled = Rc::clone(actor.filled(StageId::Release));
    scenes.push(Scene { name: "end", first: 0, touches, steps: Vec::new(), filled });
    scenes
}

fn steps(filled: &Filled, items: &[Item]) -> Vec<Step> {
    let operands = filled.operands();
    let value = |op| match op {
        Op::Signal { level, .. } | Op::Wait { level, .. } => operands.value(level),
        _ => 0,
    };
    items.iter().map(|&Item { track, op }| Step { track, set: 0, op, value: value(op) }).collect()
}
