//! One greedy run: decides deadlock-freedom for every interleaving, because no operation disables
//! another.
//!
//! The tracks of an actor are folded onto in-order queues (track mod Q); a blocked wait blocks the
//! operations behind it. A scene begins when all operations of the scene before it are done.

use sidelane_core::schedule::Op;

use super::ProofFailure;
use super::program::Program;

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

/// The stuck wait of the earliest call: others may only follow from it.
fn stuck(program: &Program, actors: &[Actor], words: &[u64], queues: u32) -> ProofFailure {
    let heads = actors
        .iter()
        .filter(|actor| actor.left > 0)
        .flat_map(|actor| actor.queues.iter().filter_map(|queue| queue.ops.get(queue.done)));
    let op = *heads
        .min_by_key(|&&op| (program.nodes[op as usize].call, program.nodes[op as usize].at, op))
        .expect("whatever is not done stands behind a wait");
    let node = &program.nodes[op as usize];
    ProofFailure::Deadlock { queues, op: program.op_ref(op), seen: words[node.word()] }
}
