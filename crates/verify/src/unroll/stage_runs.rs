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
use sidelane_core::schedule::call_program::{
    Action, CallProgram, CallStep, Part, RankPrograms, Role, StageId, StageTensor, Work,
};
use sidelane_core::schedule::{Caller, Flag, FlagValue, Line, Op, TrackOp};
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

    /// Tables of a step that the host writes, and a stream brings to the device.
    fn sent(&self, _: Work) -> Vec<SentTable> {
        Vec::new()
    }

    /// Reads of the kernel that places own rows, beside them.
    fn own_placed(&self) -> Vec<HostAccess> {
        Vec::new()
    }

    /// Stage whose words a step of a host that runs ahead looks at, and finds raised: it takes
    /// memory for this call that it gave to readers. It looks, and takes none that is still read,
    /// so where it takes some, its look is a wait that is over.
    fn finds_raised(&self, _: Work) -> Option<StageId> {
        None
    }

    /// Operands of a stage.
    fn filled(&self, stage: StageId) -> &Rc<FilledOperands>;

    /// Accesses of the caller after the call.
    fn end(&self) -> Vec<HostAccess> {
        Vec::new()
    }
}

/// A table on its way from the host to the device.
pub(super) struct SentTable {
    /// Write of the host.
    pub written: HostAccess,
    /// Reads and writes of the stream that copies it.
    pub copied: Vec<HostAccess>,
}

/// Name of the scenes by which a stream hears that its host has enqueued what follows.
pub(super) const ENQUEUED: &str = "enqueued";

/// A host that enqueues operations on two streams, and runs ahead of them.
#[derive(Clone, Copy)]
pub(super) struct Enqueuer<'a> {
    paths: Paths<'a>,
    /// The device plans dispatches, so kernels place metadata of own rows, too.
    plans_on_device: bool,
    seeded: Option<SeededBug>,
}

impl Enqueuer<'_> {
    /// Whether it waits for its NIC there: it does, unless this bug is seeded.
    fn settles_unless(&self, bug: SeededBug) -> bool {
        self.seeded != Some(bug)
    }

    /// The line of an operation. Kernels of the caller's stream place own rows, and that stream
    /// says that it has reached a call.
    fn line(&self, stage: StageId, op: Op) -> usize {
        let me = self.paths.me();
        let placed = |operand| self.plans_on_device || operand == Caller::new(self.paths, 1).rows(me);
        let own = stage.tensor() == StageTensor::Rows
            && matches!(op, Op::PutRows { to, operand } if to == me && placed(operand));
        match op.line(self.paths) {
            Line::Host => HOST,
            Line::Stream if own || stage.is_of_caller() => CALLER,
            Line::Stream => COPIES,
        }
    }

    /// Operations of a stage, by position, in the order in which the host comes to them. It queues
    /// rows that cross, since NICs read them when streams have come so far, and all that crosses
    /// behind them. It serves the queue before its own next wait or signal within the node, or at
    /// the end of the stage.
    fn in_turn(&self, stage: StageId, items: &[TrackOp]) -> Vec<(usize, Reached)> {
        let far = |rank: u32| rank != self.paths.me() && !self.paths.same_node(rank);
        let (mut all, mut queue) = (Vec::new(), Vec::new());
        for (at, &TrackOp { op, .. }) in items.iter().enumerate() {
            let (line, frees_sources) = (self.line(stage, op), op.frees_sources());
            let is_queued = match op {
                // A stream says that it has made sums for another node.
                Op::PutRows { to: rank, .. } | Op::Wait { from: rank, flag: Flag::Ready, .. } => far(rank),
                Op::Put { to, .. } | Op::Signal { to, .. } => far(to) && !queue.is_empty(),
                Op::Wait { .. } | Op::Reduce { .. } => false,
            };
            let reads_packed = is_queued && stage.tensor() == StageTensor::Rows;
            let reached = (at, Reached { line, frees_sources, reads_packed });
            if is_queued {
                queue.push(reached);
                continue;
            }
            if line == HOST || frees_sources {
                all.append(&mut queue);
            }
            all.push(reached);
        }
        all.append(&mut queue);
        all
    }
}

/// How a host that enqueues comes to an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Reached {
    line: usize,
    frees_sources: bool,
    /// NICs read packed rows there, or behind it.
    reads_packed: bool,
}

/// Lines of a rank whose host enqueues: the host, the caller's stream, and that of copies.
const LINES: usize = 3;
const HOST: usize = 0;
const CALLER: usize = 1;
const COPIES: usize = 2;

/// Words between the lines of a rank, which no program raises. Each has a set of flags of its own,
/// behind that of the programs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OwnWord {
    /// The host has enqueued what comes next on the caller's stream.
    ToCaller = 1,
    /// The same on the stream of copies.
    ToCopies = 2,
    /// Event of the caller's stream: it has packed rows, or made what returns.
    Packed = 3,
    /// The stream of copies has come behind that event: its host awaits this mark before NICs read
    /// packed rows.
    Mark = 4,
    /// Event of the stream of copies: it has brought the order of rows, or done the call.
    Done = 5,
}

/// Sets of flags of an instance.
pub(super) const SETS: u32 = 6;

/// The scenes of one program of a rank, driven as far as `until`: those of its thread and, where
/// that enqueues, those of the caller's stream and of the stream of copies.
///
/// **Assumed of streams**: a stream begins nothing before its host has enqueued it. Every stream is
/// like that, and no program says so. Before each stage and each kernel stands a wait for the host
/// ([`ENQUEUED`]).
///
/// ```text
///   caller's stream    Pack, PackPlaced, Partials: touches, raise packed | PlaceOwn: touches | own rows | Join: await done, ..
///   stream of copies   Follow: await packed, raise the mark | SendTables: touches | stages .. | Join: raise done
///   host               before rows that NICs read: await the mark
/// ```
///
/// A host waits for its streams where the program does, and before it has NICs read rows, which is
/// when all else of the stage is enqueued. It waits for its NIC only before the stream of copies
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
    let base = actor.filled(StageId::Release);
    let lines: Vec<Scenes> = match enqueues {
        Some(host) => {
            let mut walk =
                Walk { programs, actor, base, host, lines: Default::default(), raised: [0; SETS as usize] };
            walk.lines[HOST].defers = true;
            program.line(cut).for_each(|step| walk.step(step));
            walk.lines[CALLER].touches.extend(actor.end());
            walk.lines.into()
        }
        None => {
            let mut line = Scenes::default();
            line.touches.extend(if role == Role::Own { actor.begin() } else { Vec::new() });
            for step in program.line(cut) {
                let Action::Run(stage, part) = step.action else {
                    line.touches.extend(actor.footprint(step.role, step.action));
                    continue;
                };
                let (filled, items) = (actor.filled(stage), programs.stages.items(stage, part));
                line.stage(stage, (part, first_of(programs, stage, part)), filled, steps(filled, items));
            }
            line.touches.extend(if role == Role::Own { actor.end() } else { Vec::new() });
            vec![line]
        }
    };
    lines.into_iter().map(|line| line.end(base)).collect()
}

/// Position in its stage of the first operation of a part.
fn first_of(programs: &RankPrograms, stage: StageId, part: Part) -> usize {
    if part == Part::Finish { programs.stages.of(stage).start().len() } else { 0 }
}

/// A program of a rank whose host enqueues, amid its steps.
struct Walk<'a, A> {
    programs: &'a RankPrograms,
    actor: &'a A,
    base: &'a Rc<FilledOperands>,
    host: Enqueuer<'a>,
    lines: [Scenes; LINES],
    /// Per word: how often it has been raised in this call.
    raised: [u8; SETS as usize],
}

impl<A: Actor> Walk<'_, A> {
    fn step(&mut self, step: CallStep) {
        let touches = self.actor.footprint(step.role, step.action);
        match step.action {
            Action::Run(stage, part) => self.stage(stage, part),
            Action::Compute(work) => self.compute(work, touches),
            _ => self.lines[HOST].touches.extend(touches),
        }
    }

    fn compute(&mut self, work: Work, touches: Vec<HostAccess>) {
        if let Some(stage) = self.actor.finds_raised(work) {
            self.look(stage);
        }
        let sent = self.actor.sent(work);
        let sends = !sent.is_empty();
        if sends {
            // The order of rows is a table of the host's, too.
            self.send(if work == Work::PlaceOwn { CALLER } else { COPIES }, sent);
        }
        match work {
            Work::Pack | Work::Partials => {
                let begin = self.actor.begin();
                self.pack(begin.into_iter().chain(touches).collect());
            }
            Work::PackPlaced => {
                if sends {
                    self.raise(COPIES, ("order", OwnWord::Done));
                    self.enqueue(CALLER, false);
                    self.wait(CALLER, ("order", OwnWord::Done));
                }
                if !touches.is_empty() {
                    self.pack(touches);
                }
            }
            Work::Follow => self.follow(),
            Work::Join => {
                let settles = self.host.settles_unless(SeededBug::EndUnsettled);
                self.enqueue(COPIES, settles);
                self.raise(COPIES, ("join", OwnWord::Done));
                self.enqueue(CALLER, false);
                self.wait(CALLER, ("join", OwnWord::Done));
                self.lines[CALLER].touches.extend(touches);
            }
            _ if work.is_of_stream() => {
                if !touches.is_empty() {
                    self.enqueue(CALLER, false);
                }
                self.lines[CALLER].touches.extend(touches);
            }
            _ => self.lines[HOST].touches.extend(touches),
        }
    }

    /// The caller's stream packs rows, or makes what returns.
    fn pack(&mut self, touches: Vec<HostAccess>) {
        self.enqueue(CALLER, false);
        self.lines[CALLER].touches.extend(touches);
        self.raise(CALLER, ("packed", OwnWord::Packed));
    }

    /// The host writes tables, which a stream brings to the device.
    fn send(&mut self, line: usize, sent: Vec<SentTable>) {
        let (written, copied): (Vec<_>, Vec<_>) =
            sent.into_iter().map(|SentTable { written, copied }| (written, copied)).unzip();
        self.lines[HOST].touches.extend(written);
        self.enqueue(line, false);
        self.lines[line].touches.extend(copied.into_iter().flatten());
    }

    /// The stream of copies goes on behind what is packed.
    fn follow(&mut self) {
        self.enqueue(COPIES, false);
        self.wait(COPIES, ("follow", OwnWord::Packed));
        if self.host.paths.is_multi_node() {
            self.raise(COPIES, ("follow", OwnWord::Mark));
        }
    }

    /// One thread comes to each operation when it is done with those before, but for what it has
    /// queued.
    fn stage(&mut self, stage: StageId, part: Part) {
        let filled = self.actor.filled(stage);
        let items = self.programs.stages.items(stage, part);
        let first = first_of(self.programs, stage, part);
        let reached = self.host.in_turn(stage, items);
        for run in reached.chunk_by(|(_, one), (_, next)| one == next) {
            let (at, Reached { line, frees_sources, reads_packed }) = run[0];
            if line != HOST {
                self.enqueue(line, frees_sources && self.host.settles_unless(SeededBug::ReadUnsettled));
            } else if reads_packed {
                self.wait(HOST, ("mark", OwnWord::Mark));
            }
            if line == CALLER && stage.tensor() == StageTensor::Rows {
                self.lines[CALLER].touches.extend(self.actor.own_placed());
            }
            let items: Vec<TrackOp> = run.iter().map(|&(at, _)| items[at]).collect();
            self.lines[line].stage(stage, (part, first + at), filled, steps(filled, &items));
        }
    }

    /// The host has come so far: its next operations on the line come after that.
    fn enqueue(&mut self, line: usize, settles: bool) {
        let word = if line == CALLER { OwnWord::ToCaller } else { OwnWord::ToCopies };
        self.raise(HOST, (ENQUEUED, word));
        self.lines[HOST].settle(settles);
        self.wait(line, (ENQUEUED, word));
    }

    fn raise(&mut self, line: usize, (name, word): (&'static str, OwnWord)) {
        self.raised[word as usize] += 1;
        let (me, flag) = (self.host.paths.me(), Flag::Posted);
        let level = FlagValue::Part(self.raised[word as usize]);
        self.word(line, (name, word), Op::Signal { to: me, of: me, flag, level });
    }

    /// The line awaits the word as it was raised last, if it was in this call.
    fn wait(&mut self, line: usize, (name, word): (&'static str, OwnWord)) {
        let level = FlagValue::Part(self.raised[word as usize]);
        if level != FlagValue::Part(0) {
            let from = self.host.paths.me();
            self.word(line, (name, word), Op::Wait { from, flag: Flag::Posted, level });
        }
    }

    /// A scene of one operation on a word of this rank alone.
    fn word(&mut self, line: usize, (name, word): (&'static str, OwnWord), op: Op) {
        let item = TrackOp { track: self.host.paths.me(), op };
        let step = UnrolledOp { set: word as u32, ..UnrolledOp::of(&item, &self.base.operands()) };
        self.lines[line].push(name, 0, self.base, vec![step]);
    }

    /// The host finds the words of a stage raised. Those that it has awaited in this call tell it
    /// nothing new.
    fn look(&mut self, stage: StageId) {
        let known: Vec<Op> =
            self.lines[HOST].all.iter().flat_map(|scene| &scene.steps).map(|step| step.op).collect();
        let mut waits = steps(self.base, self.programs.stages.items(stage, Part::Whole));
        waits.retain(|wait| !known.contains(&wait.op));
        if !waits.is_empty() {
            self.lines[HOST].push("reclaim", 0, self.base, waits);
        }
    }
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
            let (paths, seeded) = (self.paths(me), self.scenario.seeded);
            let host = Enqueuer { paths, plans_on_device: self.plans_on_device(), seeded };
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
