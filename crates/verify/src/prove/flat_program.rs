//! An unrolled program as flat arrays, and one greedy run of it.
//!
//! Operations are numbered, scenes are ranges of them, flag words and lanes are indices:
//!
//! ```text
//!   actor 0   | scene 0: op 0 1 2 | scene 1: op 3 4 |         op -> track, word, value
//!   actor 1   | scene 0: op 5 6 7 8 | ...
//! ```
//!
//! One run decides deadlock-freedom for every interleaving, because no operation disables another.
//! The tracks of an actor are folded onto in-order queues (track mod Q); a blocked wait blocks the
//! operations behind it. A scene begins when all operations of the scene before it are done.

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

/// All operations of an unrolled program, actor after actor, each actor's in launch order.
pub(crate) struct Program<'a> {
    pub unrolled: &'a UnrolledProgram,
    pub nodes: Vec<Node>,
    /// Per id of an operation: its index; none for operations that a mutant lacks.
    pub index_of: Vec<Option<u32>>,
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
    pub fn new(unrolled: &'a UnrolledProgram) -> Self {
        let (mut tracks, mut ids, mut operations) = (0, 0, 0);
        for scene in unrolled.calls.iter().flatten().flat_map(|part| &part.scenes) {
            operations += scene.steps.len();
            for step in &scene.steps {
                tracks = tracks.max(step.track + 1);
                ids = ids.max(step.id as usize + 1);
            }
        }
        let mut program = Program {
            unrolled,
            nodes: Vec::with_capacity(operations),
            index_of: vec![None; ids],
            scenes: Vec::new(),
            tracks,
            lanes: 0,
            words: 0,
        };
        let (mut lanes, mut words) = (Numbers::default(), Numbers::default());
        for actor in 0..unrolled.actors {
            program.add(actor, &mut lanes, &mut words);
        }
        for (op, node) in (0..).zip(&mut program.nodes) {
            let lane = lane(tracks, node.actor, node.step.track);
            node.lane = lanes.known.get(lane).copied().flatten();
            let before = program.index_of[node.step.id as usize].replace(op);
            assert_eq!(before, None, "two operations have one id");
        }
        (program.lanes, program.words) = (lanes.count, words.count);
        program
    }

    /// The index of a flag word: its set, its rank, the rank that it speaks of, its kind.
    fn word(&self, (set, at, of): (u32, u32, u32), flag: Flag) -> usize {
        let ranks = self.unrolled.ranks as usize;
        ((set as usize * ranks + at as usize) * ranks + of as usize) * Flag::COUNT + flag as usize
    }

    fn add(&mut self, actor: u32, lanes: &mut Numbers, words: &mut Numbers) {
        let mut next = vec![0; self.tracks as usize];
        let mut scenes = Vec::new();
        for (call, part) in (0..).zip(self.unrolled.parts_of(actor)) {
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
        &self.unrolled.calls[call as usize][actor as usize]
    }

    /// Per rank: whether its program is unrolled.
    pub fn unrolled_ranks(&self) -> Vec<bool> {
        let mut unrolled = vec![false; self.unrolled.ranks as usize];
        self.unrolled.calls.iter().flatten().for_each(|part| unrolled[part.rank as usize] = true);
        unrolled
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

struct Actor {
    /// Scenes begun.
    begun: usize,
    /// Operations of the running scene that are not done.
    left: u32,
    queues: Vec<Queue>,
}

#[derive(Clone, Default)]
struct Queue {
    ops: Vec<u32>,
    done: usize,
}

/// Runs on `queues` queues per actor; returns the operations in an order in which they can happen.
pub(super) fn run(program: &Program, queues: u32) -> Result<Vec<u32>, ProofFailure> {
    let mut words = vec![0; program.words as usize];
    let mut blocked: Vec<Vec<(usize, usize)>> = vec![Vec::new(); program.words as usize];
    let queues = queues.max(1);
    let mut actors: Vec<Actor> = (0..program.scenes.len())
        .map(|_| Actor { begun: 0, left: 0, queues: vec![Queue::default(); queues as usize] })
        .collect();
    let mut order = Vec::with_capacity(program.nodes.len());
    let mut ready = Vec::new();
    for (actor, state) in actors.iter_mut().enumerate() {
        begin(program, actor, state, &mut ready);
    }
    while let Some((actor, queue)) = ready.pop() {
        let state = &mut actors[actor];
        while let Some(&op) = state.queues[queue].ops.get(state.queues[queue].done) {
            let node = &program.nodes[op as usize];
            let step = node.step;
            match step.op {
                Op::Wait { .. } => {
                    let word = node.word();
                    if words[word] < step.value {
                        blocked[word].push((actor, queue));
                        break;
                    }
                }
                Op::Signal { .. } if !step.sets_back() => {
                    let word = node.word();
                    words[word] = step.value.max(words[word]);
                    ready.append(&mut blocked[word]);
                }
                _ => {}
            }
            state.queues[queue].done += 1;
            state.left -= 1;
            order.push(op);
        }
        if state.left == 0 {
            begin(program, actor, state, &mut ready);
        }
    }
    match order.len() == program.nodes.len() {
        true => Ok(order),
        false => Err(stuck(program, &actors, &words, queues)),
    }
}

/// Begins the next scene that has operations.
fn begin(program: &Program, actor: usize, state: &mut Actor, ready: &mut Vec<(usize, usize)>) {
    while let Some(ops) = program.scenes[actor].get(state.begun) {
        state.begun += 1;
        if ops.is_empty() {
            continue;
        }
        state.left = ops.len() as u32;
        state.queues.iter_mut().for_each(|queue| {
            queue.ops.clear();
            queue.done = 0;
        });
        for op in ops.clone() {
            let queue = program.nodes[op as usize].step.track as usize % state.queues.len();
            state.queues[queue].ops.push(op);
        }
        ready
            .extend((0..state.queues.len()).filter(|&q| !state.queues[q].ops.is_empty()).map(|q| (actor, q)));
        return;
    }
}

/// The stuck wait that others follow from: its signal comes behind no other wait, or behind waits
/// in a circle with it, of which this one is in the earliest call.
fn stuck(program: &Program, actors: &[Actor], words: &[u64], queues: u32) -> ProofFailure {
    let heads: Vec<u32> = actors
        .iter()
        .filter(|actor| actor.left > 0)
        .flat_map(|actor| actor.queues.iter().filter_map(|queue| queue.ops.get(queue.done).copied()))
        .collect();
    let node = |op: u32| &program.nodes[op as usize];
    let first = |ops: &mut dyn Iterator<Item = u32>| ops.min_by_key(|&op| (node(op).call, node(op).at, op));
    // The node behind which the signal of a wait stands.
    let behind = |wait: u32| {
        let (word, value) = (node(wait).word(), node(wait).step.value);
        let signals = |node: &&Node| matches!(node.step.op, Op::Signal { .. }) && node.word() == word;
        let signal = program.nodes.iter().find(|node| signals(node) && node.step.value >= value)?;
        first(&mut heads.iter().copied().filter(|&head| node(head).actor == signal.actor))
    };
    let mut op = first(&mut heads.iter().copied()).expect("an operation that is not done is behind a wait");
    let mut chain = Vec::new();
    while let Some(next) = behind(op).filter(|_| !chain.contains(&op)) {
        chain.push(op);
        op = next;
    }
    if let Some(begin) = chain.iter().position(|&other| other == op) {
        op = first(&mut chain[begin..].iter().copied()).unwrap_or(op);
    }
    ProofFailure::Deadlock { queues, op: program.op_ref(op), seen: words[node(op).word()] }
}
