//! A pipeline that computes: stages with queues between them, which carry values without names.
//!
//! It knows nothing of proofs. A stage takes the next value of a queue for the message that its
//! plan names, so a plan in the wrong order computes wrong gradients, or gets stuck.

use std::collections::{HashMap, VecDeque};

use sidelane_parallel::pipeline::{Compute, Direction, Pass, Plan, Shape, Step, Tensor, Transfer};

type Key = (u32, u32);

/// A number that depends on both numbers and their order.
pub fn mixed(a: u64, b: u64) -> u64 {
    (a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

#[derive(Default)]
struct Stage {
    step: usize,
    begun: bool,
    inputs: HashMap<Key, u64>,
    outputs: HashMap<Key, u64>,
    gradients_in: HashMap<Key, u64>,
    gradients_out: HashMap<Key, u64>,
    weights: Weights,
}

/// Gradients of weights of a stage, by microbatch and model chunk.
pub type Weights = HashMap<Key, Vec<u64>>;

/// Gradients of weights by stage, if the plan runs to its end.
pub fn run(plan: &Plan) -> Option<Vec<Weights>> {
    let shape = plan.shape();
    let mut stages: Vec<Stage> = (0..shape.stages).map(|_| Stage::default()).collect();
    let mut queues: HashMap<(u32, u32, Tensor), VecDeque<u64>> = HashMap::new();
    let mut moved = true;
    while moved {
        moved = false;
        for nth in 0..shape.stages {
            while let Some(step) = plan.stages()[nth as usize].get(stages[nth as usize].step) {
                let stage = &mut stages[nth as usize];
                match step {
                    Step::Compute(_) | Step::Overlap { .. } => {
                        step.passes().try_for_each(|compute| compute_in(stage, shape, nth, compute))?;
                    }
                    Step::Transfer(group) => {
                        if !transfer_in(stage, shape, nth, group, &mut queues)? {
                            break;
                        }
                    }
                }
                (stage.step, stage.begun, moved) = (stage.step + 1, false, true);
            }
        }
    }
    let ended = stages.iter().zip(plan.stages()).all(|(stage, steps)| stage.step == steps.len());
    let empty = queues.values().all(VecDeque::is_empty);
    (ended && empty).then(|| stages.into_iter().map(|stage| stage.weights).collect())
}

fn compute_in(stage: &mut Stage, shape: Shape, nth: u32, compute: Compute) -> Option<()> {
    let Compute { pass, microbatch, model_chunk } = compute;
    let key = (microbatch, model_chunk);
    if microbatch >= shape.microbatches || model_chunk >= shape.model_chunks {
        return None;
    }
    if pass == Pass::Forward {
        let input = match shape.before(nth, model_chunk) {
            None => u64::from(microbatch) + 1,
            Some((own, chunk)) if own == nth => *stage.outputs.get(&(microbatch, chunk))?,
            Some(_) => *stage.inputs.get(&key)?,
        };
        stage.inputs.insert(key, input);
        let output = mixed(input, u64::from(nth * shape.model_chunks + model_chunk));
        return stage.outputs.insert(key, output).is_none().then_some(());
    }
    if pass != Pass::BackwardWeight {
        let output = *stage.outputs.get(&key)?;
        let gradient = match shape.after(nth, model_chunk) {
            None => mixed(output, 7),
            Some((own, chunk)) if own == nth => *stage.gradients_out.get(&(microbatch, chunk))?,
            Some(_) => *stage.gradients_in.get(&key)?,
        };
        stage.gradients_in.insert(key, gradient);
        stage.gradients_out.insert(key, mixed(gradient, stage.inputs[&key])).is_none().then_some(())?;
    }
    if pass != Pass::BackwardInput {
        stage.gradients_out.get(&key)?;
        let gradient = mixed(stage.inputs[&key], stage.gradients_in[&key]);
        stage.weights.entry(key).or_default().push(gradient);
    }
    Some(())
}

/// What a stage sends in a message, if it has it.
fn sent(stage: &Stage, shape: Shape, transfer: &Transfer) -> Option<u64> {
    let Transfer { tensor, peer, microbatch, model_chunk, .. } = *transfer;
    let ((_, chunk), values) = match tensor {
        Tensor::Activation => (shape.before(peer, model_chunk)?, &stage.outputs),
        Tensor::Gradient => (shape.after(peer, model_chunk)?, &stage.gradients_out),
    };
    values.get(&(microbatch, chunk)).copied()
}

fn receive(stage: &mut Stage, transfer: &Transfer, value: u64) {
    let values = match transfer.tensor {
        Tensor::Activation => &mut stage.inputs,
        Tensor::Gradient => &mut stage.gradients_in,
    };
    values.insert((transfer.microbatch, transfer.model_chunk), value);
}

/// Sends, then receives of a group.
fn sides(group: &[Transfer]) -> [impl Iterator<Item = &Transfer> + Clone; 2] {
    [Direction::Send, Direction::Receive]
        .map(|side| group.iter().filter(move |transfer| transfer.direction == side))
}

/// Whether all messages of a group have ended; none if one cannot.
fn transfer_in(
    stage: &mut Stage,
    shape: Shape,
    nth: u32,
    group: &[Transfer],
    queues: &mut HashMap<(u32, u32, Tensor), VecDeque<u64>>,
) -> Option<bool> {
    let [sends, receives] = sides(group);
    if !stage.begun {
        stage.begun = true;
        for transfer in sends {
            let value = sent(stage, shape, transfer)?;
            queues.entry((nth, transfer.peer, transfer.tensor)).or_default().push_back(value);
        }
    }
    let queue = |transfer: &Transfer| (transfer.peer, nth, transfer.tensor);
    if !receives.clone().all(|transfer| queues.get(&queue(transfer)).is_some_and(|queue| !queue.is_empty())) {
        return Some(false);
    }
    for transfer in receives {
        let value = queues.get_mut(&queue(transfer))?.pop_front()?;
        receive(stage, transfer, value);
    }
    Some(true)
}
