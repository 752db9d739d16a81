//! An unrolled program as flat arrays: operations numbered, scenes as ranges of them, flag words
//! and lanes as indices.

use std::ops::Range;

use sidelane_core::schedule::{Flag, Op};

use super::{AccessKind, OpRef, ProofFailure};
use crate::unroll::{ActorCall, StageRun, UnrolledOp, UnrolledProgram};

/// One operation and its place.
#[derive(Clone, Copy)]
pub(crate) struct Node {
    pub actor: u32,
    pub call: u32,
    /// Scene of the actor, counted through all calls.
    pub scene: u32,
    /// Scene within its call, and position in it.
    pub at: (u32, u32),
    /// Number of its track among those of all actors that signal anything.
    pub lane: Option<u32>,
    /// Position in its track.
    pub pos: u32,
    /// The flag word that it raises or awaits.
    word: Option<u32>,
    pub step: UnrolledOp,
}

impl Node {
    /// The word of a signal or a wait.
    pub fn word(&self) -> usize {
        self.word.expect("signals and waits have a word") as usize
    }
}

/// All operations of a story, actor after actor, each actor's in launch order.
pub(crate) struct Program<'a> {
    pub story: &'a UnrolledProgram,
    pub nodes: Vec<Node>,
    /// Per actor and scene (through all calls): its operations.
    pub scenes: Vec<Vec<Range<u32>>>,
    /// One more than the largest track.
    pub tracks: u32,
    /// Number of lanes.
    pub lanes: u32,
    /// Number of flag words that are raised or awaited.
    pub words: u32,
}

/// Numbers things as they come; `known` has a place for each.
#[derive(Default)]
struct Numbers {
    known: Vec<Option<u32>>,
    count: u32,
}

impl Numbers {
    fn of(&mut self, thing: usize) -> u32 {
        if self.known.len() <= thing {
            self.known.resize(thing + 1, None);
        }
        *self.known[thing].get_or_insert_with(|| {
            self.count += 1;
            self.count - 1
        })
    }
}

/// The place of a lane.
fn lane(tracks: u32, actor: u32, track: u32) -> usize {
    actor as usize * tracks as usize + track as usize
}

impl<'a> Program<'a> {
    pub fn new(story: &'a UnrolledProgram) -> Self {
        let steps = story.calls.iter().flatten().flat_map(|part| &part.scenes).flat_map(|scene| &scene.steps);
        let tracks = steps.map(|step| step.track + 1).max().unwrap_or(0);
        let mut program =
            Program { story, nodes: Vec::new(), scenes: Vec::new(), tracks, lanes: 0, words: 0 };
        let (mut lanes, mut words) = (Numbers::default(), Numbers::default());
        for actor in 0..story.actors {
            program.add(actor, &mut lanes, &mut words);
        }
        for node in &mut program.nodes {
            let lane = lane(tracks, node.actor, node.step.track);
            node.lane = lanes.known.get(lane).copied().flatten();
        }
        (program.lanes, program.words) = (lanes.count, words.count);
        program
    }

    /// The index of a flag word: its set, its rank, the rank that it speaks of, its kind.
    fn word(&self, (set, at, of): (u32, u32, u32), flag: Flag) -> usize {
        let ranks = self.story.ranks as usize;
        ((set as usize * ranks + at as usize) * ranks + of as usize) * Flag::COUNT + flag as usize
    }

    fn add(&mut self, actor: u32, lanes: &mut Numbers, words: &mut Numbers) {
        let mut next = vec![0; self.tracks as usize];
        let mut scenes = Vec::new();
        for (call, part) in (0..).zip(self.story.parts_of(actor)) {
            for (within, scene) in (0..).zip(&part.scenes) {
                let first = self.nodes.len() as u32;
                for (index, &step) in (0..).zip(&scene.steps) {
                    let word = match step.op {
                        Op::Signal { to, of, flag, .. } => {
                            lanes.of(lane(self.tracks, actor, step.track));
                            Some(words.of(self.word((step.set, to, of), flag)))
                        }
                        Op::Wait { from, flag, .. } => {
                            Some(words.of(self.word((step.set, part.rank, from), flag)))
                        }
                        _ => None,
                    };
                    let pos = &mut next[step.track as usize];
                    let scene = scenes.len() as u32;
                    let at = (within, index);
                    self.nodes.push(Node { actor, call, scene, at, lane: None, pos: *pos, word, step });
                    *pos += 1;
                }
                scenes.push(first..self.nodes.len() as u32);
            }
        }
        self.scenes.push(scenes);
    }

    pub fn part(&self, actor: u32, call: u32) -> &'a ActorCall {
        &self.story.calls[call as usize][actor as usize]
    }

    /// Per rank: whether its program is unrolled.
    pub fn told(&self) -> Vec<bool> {
        let mut told = vec![false; self.story.ranks as usize];
        self.story.calls.iter().flatten().for_each(|part| told[part.rank as usize] = true);
        told
    }

    /// The scene of an operation.
    pub fn scene_of(&self, node: &Node) -> &'a StageRun {
        &self.part(node.actor, node.call).scenes[node.at.0 as usize]
    }

    pub fn op_ref(&self, op: u32) -> OpRef {
        let node = &self.nodes[op as usize];
        let (part, scene) = (self.part(node.actor, node.call), self.scene_of(node));
        OpRef {
            rank: part.rank,
            role: part.role,
            call: node.call as usize,
            stage: scene.name,
            index: scene.first + node.at.1 as usize,
            what: AccessKind::Op(node.step.op, node.step.value),
        }
    }

    /// Each word has one writing track, and grows with every signal. If its owner resets it, it is
    /// a byte like others.
    pub fn check_words(&self) -> Result<(), ProofFailure> {
        let mut last: Vec<Option<u32>> = vec![None; self.words as usize];
        for (b, node) in (0..).zip(&self.nodes) {
            let (Op::Signal { .. }, Some(word), false) = (node.step.op, node.word, node.step.sets_back())
            else {
                continue;
            };
            let Some(a) = last[word as usize].replace(b) else { continue };
            let before = &self.nodes[a as usize];
            if before.lane != node.lane {
                return Err(ProofFailure::TwoWriters { a: self.op_ref(a), b: self.op_ref(b) });
            }
            if before.step.value >= node.step.value {
                return Err(ProofFailure::NotMonotone { a: self.op_ref(a), b: self.op_ref(b) });
            }
        }
        Ok(())
    }
}
