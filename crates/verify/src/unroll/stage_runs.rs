//! Walks the straight lines of call programs, and records a scene for each stage.
//!
//! ```text
//!   thread    own      release | publish | entry | agree, judge, describe | rows | metadata
//!             relay    node entered | compose | counts sent | all entered | agree, judge | agreed | headers | ..
//!
//!   inline    release | publish | entry.. | node entered .. agreed | ..entry | agree, judge, describe | rows.. | ..
//! ```
//!
//! The order comes from the [program](sidelane_core::schedule::call_program) that the real call
//! follows. The accesses of planners in windows between two stages are the footprint of the steps
//! between them.
//!
//! **Samples.** Of a group that is too large, the programs of some ranks are unrolled in full. The
//! others are assumed to follow their programs, in the calls in which these name each step.
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

use std::rc::Rc;

use sidelane_core::error::CallKind;
use sidelane_core::schedule::call_program::{Action, CallProgram, Part, RankPrograms, Role, StageId, Work};
use sidelane_core::schedule::{Flag, FlagValue, Line, Op, TrackOp};
use sidelane_core::topology::Paths;

use super::call_sequence::{AssumedEffects, FilledOperands, Raised, SampledCall, Unroller, Until, Word};
use super::{Effect, HostAccess, SeededBug, StageRun, UnrolledOp};
use crate::mutate::{CallChange, ProgramId, programs_of};

/// Accesses and operands of one rank in one call. The order comes from the program.
pub(super) trait Actor {
    /// Accesses of the caller before the call, or before what the call packs on its stream.
    fn begin(&self) -> Vec<HostAccess> {
        Vec::new()
    }

    /// Reads and writes of a step in windows.
    fn footprint(&self, role: Role, action: Action) -> Vec<HostAccess>;

    /// Operands of a stage.
    fn filled(&self, stage: StageId) -> &Rc<FilledOperands>;

    /// Accesses of the caller after the call.
    fn end(&self) -> Vec<HostAccess> {
        Vec::new()
    }

    /// Whether a host that runs ahead takes memory for this call that it gave to readers. It looks,
    /// and takes none that is still read: so where it takes some, its look is a wait that is over.
    fn reclaims(&self) -> bool {
        false
    }
}

/// Name of the scenes by which a stream hears that its host has enqueued what follows.
pub(super) const ENQUEUED: &str = "enqueued";

/// A host that enqueues operations on a stream, and runs ahead of it.
#[derive(Clone, Copy)]
pub(super) struct Enqueuer<'a> {
    paths: Paths<'a>,
    seeded: Option<SeededBug>,
}

impl Enqueuer<'_> {
    /// Whether it waits for its NIC there: it does, unless this bug is seeded.
    fn settles_unless(&self, bug: SeededBug) -> bool {
        self.seeded != Some(bug)
    }
}

/// The scenes of one program of a rank, driven as far as `until`: those of its thread and, where
/// that enqueues, those of its stream.
///
/// **Assumed of streams**:
///
/// ```text
///   a stream begins nothing before its host has enqueued it   every stream is like that, and no program says so: before each
///                                                             stage and each kernel stands a wait for the host (ENQUEUED)
///   the caller's stream and that of copies are one line       `Follow` and `Join` order the two, and have no operation here:
///                                                             a lack of them is found by the flow of values alone
///   what is packed is read as early as it can be              where rows are packed at `Follow`, the caller's accesses stand at
///                                                             `Pack` all the same
/// ```
///
/// A host waits for its stream where the program does. It waits for its NIC only before the stream
/// gives memory back to peers, and where the program joins the caller's work with the call.
pub(super) fn walk(
    programs: &RankPrograms,
    (program, role, until): (&CallProgram, Role, Until),
    enqueues: Option<Enqueuer<'_>>,
    actor: &impl Actor,
) -> Vec<Vec<StageRun>> {
    let cut = match until {
        Until::Tags => program.cut_at(Action::Agree),
        Until::Counts => program.cut_at(Action::Admit),
        Until::End => None,
    };
    let lines = if enqueues.is_some() { 2 } else { 1 };
    let mut lines: Vec<Scenes> = (0..lines).map(|_| Scenes::default()).collect();
    let last = lines.len() - 1;
    lines[0].defers = enqueues.is_some();
    let base = actor.filled(StageId::Release);
    let (mut enqueued, mut reclaims) = (0, actor.reclaims());
    // The host has come so far: its next operations on the stream come after that.
    let mut enqueue = |lines: &mut [Scenes], me: u32, settles: bool| {
        enqueued += 1;
        let (flag, level) = (Flag::Posted, FlagValue::Part(enqueued));
        lines[0].word(ENQUEUED, base, (me, Op::Signal { to: me, of: me, flag, level }));
        lines[0].settle(settles);
        lines[last].word(ENQUEUED, base, (me, Op::Wait { from: me, flag, level }));
    };
    if role == Role::Own && enqueues.is_none() {
        lines[0].touches.extend(actor.begin());
    }
    for step in program.line(cut) {
        let Action::Run(stage, part) = step.action else {
            let mut touches = actor.footprint(step.role, step.action);
            match (step.action, enqueues) {
                // A later look stands behind the release, which waits for the same.
                (Action::Compute(Work::Reclaim), Some(_)) if std::mem::take(&mut reclaims) => {
                    let read = steps(base, programs.stages.items(StageId::Release, Part::Whole));
                    lines[0].push("reclaim", 0, base, read);
                }
                (Action::Compute(work), Some(host)) if work.is_of_stream() => {
                    if matches!(work, Work::Pack | Work::Partials) {
                        touches.splice(..0, actor.begin());
                    }
                    let settles = work == Work::Join && host.settles_unless(SeededBug::EndUnsettled);
                    if settles || !touches.is_empty() {
                        enqueue(&mut lines, host.paths.me(), settles);
                    }
                    lines[last].touches.extend(touches);
                }
                _ => lines[0].touches.extend(touches),
            }
            continue;
        };
        let filled = actor.filled(stage);
        let (items, start) = (programs.stages.items(stage, part), programs.stages.of(stage).start().len());
        let first = if part == Part::Finish { start } else { 0 };
        let Some(host) = enqueues else {
            lines[0].stage(stage, (part, first), filled, steps(filled, items));
            continue;
        };
        // One thread: it comes to each operation when it is done with those before.
        let line = |item: &TrackOp| (item.op.line(host.paths), item.op.frees_sources());
        let mut first = first;
        for run in items.chunk_by(|one, next| line(one) == line(next)) {
            let (line, frees_sources) = line(&run[0]);
            let at = if line == Line::Stream { last } else { 0 };
            if at == last {
                let settles = frees_sources && host.settles_unless(SeededBug::ReadUnsettled);
                enqueue(&mut lines, host.paths.me(), settles);
            }
            lines[at].stage(stage, (part, first), filled, steps(filled, run));
            first += run.len();
        }
    }
    if role == Role::Own {
        lines[last].touches.extend(actor.end());
    }
    lines.into_iter().map(|line| line.end(base)).collect()
}

/// Scenes of one actor, and its accesses before the next.
#[derive(Default)]
struct Scenes {
    all: Vec<StageRun>,
    touches: Vec<HostAccess>,
    /// It does not wait for its NIC behind each scene.
    defers: bool,
}

impl Scenes {
    fn stage(
        &mut self,
        stage: StageId,
        (part, first): (Part, usize),
        filled: &Rc<FilledOperands>,
        steps: Vec<UnrolledOp>,
    ) {
        match self.all.last_mut() {
            // Halves with nothing between them are one stage: an executor need not join its tracks
            // there.
            Some(scene) if part == Part::Finish && scene.name == stage.name() && self.touches.is_empty() => {
                scene.steps.extend(steps);
            }
            _ => self.push(stage.name(), first, filled, steps),
        }
    }

    /// A scene of one operation on a word between a host and its stream.
    fn word(&mut self, name: &'static str, filled: &Rc<FilledOperands>, (track, op): (u32, Op)) {
        self.push(name, 0, filled, steps(filled, &[TrackOp { track, op }]));
    }

    fn push(
        &mut self,
        name: &'static str,
        first: usize,
        filled: &Rc<FilledOperands>,
        steps: Vec<UnrolledOp>,
    ) {
        let (touches, filled) = (std::mem::take(&mut self.touches), Rc::clone(filled) as Rc<_>);
        self.all.push(StageRun { name, first, settled: !self.defers, touches, steps, filled });
    }

    /// Before the last scene it waits for its NIC, if it `settles`.
    fn settle(&mut self, settles: bool) {
        self.all.iter_mut().next_back().into_iter().for_each(|scene| scene.settled |= settles);
    }

    fn end(mut self, filled: &Rc<FilledOperands>) -> Vec<StageRun> {
        self.push("end", 0, filled, Vec::new());
        self.all
    }
}

fn steps(filled: &FilledOperands, items: &[TrackOp]) -> Vec<UnrolledOp> {
    let operands = filled.operands();
    items.iter().map(|item| UnrolledOp::of(item, &operands)).collect()
}

impl Unroller<'_> {
    /// Work of a rank in a call of this kind: its own program and, if separate, its relay's.
    pub(super) fn sampled_call(
        &self,
        me: u32,
        (kind, until): (CallKind, Until),
        actor: &impl Actor,
    ) -> SampledCall {
        let programs = self.programs(me);
        let scenes =
            self.walked(me, (&programs, &programs_of(&programs, kind, self.scenario.relays)), until, actor);
        self.known(me, kind, scenes)
    }

    /// Work of a rank behind a dispatch by all-gather. Its relay has none.
    pub(super) fn regrouped(&self, me: u32, until: Until, actor: &impl Actor) -> SampledCall {
        let programs = self.programs(me);
        let actors = programs_of(&programs, CallKind::Dispatch, self.scenario.relays).len();
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
            let planted = self.scenario.mutation.filter(|(planted, _)| *planted == id).map(|(_, bug)| bug);
            let goes_on = planted.is_some_and(|bug| bug.change == CallChange::GoOn { rank: me });
            let until = if goes_on { Until::End } else { until };
            let role = if matches!(id, ProgramId::Relay(_)) { Role::Relay } else { Role::Own };
            let host = Enqueuer { paths: self.paths(me), seeded: self.scenario.seeded };
            let planted = planted.map(|bug| bug.plant(program));
            let line = (planted.as_ref().unwrap_or(program), role, until);
            scenes.extend(walk(programs, line, self.scenario.enqueues.then_some(host), actor));
        }
        scenes
    }

    fn known(&self, me: u32, kind: CallKind, scenes: Vec<Vec<StageRun>>) -> SampledCall {
        match self.inside(me) {
            true => SampledCall::Inside(kind, scenes),
            false => SampledCall::Outside(self.assumed_effects(scenes.iter().flatten())),
        }
    }

    fn inside(&self, rank: u32) -> bool {
        self.scenario.sample.is_none_or(|sample| sample.contains(&rank))
    }

    fn assumed_effects<'s>(&self, scenes: impl Iterator<Item = &'s StageRun>) -> AssumedEffects {
        let mut assumed = AssumedEffects::default();
        for (scene, step) in scenes.flat_map(|scene| scene.steps.iter().map(move |step| (scene, step))) {
            let (Op::Put { to, .. } | Op::PutRows { to, .. } | Op::Signal { to, .. }) = step.op else {
                continue;
            };
            if !self.inside(to) {
                continue;
            }
            if let Op::Signal { of, flag, .. } = step.op {
                assumed.raised.push(((to, of, flag), step.value));
            }
            let written = scene.effects(step).into_iter().filter_map(|effect| match effect {
                Effect::Copy { to, .. } | Effect::Tag(to) => Some(to),
                _ => None,
            });
            assumed.written.extend(written);
        }
        assumed
    }
}

impl StageRun {
    /// Without the waits for what outsiders have raised.
    pub(super) fn drop_assumed_waits(&mut self, me: u32, raised: &Raised) {
        let comes = |word: Word, value| raised.get(&word).is_some_and(|&raised| raised >= value);
        self.steps.retain(|step| match step.op {
            Op::Wait { from, flag, .. } => !comes((me, from, flag), step.value),
            _ => true,
        });
    }
}
