//! Steps all actors of a program at random.

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane_core::schedule::Op;

use super::lane::{Cell, Lane, Load, Memory, Posted, cells};
use crate::prove::ProofFailure;
use crate::prove::program::Program;
use crate::unroll::{Effect, HostAccess};

/// Result of a run.
pub(super) struct Outcome {
    /// Per actor and call: what planner, caller and sums have seen.
    pub outcomes: Vec<Vec<u64>>,
    pub deliveries: u64,
}

pub(super) struct Machine<'a> {
    program: &'a Program<'a>,
    /// Everything at once and in order.
    in_order: bool,
    random: ChaCha8Rng,
    memory: Memory,
    words: Vec<u64>,
    actors: Vec<Actor>,
    /// Per actor and track.
    lanes: Vec<Vec<Lane>>,
    outcome: Outcome,
}

struct Actor {
    /// Out of eight turns it takes so many.
    speed: u32,
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
    reading: Option<Vec<(usize, Cell)>>,
    /// Tags that it has read so far, summed up with regard to place but not to time.
    seen: u64,
}

impl<'a> Machine<'a> {
    pub fn new(program: &'a Program<'a>, seed: Option<u64>) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed.unwrap_or(0));
        let tracks = program.tracks.max(1) as usize;
        let queues = [1, 2, 8, tracks][random.random_range(0..4)];
        let actor = |random: &mut ChaCha8Rng| Actor {
            speed: [1, 4, 8][random.random_range(0..3)],
            next: 0,
            left: 0,
            queues: vec![Queue::default(); queues],
        };
        let calls = program.story.calls.len();
        Machine {
            program,
            in_order: seed.is_none(),
            memory: Memory::new(program.story),
            words: vec![0; program.words as usize],
            actors: program.scenes.iter().map(|_| actor(&mut random)).collect(),
            lanes: vec![vec![Lane::default(); tracks]; program.scenes.len()],
            outcome: Outcome { outcomes: vec![vec![0; calls]; program.scenes.len()], deliveries: 0 },
            random,
        }
    }

    pub fn play(mut self) -> Result<Outcome, ProofFailure> {
        let (mut idle, mut over) = (0, self.is_over());
        while !over {
            // Most turns move nothing. One number selects the actor and its operation.
            let drawn: u64 = self.random.random();
            let actor = (((drawn >> 32) * self.actors.len() as u64) >> 32) as usize;
            let (turn, delivers) = ((drawn % 8) as u32, drawn & 8 == 0);
            if turn >= self.actors[actor].speed && !self.in_order {
                continue;
            }
            let moved = if delivers { self.deliver(actor) } else { self.step_any(actor) };
            idle = if moved { 0 } else { idle + 1 };
            if idle > 1000 {
                self.unblock()?;
                idle = 0;
            }
            over = idle == 0 && self.is_over();
        }
        Ok(self.outcome)
    }

    fn is_over(&self) -> bool {
        (self.actors.iter().zip(&self.program.scenes))
            .all(|(actor, scenes)| actor.left == 0 && actor.next == scenes.len())
    }

    /// No progress for long: tries everything once, to distinguish bad luck from a deadlock.
    fn unblock(&mut self) -> Result<(), ProofFailure> {
        let mut moved = false;
        for actor in 0..self.actors.len() {
            moved |= self.deliver(actor);
            moved |= self.begin(actor);
            for queue in 0..self.actors[actor].queues.len() {
                moved |= self.step(actor, queue);
            }
        }
        if moved { Ok(()) } else { Err(self.stuck()) }
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
        lane.deliver(&mut self.memory, &mut self.words, &mut self.random);
        self.outcome.deliveries += 1;
        true
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
        self.lanes[actor].iter_mut().for_each(|lane| lane.complete(&self.memory));
        let ops = scenes[state.next].clone();
        let (call, scene) = place(self.program, actor, state.next);
        state.next += 1;
        state.left = ops.len() as u32;
        let queues = state.queues.len();
        state.queues.fill(Queue::default());
        for op in ops {
            let track = self.program.nodes[op as usize].step.track as usize;
            state.queues[track % queues].ops.push(op);
        }
        for (index, touch) in scene.iter().enumerate() {
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
            Op::Wait { .. } => {
                if self.words[node.word()] < node.step.in_memory() {
                    return false;
                }
            }
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
        let lane = &mut self.lanes[actor][node.step.track as usize];
        while self.in_order && !lane.is_idle() {
            lane.deliver(&mut self.memory, &mut self.words, &mut self.random);
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
            let fresh = Load::Tag(mix(&[u64::from(op), nth as u64, at as u64]));
            let load = source.map_or(fresh, Load::From);
            if !here {
                let lane = &mut self.lanes[node.actor as usize][node.step.track as usize];
                lane.post(Posted::Piece { to: to_cell, load });
                continue;
            }
            let tag = match load {
                Load::Tag(tag) => tag,
                Load::From(cell) => self.memory.read(cell),
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
            let mut all: Vec<(usize, Cell)> = reads.flatten().enumerate().collect();
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

/// The call and the touches of a actor's scene, counted through all calls.
fn place<'a>(program: &'a Program, actor: usize, scene: usize) -> (usize, &'a [HostAccess]) {
    let mut scenes = (program.story.parts_of(actor as u32))
        .flat_map(|part| part.scenes.iter().map(move |scene| (part.call, &*scene.touches)));
    scenes.nth(scene).unwrap_or((0, &[]))
}

/// A number that stands for these.
fn mix(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, &number| {
        let mixed = (hash ^ number).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (mixed ^ (mixed >> 32)).wrapping_mul(0xc4ce_b9fe_1a85_ec53) ^ (mixed >> 29)
    })
}
