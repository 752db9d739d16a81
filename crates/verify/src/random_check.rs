//! Runs an unrolled program at random, under the guarantees of the lanes and no more.
//!
//! `prove` rests on the lanes' contract; this module simulates it. Memory holds a tag for every
//! four bytes:
//!
//! ```text
//!   put      its pieces land one by one, in any order, at any later time; its source is read as late as the stage join
//!            or, by an actor that does not wait for its NIC there, where that waits
//!   signal   becomes visible late, with its tag, but not before all pieces of earlier puts and all earlier signals of its
//!            track; later puts of the track, and other tracks, may overtake it
//!   reduce   reads piece by piece, while others go on
//!   actors   each at its own speed, on one queue, on several, or on one per track
//! ```
//!
//! A lane over several queue pairs keeps the same contract: [`striped`](mod@crate::striped).
//!
//! With every seed, each actor must have seen the same tags, call by call, as in an ordered run.

#![allow(clippy::result_large_err, reason = "a fault ends the whole proof, and names two operations")]

use std::ops::Range;

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane_core::schedule::{Op, WindowId};

use crate::prove::ProofFailure;
use crate::prove::flat_program::Program;
use crate::unroll::{ActorCall, Bytes, Effect, HostAccess, StageRun, UnrolledProgram};

/// Size of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Random runs.
    pub seeds: u64,
    /// Pieces and signals that were delivered late, in all runs.
    pub deliveries: u64,
}

/// Runs an unrolled program once in order, and once for every seed.
///
/// # Errors
/// [`ProofFailure::Differs`] with the first seed whose outcome differs; [`ProofFailure::Deadlock`]
/// if a run does not end.
pub fn check(unrolled: &UnrolledProgram, seeds: Range<u64>) -> Result<Checked, ProofFailure> {
    let program = Program::new(unrolled);
    let runs = Runs::of(&program);
    let expected = RandomRun::new(&runs, None).run()?;
    let mut checked = Checked::default();
    for seed in seeds {
        let seen = RandomRun::new(&runs, Some(seed)).run()?;
        for (actor, calls) in (0..).zip(seen.outcomes.iter().zip(&expected.outcomes)) {
            if let Some(call) = calls.0.iter().zip(calls.1).position(|(seen, expected)| seen != expected) {
                let ActorCall { rank, role, .. } = *program.part(actor, call as u32);
                return Err(ProofFailure::Differs { seed, rank, role, call });
            }
        }
        checked.seeds += 1;
        checked.deliveries += seen.deliveries;
    }
    Ok(checked)
}

/// A program, and what all its runs share.
struct Runs<'a> {
    program: &'a Program<'a>,
    /// Per actor and scene: the call, and the scene.
    scenes: Vec<Vec<(usize, &'a StageRun)>>,
    /// Per flag word: the actors that wait for it.
    waiters: Vec<Vec<u32>>,
}

impl<'a> Runs<'a> {
    fn of(program: &'a Program<'a>) -> Self {
        let of_call = |part: &'a ActorCall| part.scenes.iter().map(|scene| (part.call, scene));
        let scenes = |actor| program.unrolled.parts_of(actor).flat_map(of_call).collect();
        let mut waiters: Vec<Vec<u32>> = vec![Vec::new(); program.words as usize];
        for node in program.nodes.iter().filter(|node| matches!(node.step.op, Op::Wait { .. })) {
            let actors = &mut waiters[node.word()];
            if actors.last() != Some(&node.actor) {
                actors.push(node.actor);
            }
        }
        Runs { program, scenes: (0..program.unrolled.actors).map(scenes).collect(), waiters }
    }
}

/// Result of a run.
struct Outcome {
    /// Per actor and call: what planner, caller and sums have seen.
    outcomes: Vec<Vec<u64>>,
    deliveries: u64,
}

struct RandomRun<'a> {
    program: &'a Program<'a>,
    runs: &'a Runs<'a>,
    /// Everything at once and in order.
    in_order: bool,
    random: ChaCha8Rng,
    memory: Memory,
    words: Vec<u64>,
    actors: Vec<Actor>,
    /// Of all actors that are awake, together.
    turns: u32,
    /// Per actor and track.
    lanes: Vec<Vec<LaneTrack>>,
    outcome: Outcome,
}

struct Actor {
    /// Turns that it takes while others take theirs.
    speed: u32,
    /// Whether it may be able to move: if not, a signal awakes it.
    awake: bool,
    /// The next scene to begin.
    next: usize,
    left: u32,
    queues: Vec<Queue>,
}

#[derive(Clone, Default)]
struct Queue {
    ops: Vec<u32>,
    done: usize,
    /// Pieces that the sum at the head has yet to read.
    reading: Option<Vec<(usize, WindowPiece)>>,
    /// Tags that it has read so far, summed up with regard to place but not to time.
    seen: u64,
}

impl<'a> RandomRun<'a> {
    fn new(runs: &'a Runs<'a>, seed: Option<u64>) -> Self {
        let program = runs.program;
        let mut random = ChaCha8Rng::seed_from_u64(seed.unwrap_or(0));
        let tracks = program.tracks.max(1) as usize;
        let queues = [1, 2, 8, tracks][random.random_range(0..4)];
        let actor = |random: &mut ChaCha8Rng| Actor {
            speed: [1, 4, 8][random.random_range(0..3)],
            awake: true,
            next: 0,
            left: 0,
            queues: vec![Queue::default(); queues],
        };
        let calls = program.unrolled.calls.len();
        let actors: Vec<Actor> = program.scenes.iter().map(|_| actor(&mut random)).collect();
        RandomRun {
            program,
            runs,
            in_order: seed.is_none(),
            memory: Memory::new(program.unrolled),
            words: vec![0; program.words as usize],
            turns: actors.iter().map(|actor| actor.speed).sum(),
            actors,
            lanes: vec![vec![LaneTrack::default(); tracks]; program.scenes.len()],
            outcome: Outcome { outcomes: vec![vec![0; calls]; program.scenes.len()], deliveries: 0 },
            random,
        }
    }

    fn run(mut self) -> Result<Outcome, ProofFailure> {
        let mut over = self.is_over();
        while !over {
            if self.turns == 0 {
                return Err(self.stuck());
            }
            // One number selects the actor, among those that may move, and its operation.
            let drawn: u64 = self.random.random();
            let actor = self.actor_of((((drawn >> 32) * u64::from(self.turns)) >> 32) as u32);
            let moved = if drawn.is_multiple_of(2) { self.deliver(actor) } else { self.step_any(actor) };
            if !moved && !self.can_move(actor) {
                self.set_awake(actor, false);
            }
            over = moved && self.is_over();
        }
        Ok(self.outcome)
    }

    fn set_awake(&mut self, actor: usize, awake: bool) {
        let Actor { awake: before, speed, .. } = &mut self.actors[actor];
        self.turns -= if *before { *speed } else { 0 };
        self.turns += if awake { *speed } else { 0 };
        *before = awake;
    }

    /// The actor of a turn, among those that are awake.
    fn actor_of(&self, turn: u32) -> usize {
        let mut turns = 0;
        let position = self.actors.iter().position(|actor| {
            turns += if actor.awake { actor.speed } else { 0 };
            turn < turns
        });
        position.expect("there are as many turns as the actors have together")
    }

    /// Whether an actor can do anything before another one's signal.
    fn can_move(&self, actor: usize) -> bool {
        let Actor { next, left, queues, .. } = &self.actors[actor];
        let mut heads = queues.iter().filter_map(|queue| queue.ops.get(queue.done));
        let begins = *left == 0 && *next < self.program.scenes[actor].len();
        begins
            || self.lanes[actor].iter().any(|lane| !lane.is_idle())
            || heads.any(|&op| !self.is_blocked(op))
    }

    fn is_blocked(&self, op: u32) -> bool {
        let node = &self.program.nodes[op as usize];
        matches!(node.step.op, Op::Wait { .. }) && self.words[node.word()] < node.step.in_memory()
    }

    fn is_over(&self) -> bool {
        (self.actors.iter().zip(&self.program.scenes))
            .all(|(actor, scenes)| actor.left == 0 && actor.next == scenes.len())
    }

    /// The wait of the earliest call that nothing will end.
    fn stuck(&self) -> ProofFailure {
        let nodes = &self.program.nodes;
        let queues = || self.actors.iter().flat_map(|actor| &actor.queues);
        let heads = queues().filter_map(|queue| queue.ops.get(queue.done));
        let op = *heads.min_by_key(|&&op| nodes[op as usize].call).expect("what is not over waits");
        let node = &nodes[op as usize];
        let queues = self.actors[node.actor as usize].queues.len() as u32;
        ProofFailure::Deadlock { queues, op: self.program.op_ref(op), seen: self.words[node.word()] }
    }

    fn deliver(&mut self, actor: usize) -> bool {
        let busy = self.lanes[actor].iter().filter(|lane| !lane.is_idle()).count();
        if busy == 0 {
            return false;
        }
        let chosen = self.random.random_range(0..busy);
        let Some(lane) = self.lanes[actor].iter_mut().filter(|lane| !lane.is_idle()).nth(chosen) else {
            return false;
        };
        let raised = lane.deliver(&mut self.memory, &mut self.words, &mut self.random);
        self.wake(raised);
        self.outcome.deliveries += 1;
        true
    }

    /// Awakes the actors that wait for a word.
    fn wake(&mut self, raised: Option<usize>) {
        for &actor in raised.map_or(&[][..], |word| &self.runs.waiters[word]) {
            self.set_awake(actor as usize, true);
        }
    }

    fn step_any(&mut self, actor: usize) -> bool {
        let queue = self.random.random_range(0..self.actors[actor].queues.len());
        self.begin(actor) || self.step(actor, queue)
    }

    /// Joins the tracks, runs the accesses of planner and caller, and begins the next scene.
    fn begin(&mut self, actor: usize) -> bool {
        let state = &mut self.actors[actor];
        let scenes = &self.program.scenes[actor];
        if state.left > 0 || state.next == scenes.len() {
            return false;
        }
        let ops = scenes[state.next].clone();
        let (call, scene) = self.runs.scenes[actor][state.next];
        if scene.settled {
            self.lanes[actor].iter_mut().for_each(|lane| lane.complete(&self.memory));
        }
        state.next += 1;
        state.left = ops.len() as u32;
        let queues = state.queues.len();
        state.queues.fill(Queue::default());
        for op in ops {
            let track = self.program.nodes[op as usize].step.track as usize;
            state.queues[track % queues].ops.push(op);
        }
        for (index, touch) in scene.touches.iter().enumerate() {
            self.touch(actor, call, index, touch);
        }
        true
    }

    fn touch(&mut self, actor: usize, call: usize, index: usize, touch: &HostAccess) {
        let name = mix(&[actor as u64, call as u64, self.actors[actor].next as u64, index as u64]);
        for (at, cell) in cells(&touch.bytes).enumerate() {
            if touch.write {
                self.memory.write(cell, mix(&[name, at as u64]));
            } else {
                let seen = mix(&[name, at as u64, self.memory.read(cell)]);
                let outcome = &mut self.outcome.outcomes[actor][call];
                *outcome = outcome.wrapping_add(seen);
            }
        }
    }

    /// Does the operation at the head of a queue, or a part of it.
    fn step(&mut self, actor: usize, queue: usize) -> bool {
        let state = &self.actors[actor].queues[queue];
        let Some(&op) = state.ops.get(state.done) else { return false };
        let node = self.program.nodes[op as usize];
        match node.step.op {
            Op::Wait { .. } if self.is_blocked(op) => return false,
            Op::Wait { .. } => {}
            Op::Reduce { .. } => {
                if !self.reduce(actor, queue, op) {
                    return true;
                }
            }
            Op::Put { .. } | Op::PutRows { .. } => {
                for (nth, effect) in self.program.scene_of(&node).effects(&node.step).iter().enumerate() {
                    self.put(op, nth, effect);
                }
            }
            Op::Signal { .. } if node.step.sets_back() => self.words[node.word()] = 0,
            Op::Signal { .. } => self.signal(op),
        }
        let track = node.step.track as usize;
        while self.in_order && !self.lanes[actor][track].is_idle() {
            let lane = &mut self.lanes[actor][track];
            let raised = lane.deliver(&mut self.memory, &mut self.words, &mut self.random);
            self.wake(raised);
        }
        let state = &mut self.actors[actor];
        state.left -= 1;
        state.queues[queue].done += 1;
        true
    }

    fn put(&mut self, op: u32, nth: usize, effect: &Effect) {
        let Effect::Copy { from, to } = effect else { return };
        let node = self.program.nodes[op as usize];
        let here = to.owner == self.program.part(node.actor, node.call).rank;
        let mut sources = from.as_ref().map(cells);
        for (at, to_cell) in cells(to).enumerate() {
            let source = sources.as_mut().and_then(|cells| cells.next());
            let fresh = PieceContents::Tag(mix(&[u64::from(op), nth as u64, at as u64]));
            let load = source.map_or(fresh, PieceContents::From);
            if !here {
                let lane = &mut self.lanes[node.actor as usize][node.step.track as usize];
                lane.post(Posted::Piece { to: to_cell, load });
                continue;
            }
            let tag = match load {
                PieceContents::Tag(tag) => tag,
                PieceContents::From(cell) => self.memory.read(cell),
            };
            self.memory.write(to_cell, tag);
        }
    }

    fn signal(&mut self, op: u32) {
        let node = self.program.nodes[op as usize];
        let mut tag = Vec::new();
        for effect in self.program.scene_of(&node).effects(&node.step) {
            let Effect::Tag(to) = effect else { continue };
            tag.extend(cells(&to).enumerate().map(|(at, cell)| (cell, mix(&[u64::from(op), at as u64]))));
        }
        let posted = Posted::Signal { word: node.word(), value: node.step.in_memory(), tag };
        self.lanes[node.actor as usize][node.step.track as usize].post(posted);
    }

    /// Reads a few more pieces of a sum; whether it is done.
    fn reduce(&mut self, actor: usize, queue: usize, op: u32) -> bool {
        let node = self.program.nodes[op as usize];
        let scene = self.program.scene_of(&node);
        let random = &mut self.random;
        let state = &mut self.actors[actor].queues[queue];
        let reading = state.reading.get_or_insert_with(|| {
            let effects = scene.effects(&node.step);
            let reads = effects.iter().filter_map(|effect| match effect {
                Effect::Read(bytes) => Some(cells(bytes)),
                _ => None,
            });
            let mut all: Vec<(usize, WindowPiece)> = reads.flatten().enumerate().collect();
            all.shuffle(random);
            all
        });
        let some = reading.len().saturating_sub(random.random_range(1..64));
        for (at, cell) in reading.drain(some..) {
            state.seen = state.seen.wrapping_add(mix(&[at as u64, self.memory.read(cell)]));
        }
        if !reading.is_empty() {
            return false;
        }
        let seen = state.seen;
        let outcome = &mut self.outcome.outcomes[actor][node.call as usize];
        *outcome = outcome.wrapping_add(mix(&[u64::from(op), seen]));
        for effect in scene.effects(&node.step) {
            let Effect::Sums(to) = effect else { continue };
            for (at, cell) in cells(&to).enumerate() {
                self.memory.write(cell, mix(&[seen, at as u64]));
            }
        }
        let state = &mut self.actors[actor].queues[queue];
        (state.reading, state.seen) = (None, 0);
        // Its partials, where it has some.
        for (nth, effect) in scene.effects(&node.step).iter().enumerate() {
            self.put(op, nth, effect);
        }
        true
    }
}

/// A number that stands for these.
fn mix(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, &number| {
        let mixed = (hash ^ number).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (mixed ^ (mixed >> 32)).wrapping_mul(0xc4ce_b9fe_1a85_ec53) ^ (mixed >> 29)
    })
}

/// Bytes that one tag stands for: everything a schedule moves is a multiple of it.
const PIECE: u64 = 4;

/// One piece of a window.
#[derive(Clone, Copy)]
struct WindowPiece {
    owner: u32,
    window: WindowId,
    index: usize,
}

/// All windows of all ranks.
struct Memory {
    cells: Vec<[Vec<u64>; 3]>,
}

impl Memory {
    fn new(unrolled: &UnrolledProgram) -> Self {
        let cells = |bytes: u64| vec![0; bytes.div_ceil(PIECE) as usize];
        let windows = || [unrolled.pool_bytes, unrolled.control_bytes, unrolled.pool_bytes].map(cells);
        Memory { cells: (0..unrolled.ranks).map(|_| windows()).collect() }
    }

    fn read(&self, cell: WindowPiece) -> u64 {
        self.cells[cell.owner as usize][cell.window.0 as usize][cell.index]
    }

    fn write(&mut self, cell: WindowPiece, tag: u64) {
        self.cells[cell.owner as usize][cell.window.0 as usize][cell.index] = tag;
    }
}

/// The pieces of a range of bytes.
fn cells(bytes: &Bytes) -> impl Iterator<Item = WindowPiece> + use<> {
    let (owner, window) = (bytes.owner, bytes.window);
    let range = bytes.range.start / PIECE..bytes.range.end.div_ceil(PIECE);
    range.map(move |index| WindowPiece { owner, window, index: index as usize })
}

/// Contents of a piece.
#[derive(Clone, Copy)]
enum PieceContents {
    /// A tag.
    Tag(u64),
    /// The contents of a piece, when it is read.
    From(WindowPiece),
}

/// In flight on one track.
#[derive(Clone)]
enum Posted {
    Piece {
        to: WindowPiece,
        load: PieceContents,
    },
    /// A signal, and the pieces of its tag.
    Signal {
        word: usize,
        value: u64,
        tag: Vec<(WindowPiece, u64)>,
    },
}

/// One track of one actor, as its lane sees it.
#[derive(Clone, Default)]
struct LaneTrack {
    posted: Vec<Posted>,
}

impl LaneTrack {
    fn post(&mut self, posted: Posted) {
        self.posted.push(posted);
    }

    fn is_idle(&self) -> bool {
        self.posted.is_empty()
    }

    /// Local completion: sources that have not been read are read now.
    fn complete(&mut self, memory: &Memory) {
        for posted in &mut self.posted {
            if let Posted::Piece { load, .. } = posted
                && let PieceContents::From(cell) = *load
            {
                *load = PieceContents::Tag(memory.read(cell));
            }
        }
    }

    /// Delivers one piece or signal, any that may be next; returns the word that it raises.
    fn deliver(&mut self, memory: &mut Memory, words: &mut [u64], random: &mut ChaCha8Rng) -> Option<usize> {
        let mut pick = random.random_range(0..self.posted.len());
        if matches!(self.posted[pick], Posted::Signal { .. }) {
            let pieces = self.posted[..pick].iter().filter(|p| matches!(p, Posted::Piece { .. })).count();
            // A signal waits for earlier puts; of several signals the oldest is next.
            pick = match pieces {
                0 => 0,
                _ => {
                    let nth = random.random_range(0..pieces);
                    let mut pieces = (0..pick).filter(|&p| matches!(self.posted[p], Posted::Piece { .. }));
                    pieces.nth(nth).unwrap_or(pick)
                }
            };
        }
        match self.posted.remove(pick) {
            Posted::Signal { word, value, tag } => {
                tag.into_iter().for_each(|(to, piece)| memory.write(to, piece));
                words[word] = value;
                return Some(word);
            }
            Posted::Piece { to, load: PieceContents::Tag(tag) } => memory.write(to, tag),
            Posted::Piece { to, load: PieceContents::From(cell) } => memory.write(to, memory.read(cell)),
        }
        None
    }
}
