//! Plants one bug in a story: what `prove` is worth is how many of them it finds.
//!
//! A mutation is a bug of the *skeleton*: the same operation of one actor is changed in every call
//! of that kind.

use sidelane_core::error::CallKind;
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

/// All single mutations of all skeletons that occur in a story.
pub fn mutations(story: &UnrolledProgram) -> Vec<Mutation> {
    let mut all: Vec<Mutation> = Vec::new();
    for actor in 0..story.actors {
        let mut longest: Vec<&ActorCall> = Vec::new();
        for part in story.parts_of(actor) {
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
    /// Whether the operation moves anything in any call of a story.
    pub fn moves(&self, story: &UnrolledProgram) -> bool {
        let parts = story.parts_of(self.actor).filter(|part| part.kind == self.kind);
        let scenes = parts.filter_map(|part| part.scenes.get(self.scene));
        let mut scenes = scenes.filter(|scene| scene.name == self.stage);
        scenes.any(|scene| !scene.effects(&scene.steps[self.index]).is_empty())
    }

    /// The story with this bug in it.
    pub fn plant(&self, story: &UnrolledProgram) -> UnrolledProgram {
        let mut story = story.clone();
        for part in story.calls.iter_mut().map(|call| &mut call[self.actor as usize]) {
            if part.kind == self.kind {
                self.change(&mut part.scenes);
            }
        }
        story
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
        }
    }
}
