//! Plants one bug in a story: what `prove` is worth is how many of them it finds.
//!
//! A mutation is a bug of the *skeleton*: the same operation of one rank is changed in every call of that kind.

use super::story::{Part, Scene, Step, Story};
use super::{Item, Op};
use crate::error::CallKind;

/// What is done to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// It is left out.
    Drop,
    /// It changes places with the next operation of its track in the stage.
    Swap,
    /// A signal goes before everything of its track in the stage.
    First,
    /// A wait goes to the very end of the call, behind what it guards.
    Late,
    /// The value of its flag is one more.
    Raise,
    /// The value of its flag is one less.
    Lower,
    /// A signal goes to the next track.
    Retrack,
    /// Its whole stage loses its waits.
    DropWaits,
}

/// One planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutation {
    /// Whose skeleton.
    pub rank: u32,
    /// Of which calls.
    pub kind: CallKind,
    /// The stage.
    pub stage: &'static str,
    /// Position in the stage.
    pub index: usize,
    /// The operation there, and its track.
    pub item: Item,
    /// For [`Change::Swap`]: the operation it changes places with.
    pub other: Option<Op>,
    /// What is done to it.
    pub change: Change,
}

/// All single mutations of all skeletons that occur in a story.
pub fn mutations(story: &Story) -> Vec<Mutation> {
    let mut all: Vec<Mutation> = Vec::new();
    for rank in 0..story.ranks {
        let mut longest: Vec<&Part> = Vec::new();
        for part in story.parts_of(rank) {
            match longest.iter_mut().find(|known| known.kind == part.kind) {
                Some(known) if known.scenes.len() < part.scenes.len() => *known = part,
                Some(_) => {}
                None => longest.push(part),
            }
        }
        for part in longest {
            for scene in &part.scenes {
                for index in 0..scene.steps.len() {
                    at(part, scene, index, &mut all);
                }
            }
        }
    }
    all
}

fn at(part: &Part, scene: &Scene, index: usize, all: &mut Vec<Mutation>) {
    let Step { track, op, .. } = scene.steps[index];
    let mut add = |change, other| {
        all.push(Mutation {
            rank: part.rank,
            kind: part.kind,
            stage: scene.name,
            index,
            item: Item { track, op },
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
        Op::Signal { .. } => {
            if scene.steps[..index].iter().filter(|step| step.track == track).count() > 1 {
                add(Change::First, None);
            }
            [Change::Raise, Change::Lower, Change::Retrack].into_iter().for_each(|change| add(change, None));
        }
        Op::Wait { .. } => {
            [Change::Late, Change::Lower].into_iter().for_each(|change| add(change, None));
            if !scene.steps[..index].iter().any(|step| matches!(step.op, Op::Wait { .. })) {
                add(Change::DropWaits, None);
            }
        }
        _ => {}
    }
}

fn next_of_track(scene: &Scene, index: usize) -> Option<usize> {
    let track = scene.steps[index].track;
    (index + 1..scene.steps.len()).find(|&next| scene.steps[next].track == track)
}

impl Mutation {
    /// The story with this bug in it.
    pub fn plant(&self, story: &Story) -> Story {
        let mut story = story.clone();
        for part in story.calls.iter_mut().map(|call| &mut call[self.rank as usize]) {
            if part.kind == self.kind {
                self.change(&mut part.scenes);
            }
        }
        story
    }

    fn change(&self, scenes: &mut [Scene]) {
        let Some(at) = scenes.iter().position(|scene| scene.name == self.stage) else { return };
        let scene = &mut scenes[at];
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
            Change::Raise => scene.steps[index].value += 1,
            Change::Lower => scene.steps[index].value = scene.steps[index].value.saturating_sub(1),
            Change::Retrack => {
                let tracks = scene.steps.iter().map(|step| step.track + 1).max().unwrap_or(1).max(2);
                scene.steps[index].track = (scene.steps[index].track + 1) % tracks;
            }
            Change::DropWaits => scene.steps.retain(|step| !matches!(step.op, Op::Wait { .. })),
        }
    }
}
