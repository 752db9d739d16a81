//! Plants one bug in an unrolled program or in a call program: the worth of a proof is how many of
//! these it finds.
//!
//! ```text
//!   Mutation      bug of the skeleton: the same operation of one actor is changed in every call of that kind
//!   CallMutation  bug of the driver: a step of a call program is left out, changes places, or ignores a refusal
//! ```

use sidelane_core::error::CallKind;
use sidelane_core::schedule::call_program::{CallProgram, CallStep, Cut, RankPrograms, Relays, Role};
use sidelane_core::schedule::{Calls, FlagValue, Op, TrackOp};

use crate::unroll::{ActorCall, StageRun, UnrolledOp, UnrolledProgram};

/// Change of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// It is left out.
    Drop,
    /// It changes places with the next operation of its track in the stage.
    Swap,
    /// A signal goes before everything of its track in the stage.
    First,
    /// A wait goes to the very end of the call, behind the operations that it guards.
    Late,
    /// The value of its flag is one call more; of a part, one part more.
    Raise,
    /// The value of its flag is one call less; of a part, one part less.
    Lower,
    /// A signal goes to the next track.
    Retrack,
    /// Its whole stage loses its waits.
    DropWaits,
    /// It goes before everything of this stage, an earlier one of the call. Not among
    /// [`mutations`].
    Before(&'static str),
    /// A signal goes before the first one of its word in the call before. Not among [`mutations`].
    Overtake,
}

/// One planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutation {
    /// The rank of the skeleton.
    pub rank: u32,
    /// The actor that follows it.
    pub actor: u32,
    /// Of which calls.
    pub kind: CallKind,
    /// The stage.
    pub stage: &'static str,
    /// The scene in such calls.
    pub scene: usize,
    /// Position in the scene.
    pub index: usize,
    /// The operation there, and its track.
    pub item: TrackOp,
    /// For [`Change::Swap`]: the operation it changes places with.
    pub other: Option<Op>,
    /// The change.
    pub change: Change,
}

/// All single mutations of all skeletons that occur in an unrolled program.
pub fn mutations(unrolled: &UnrolledProgram) -> Vec<Mutation> {
    let mut all: Vec<Mutation> = Vec::new();
    for actor in 0..unrolled.actors {
        let mut longest: Vec<&ActorCall> = Vec::new();
        for part in unrolled.parts_of(actor) {
            match longest.iter_mut().find(|known| known.kind == part.kind) {
                Some(known) if known.scenes.len() < part.scenes.len() => *known = part,
                Some(_) => {}
                None => longest.push(part),
            }
        }
        for part in longest {
            for (scene, steps) in part.scenes.iter().map(|scene| scene.steps.len()).enumerate() {
                (0..steps).for_each(|index| at((actor, part), scene, index, &mut all));
            }
        }
    }
    all
}

fn at((actor, part): (u32, &ActorCall), nth: usize, index: usize, all: &mut Vec<Mutation>) {
    let scene = &part.scenes[nth];
    let UnrolledOp { track, op, .. } = scene.steps[index];
    let mut add = |change, other| {
        all.push(Mutation {
            rank: part.rank,
            actor,
            kind: part.kind,
            stage: scene.name,
            scene: nth,
            index,
            item: TrackOp { track, op },
            other,
            change,
        });
    };
    if !matches!(op, Op::Reduce { .. }) {
        add(Change::Drop, None);
    }
    if let Some(next) = next_of_track(scene, index) {
        add(Change::Swap, Some(scene.steps[next].op));
    }
    match op {
        Op::Signal { level, .. } => {
            if scene.steps[..index].iter().filter(|step| step.track == track).count() > 1 {
                add(Change::First, None);
            }
            // A constant has no value before or behind it.
            if !matches!(level, FlagValue::Credit | FlagValue::Reset) {
                [Change::Raise, Change::Lower].into_iter().for_each(|change| add(change, None));
            }
            add(Change::Retrack, None);
        }
        Op::Wait { level, .. } => {
            add(Change::Late, None);
            if level != FlagValue::Credit {
                add(Change::Lower, None);
            }
            if !scene.steps[..index].iter().any(|step| matches!(step.op, Op::Wait { .. })) {
                add(Change::DropWaits, None);
            }
        }
        _ => {}
    }
}

fn next_of_track(scene: &StageRun, index: usize) -> Option<usize> {
    let track = scene.steps[index].track;
    (index + 1..scene.steps.len()).find(|&next| scene.steps[next].track == track)
}

/// The difference to the next value: the next part's, or the next call's.
fn one(op: Op) -> u64 {
    match op {
        Op::Signal { level: FlagValue::Part(_), .. } | Op::Wait { level: FlagValue::Part(_), .. } => 1,
        _ => Calls::STEP,
    }
}

impl Mutation {
    /// Whether the operation moves anything in any call of an unrolled program.
    pub fn moves(&self, unrolled: &UnrolledProgram) -> bool {
        let parts = unrolled.parts_of(self.actor).filter(|part| part.kind == self.kind);
        let scenes = parts.filter_map(|part| part.scenes.get(self.scene));
        let mut scenes = scenes.filter(|scene| scene.name == self.stage);
        scenes.any(|scene| !scene.effects(&scene.steps[self.index]).is_empty())
    }

    /// The unrolled program with this bug in it.
    pub fn plant(&self, unrolled: &UnrolledProgram) -> UnrolledProgram {
        let mut unrolled = unrolled.clone();
        for call in 0..unrolled.calls.len() {
            if unrolled.calls[call][self.actor as usize].kind != self.kind {
                continue;
            }
            match self.change {
                Change::Overtake if call > 0 => self.overtake(&mut unrolled, call),
                Change::Overtake => {}
                _ => self.change(&mut unrolled.part_mut(call, self.actor).scenes),
            }
        }
        unrolled
    }

    /// Moves the signal to the call before, if that one signals the same word.
    fn overtake(&self, unrolled: &mut UnrolledProgram, call: usize) {
        let Op::Signal { to, of, flag, .. } = self.item.op else { return };
        let same = |step: &UnrolledOp| matches!(step.op, Op::Signal { to: t, of: o, flag: f, .. } if (t, o, f) == (to, of, flag));
        let earlier = &unrolled.calls[call - 1][self.actor as usize].scenes;
        let place = earlier
            .iter()
            .enumerate()
            .find_map(|(nth, scene)| scene.steps.iter().position(same).map(|index| (nth, index)));
        let (Some((nth, index)), Some(_)) = (place, self.scene_in(unrolled, call)) else { return };
        let step = unrolled.part_mut(call, self.actor).scenes[self.scene].steps.remove(self.index);
        unrolled.part_mut(call - 1, self.actor).scenes[nth].steps.insert(index, step);
    }

    /// Its scene in a call, if that gets so far.
    fn scene_in<'u>(&self, unrolled: &'u UnrolledProgram, call: usize) -> Option<&'u StageRun> {
        let scene = unrolled.calls[call][self.actor as usize].scenes.get(self.scene);
        scene.filter(|scene| scene.name == self.stage)
    }

    fn change(&self, scenes: &mut [StageRun]) {
        // Of a call that ends early, the scenes are the first of a whole one.
        let Some(scene) = scenes.get_mut(self.scene).filter(|scene| scene.name == self.stage) else { return };
        let index = self.index;
        match self.change {
            Change::Drop => {
                scene.steps.remove(index);
            }
            Change::Swap => {
                let next = next_of_track(scene, index).unwrap_or(index);
                scene.steps.swap(index, next);
            }
            Change::First => {
                let step = scene.steps.remove(index);
                let first = scene.steps.iter().position(|other| other.track == step.track);
                scene.steps.insert(first.unwrap_or(index), step);
            }
            Change::Late => {
                let step = scene.steps.remove(index);
                if let Some(end) = scenes.last_mut() {
                    end.steps.push(step);
                }
            }
            Change::Raise => scene.steps[index].value += one(self.item.op),
            Change::Lower => {
                let value = &mut scene.steps[index].value;
                *value = value.saturating_sub(one(self.item.op));
            }
            Change::Retrack => {
                let tracks = scene.steps.iter().map(|step| step.track + 1).max().unwrap_or(1).max(2);
                scene.steps[index].track = (scene.steps[index].track + 1) % tracks;
            }
            Change::DropWaits => scene.steps.retain(|step| !matches!(step.op, Op::Wait { .. })),
            Change::Before(stage) => {
                let step = scene.steps.remove(index);
                let to = scenes.iter().position(|scene| scene.name == stage);
                scenes[to.expect("a stage of the actor's call")].steps.insert(0, step);
            }
            // It concerns two calls: see `plant`.
            Change::Overtake => {}
        }
    }
}

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
    /// The steps of an inlined relay that begin here go before step `to`.
    MoveRelay {
        /// The number of the step, counted without these.
        to: u16,
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
    /// Number of the cut in whose tail the step stands; `None`: among those of a call that nothing
    /// cuts.
    pub cut: Option<u16>,
    /// Index of the step there.
    pub at: u16,
    /// The action.
    pub change: CallChange,
}

impl CallMutation {
    /// All mutations of a program, where a group has this many ranks.
    pub fn all(program: &CallProgram, ranks: u32) -> Vec<CallMutation> {
        let mut all = Vec::new();
        let tails = (0..).zip(program.cuts()).map(|(cut, Cut { tail, .. })| (Some(cut), &**tail));
        for (cut, steps) in std::iter::once((None, program.steps())).chain(tails) {
            for at in 0..steps.len() as u16 {
                all.push(CallMutation { cut, at, change: CallChange::Drop });
                if usize::from(at) + 1 < steps.len() {
                    all.push(CallMutation { cut, at, change: CallChange::Swap });
                }
            }
        }
        for cut in program.cuts() {
            let goes_on = |rank| CallMutation { cut: None, at: cut.at, change: CallChange::GoOn { rank } };
            all.extend((0..ranks).map(goes_on));
        }
        all
    }

    /// Moves of each part of an inlined relay to every other place of its program.
    pub fn of_relay(program: &CallProgram) -> Vec<CallMutation> {
        let steps = program.steps();
        let relays = |at: usize| steps[at].role == Role::Relay;
        let begins = (0..steps.len()).filter(|&at| relays(at) && (at == 0 || !relays(at - 1)));
        let moves = begins.flat_map(|at| {
            let len = relayed(&steps[at..]);
            let places = (0..=steps.len() - len).filter(move |&to| to != at);
            places.map(move |to| CallMutation {
                cut: None,
                at: at as u16,
                change: CallChange::MoveRelay { to: to as u16 },
            })
        });
        moves.collect()
    }

    /// The step, and the one behind it.
    pub fn steps(&self, program: &CallProgram) -> (CallStep, Option<CallStep>) {
        let at = usize::from(self.at);
        let steps = self.cut.map_or(program.steps(), |cut| &program.cuts()[usize::from(cut)].tail);
        (steps[at], steps.get(at + 1).copied())
    }

    /// A program with this bug.
    pub fn plant(&self, program: &CallProgram) -> CallProgram {
        let at = usize::from(self.at);
        let (mut steps, mut half) = (program.steps().to_vec(), program.half() as u16);
        let mut cuts = program.cuts().to_vec();
        if let Some(cut) = self.cut {
            let tail = &mut cuts[usize::from(cut)].tail;
            *tail = self.changed(tail.to_vec()).into();
            return CallProgram::new(steps, half, cuts);
        }
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
            CallChange::MoveRelay { to } => {
                let part: Vec<CallStep> = steps.drain(at..at + relayed(&steps[at..])).collect();
                let (to, len) = (usize::from(to), part.len());
                let place = |nth: usize| {
                    let without = if nth >= at + len { nth - len } else { nth };
                    if without >= to { without + len } else { without }
                };
                half = place(usize::from(half)) as u16;
                cuts.iter_mut().for_each(|cut| cut.at = place(usize::from(cut.at)) as u16);
                steps.splice(to..to, part);
            }
        }
        CallProgram::new(steps, half, cuts)
    }

    /// The tail of a cut with this bug.
    fn changed(&self, mut tail: Vec<CallStep>) -> Vec<CallStep> {
        let at = usize::from(self.at);
        match self.change {
            CallChange::Drop => drop(tail.remove(at)),
            CallChange::Swap => tail.swap(at, at + 1),
            // These are changes of a call that goes on.
            CallChange::GoOn { .. } | CallChange::MoveRelay { .. } => {}
        }
        tail
    }
}

/// How many steps of a relay these begin with.
fn relayed(steps: &[CallStep]) -> usize {
    steps.iter().take_while(|step| step.role == Role::Relay).count()
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
    if programs.multi_node && relays == Relays::Thread {
        all.push((ProgramId::Relay(kind), programs.relay.of(kind)));
    }
    all
}
