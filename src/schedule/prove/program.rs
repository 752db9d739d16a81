//! A story as flat arrays: operations numbered, scenes as ranges of them, flag words as indices.

use std::ops::Range;

use super::{Fault, OpRef, What};
use crate::schedule::story::{Scene, Step, Story};
use crate::schedule::{Flag, Op};

/// One operation and its place.
#[derive(Clone, Copy)]
pub(crate) struct Node {
    pub rank: u32,
    pub call: u32,
    /// Scene of the rank, counted through all calls.
    pub scene: u32,
    /// Scene within its call, and position in it.
    pub at: (u32, u32),
    /// Position in its track.
    pub pos: u32,
    pub step: Step,
}

/// All operations of a story, rank after rank, each rank's in launch order.
pub(crate) struct Program<'a> {
    pub story: &'a Story,
    pub nodes: Vec<Node>,
    /// Per rank and scene (through all calls): its operations.
    pub scenes: Vec<Vec<Range<u32>>>,
    /// One more than the largest track.
    pub tracks: u32,
}

impl<'a> Program<'a> {
    pub fn new(story: &'a Story) -> Self {
        let steps = story.calls.iter().flatten().flat_map(|part| &part.scenes).flat_map(|scene| &scene.steps);
        let tracks = steps.map(|step| step.track + 1).max().unwrap_or(0);
        let mut program = Program { story, nodes: Vec::new(), scenes: Vec::new(), tracks };
        for rank in 0..story.ranks {
            program.add(rank);
        }
        program
    }

    fn add(&mut self, rank: u32) {
        let mut next = vec![0; self.tracks as usize];
        let mut scenes = Vec::new();
        for (call, part) in (0..).zip(self.story.parts_of(rank)) {
            for (within, scene) in (0..).zip(&part.scenes) {
                let first = self.nodes.len() as u32;
                for (index, &step) in (0..).zip(&scene.steps) {
                    let pos = &mut next[step.track as usize];
                    let scene = scenes.len() as u32;
                    self.nodes.push(Node { rank, call, scene, at: (within, index), pos: *pos, step });
                    *pos += 1;
                }
                scenes.push(first..self.nodes.len() as u32);
            }
        }
        self.scenes.push(scenes);
    }

    fn scene(&self, rank: u32, call: u32, within: u32) -> &Scene {
        &self.story.calls[call as usize][rank as usize].scenes[within as usize]
    }

    pub fn op_ref(&self, op: u32) -> OpRef {
        let node = &self.nodes[op as usize];
        OpRef {
            rank: node.rank,
            call: node.call as usize,
            stage: self.scene(node.rank, node.call, node.at.0).name,
            index: node.at.1 as usize,
            what: What::Op(node.step.op, node.step.value),
        }
    }

    /// Number of flag words of all ranks.
    pub fn words(&self) -> usize {
        (self.story.ranks * self.story.ranks) as usize * Flag::COUNT
    }

    /// The word at `owner` that `writer` raises.
    pub fn word(&self, owner: u32, writer: u32, flag: Flag) -> usize {
        (owner * self.story.ranks + writer) as usize * Flag::COUNT + flag as usize
    }

    /// Each word has one writing track, and grows with every signal.
    pub fn check_words(&self) -> Result<(), Fault> {
        let mut last: Vec<Option<u32>> = vec![None; self.words()];
        for (b, node) in (0..).zip(&self.nodes) {
            let Op::Signal { to, flag, .. } = node.step.op else { continue };
            let Some(a) = last[self.word(to, node.rank, flag)].replace(b) else { continue };
            let before = &self.nodes[a as usize].step;
            if before.track != node.step.track {
                return Err(Fault::TwoWriters { a: self.op_ref(a), b: self.op_ref(b) });
            }
            if before.value >= node.step.value {
                return Err(Fault::NotMonotone { a: self.op_ref(a), b: self.op_ref(b) });
            }
        }
        Ok(())
    }
}
