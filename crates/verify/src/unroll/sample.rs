//! Unrolled program of some ranks of a group that is too large to unroll.
//!
//! The programs of the ranks in the sample are unrolled in full. The others are assumed to follow
//! their programs, in the calls in which these name each step.
//!
//! ```text
//!   an outsider's signal to the sample   assumed: the wait ends and gives no knowledge
//!   an outsider's put to the sample      counts as written, by the call in which it is made; who else writes there, and
//!                                        when, is not looked at
//!   what the sample does to outsiders    is not looked at
//! ```
//!
//! So the order of two accesses is derived from fewer signals than there are, never from more: a
//! proof of the sample holds for the whole group, as far as the assumption holds. Two conflicting
//! accesses lie in the memory of one node and are made by ranks of two others at most. So, in a
//! group of equal nodes, three whole nodes show every kind of conflict. Not shown is the absence of
//! a circle of waits that runs through assumed ranks.

use sidelane_core::error::CallKind;
use sidelane_core::schedule::Op;
use sidelane_core::schedule::call::{CallProgram, RankPrograms, Role};

use super::state::{AssumedEffects, Raised, SampledCall, Unroller, Until, Word};
use super::walk::{Actor, walk};
use super::{Effect, StageRun};
use crate::call_mutate::{CallChange, ProgramId, programs_of};

impl Unroller<'_> {
    /// Work of a rank in a call of this kind: its own program and, if separate, its relay's.
    pub(super) fn told(&self, me: u32, (kind, until): (CallKind, Until), actor: &impl Actor) -> SampledCall {
        let programs = self.programs(me);
        let scenes =
            self.walked(me, (&programs, &programs_of(&programs, kind, self.script.relays)), until, actor);
        self.known(me, kind, scenes)
    }

    /// Work of a rank behind a dispatch by all-gather. Its relay has none.
    pub(super) fn regrouped(&self, me: u32, until: Until, actor: &impl Actor) -> SampledCall {
        let programs = self.programs(me);
        let actors = programs_of(&programs, CallKind::Dispatch, self.script.relays).len();
        let regroup = [(ProgramId::Regroup, &programs.regroup)];
        let mut scenes = self.walked(me, (&programs, &regroup), until, actor);
        scenes.resize(actors, Vec::new());
        self.known(me, CallKind::Unknown, scenes)
    }

    /// The scenes of these programs of a rank.
    fn walked(
        &self,
        me: u32,
        (programs, all): (&RankPrograms, &[(ProgramId, &CallProgram)]),
        until: Until,
        actor: &impl Actor,
    ) -> Vec<Vec<StageRun>> {
        let mut scenes = Vec::new();
        for &(id, program) in all {
            let planted = self.script.mutation.filter(|(planted, _)| *planted == id).map(|(_, bug)| bug);
            let goes_on = planted.is_some_and(|bug| bug.change == CallChange::GoOn { rank: me });
            let until = if goes_on { Until::End } else { until };
            let role = if matches!(id, ProgramId::Relay(_)) { Role::Relay } else { Role::Own };
            let (paths, enqueues) = (self.paths(me), self.script.enqueues);
            let planted = planted.map(|bug| bug.plant(program));
            let line = (planted.as_ref().unwrap_or(program), role, until);
            scenes.extend(walk(programs, line, enqueues.then_some(paths), actor));
        }
        scenes
    }

    fn known(&self, me: u32, kind: CallKind, scenes: Vec<Vec<StageRun>>) -> SampledCall {
        match self.inside(me) {
            true => SampledCall::Inside(kind, scenes),
            false => SampledCall::Outside(self.hearsay(scenes.iter().flatten())),
        }
    }

    fn inside(&self, rank: u32) -> bool {
        self.script.sample.is_none_or(|sample| sample.contains(&rank))
    }

    fn hearsay<'s>(&self, scenes: impl Iterator<Item = &'s StageRun>) -> AssumedEffects {
        let mut hearsay = AssumedEffects::default();
        for (scene, step) in scenes.flat_map(|scene| scene.steps.iter().map(move |step| (scene, step))) {
            let (Op::Put { to, .. } | Op::PutRows { to, .. } | Op::Signal { to, .. }) = step.op else {
                continue;
            };
            if !self.inside(to) {
                continue;
            }
            if let Op::Signal { of, flag, .. } = step.op {
                hearsay.raised.push(((to, of, flag), step.value));
            }
            let written = scene.effects(step).into_iter().filter_map(|effect| match effect {
                Effect::Copy { to, .. } | Effect::Tag(to) => Some(to),
                _ => None,
            });
            hearsay.written.extend(written);
        }
        hearsay
    }
}

impl StageRun {
    /// Without the waits for what outsiders have raised.
    pub(super) fn believe(&mut self, me: u32, raised: &Raised) {
        let comes = |word: Word, value| raised.get(&word).is_some_and(|&raised| raised >= value);
        self.steps.retain(|step| match step.op {
            Op::Wait { from, flag, .. } => !comes((me, from, flag), step.value),
            _ => true,
        });
    }
}
