//! A rank of ours: a step of a strategy for each line of standard input.

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write, stdin, stdout};

use sidelane::World;
use sidelane::collective::Communicator;
use sidelane::overlap::HostExecutor;
use sidelane::rows::{Matrix, product};
use sidelane_parallel::PipelineError;
use sidelane_parallel::data::{Adam, DataError, DataParallel, FullySharded, Layout, Sharding};
use sidelane_parallel::pipeline::{Pass, Pipeline, Schedule, Stage};
use sidelane_parallel::tensor::{
    Activations, ColumnParallelLinear, LinearShape, RowParallelLinear, cut_columns, cut_rows,
};

use crate::{BLOCKS, BUCKET_BYTES, FFN, HIDDEN, LEARNING_RATE, MICROBATCHES, TOKENS};

/// A model, and a step of it: its loss, and bytes that moved elsewhere than in the communicator.
type Step = Box<dyn FnMut(&mut Communicator) -> Result<(f32, u64), Box<dyn Error>>>;

/// Elements of a weight matrix.
const MATRIX: usize = HIDDEN * FFN;

/// Values in -size..size by their places, the same on both sides.
fn values(seed: u64, count: usize, size: f64) -> Vec<f32> {
    let value = |at: u64| {
        let mixed = [(2_654_435_761, 15), (2_246_822_519, 13)].iter().fold(
            at + (seed << 24),
            |mixed, (factor, shift)| {
                let mixed = mixed.wrapping_mul(*factor) & 0xffff_ffff;
                mixed ^ (mixed >> shift)
            },
        );
        ((mixed as f64 / f64::from(1u32 << 31) - 1.0) * size) as f32
    };
    (0..count as u64).map(value).collect()
}

/// Both matrices of a block, `[ffn, hidden]` and `[hidden, ffn]`.
fn weights(block: usize) -> [Vec<f32>; 2] {
    let up = values(2 * block as u64, MATRIX, (6.0 / HIDDEN as f64).sqrt());
    [up, values(2 * block as u64 + 1, MATRIX, (3.0 / FFN as f64).sqrt())]
}

/// `x w'`, of rows of so many elements.
fn forward(x: &[f32], w: &[f32], inputs: usize, outputs: usize) -> Vec<f32> {
    let mut y = vec![0.0; x.len() / inputs * outputs];
    let w = Matrix::new(w, outputs, inputs).transposed();
    product(&mut y, Matrix::new(x, x.len() / inputs, inputs), w, false);
    y
}

/// `dy w`
fn of_inputs(of_y: &[f32], w: &[f32], inputs: usize, outputs: usize) -> Vec<f32> {
    let mut of_x = vec![0.0; of_y.len() / outputs * inputs];
    product(
        &mut of_x,
        Matrix::new(of_y, of_y.len() / outputs, outputs),
        Matrix::new(w, outputs, inputs),
        false,
    );
    of_x
}

/// `dy' x`, or that added to a gradient.
fn of_weights(x: &[f32], of_y: &[f32], (inputs, outputs): (usize, usize), add: bool, of_w: &mut [f32]) {
    let rows = x.len() / inputs;
    product(of_w, Matrix::new(of_y, rows, outputs).transposed(), Matrix::new(x, rows, inputs), add);
}

fn relu(mut h: Vec<f32>) -> Vec<f32> {
    h.iter_mut().for_each(|h| *h = h.max(0.0));
    h
}

/// The gradient of a ReLU's inputs.
fn of_relu(mut of_h: Vec<f32>, h: &[f32]) -> Vec<f32> {
    of_h.iter_mut().zip(h).filter(|(_, h)| **h <= 0.0).for_each(|(of_h, _)| *of_h = 0.0);
    of_h
}

/// The loss of a batch, and the gradient of its outputs.
fn loss(y: &[f32]) -> (f32, Vec<f32>) {
    let scale = 1.0 / TOKENS as f32;
    (0.5 * scale * y.iter().map(|y| y * y).sum::<f32>(), y.iter().map(|y| y * scale).collect())
}

/// Activations of a rank: inputs of each block, and those of its second matrix.
struct Tape {
    x: Vec<Vec<f32>>,
    h: Vec<Vec<f32>>,
    /// Whether inputs of the first block have gradients: those of a later stage.
    has_stage_before: bool,
}

impl Tape {
    fn new(x: &[f32]) -> Tape {
        Tape { x: vec![x.to_vec()], h: Vec::new(), has_stage_before: false }
    }

    fn forward(&mut self, block: usize, up: &[f32], down: &[f32]) {
        let h = relu(forward(&self.x[block], up, HIDDEN, FFN));
        self.x.push(forward(&h, down, FFN, HIDDEN));
        self.h.push(h);
    }

    /// Fills the gradients of both matrices, or adds to them. Returns that of the inputs, if any
    /// block needs it.
    fn backward(
        &self,
        block: usize,
        [up, down]: [&[f32]; 2],
        of_y: &[f32],
        [of_up, of_down]: [&mut [f32]; 2],
        add: bool,
    ) -> Vec<f32> {
        of_weights(&self.h[block], of_y, (FFN, HIDDEN), add, of_down);
        let of_h = of_relu(of_inputs(of_y, down, FFN, HIDDEN), &self.h[block]);
        of_weights(&self.x[block], &of_h, (HIDDEN, FFN), add, of_up);
        let is_needed = block > 0 || self.has_stage_before;
        if is_needed { of_inputs(&of_h, up, HIDDEN, FFN) } else { Vec::new() }
    }
}

fn all_weights() -> Vec<f32> {
    (0..BLOCKS).flat_map(|block| weights(block).concat()).collect()
}

fn data_parallel(group: &mut Communicator, x: Vec<f32>) -> Result<Step, Box<dyn Error>> {
    let layout = Layout::buckets(&[MATRIX; 2 * BLOCKS], BUCKET_BYTES)?;
    let adam = Adam { learning_rate: LEARNING_RATE, ..Adam::default() };
    let mut model = DataParallel::new(group, layout, Sharding::None, all_weights(), adam)?;
    let executor = HostExecutor::new();
    Ok(Box::new(move |group| {
        let mut loss_of_batch = 0.0;
        model.backward(group, &executor, |pass| {
            let mut tape = Tape::new(&x);
            for block in 0..BLOCKS {
                tape.forward(block, pass.parameter(2 * block)?, pass.parameter(2 * block + 1)?);
            }
            let (of_batch, mut of_y) = loss(&tape.x[BLOCKS]);
            loss_of_batch = of_batch;
            for block in (0..BLOCKS).rev() {
                let weights = [pass.parameter(2 * block)?, pass.parameter(2 * block + 1)?];
                let (mut of_up, mut of_down) = (vec![0.0; MATRIX], vec![0.0; MATRIX]);
                of_y = tape.backward(block, weights, &of_y, [&mut of_up, &mut of_down], false);
                pass.gradient(2 * block + 1, &of_down)?;
                pass.gradient(2 * block, &of_up)?;
            }
            Ok(())
        })?;
        model.step(group)?;
        Ok((loss_of_batch, 0))
    }))
}

fn fully_sharded(group: &mut Communicator, x: Vec<f32>) -> Result<Step, Box<dyn Error>> {
    let layout = Layout::layers(&[[MATRIX; 2]; BLOCKS])?;
    let adam = Adam { learning_rate: LEARNING_RATE, ..Adam::default() };
    let mut model = FullySharded::new(group, layout, 1, &all_weights(), adam)?;
    let executor = HostExecutor::new();
    Ok(Box::new(move |group| {
        let mut tape = Tape::new(&x);
        model.forward(group, &executor, |block, weights| {
            let (up, down) = weights.split_at(MATRIX);
            tape.forward(block, up, down);
            Ok::<(), DataError>(())
        })?;
        let (loss, mut of_y) = loss(&tape.x[BLOCKS]);
        model.backward(group, &executor, |block, weights, gradients| {
            let ((up, down), (of_up, of_down)) = (weights.split_at(MATRIX), gradients.split_at_mut(MATRIX));
            of_y = tape.backward(block, [up, down], &of_y, [of_up, of_down], false);
            Ok(())
        })?;
        model.step(group)?;
        Ok((loss, 0))
    }))
}

fn tensor_parallel(group: &mut Communicator, x: Vec<f32>) -> Result<Step, Box<dyn Error>> {
    let (part, way) = ((group.rank(), group.size()), Activations::Replicated);
    let (of_up, of_down) =
        (LinearShape { inputs: HIDDEN, outputs: FFN }, LinearShape { inputs: FFN, outputs: HIDDEN });
    let mut blocks = Vec::new();
    for block in 0..BLOCKS {
        let [up, down] = weights(block);
        let up = ColumnParallelLinear::new(group, of_up, way, cut_rows(&up, HIDDEN, part)?.to_vec(), None)?;
        let down = RowParallelLinear::new(group, of_down, way, cut_columns(&down, FFN, part)?, None)?;
        blocks.push((up, down));
    }
    Ok(Box::new(move |group| {
        let mut tape = Tape::new(&x);
        for (block, (up, down)) in blocks.iter().enumerate() {
            let h = relu(up.forward(group, &tape.x[block])?);
            tape.x.push(down.forward(group, &h)?);
            tape.h.push(h);
        }
        let (loss, mut of_y) = loss(&tape.x[BLOCKS]);
        for (block, (up, down)) in blocks.iter_mut().enumerate().rev() {
            let of_down = down.backward(group, &tape.h[block], &of_y)?;
            let of_h = of_relu(of_down.input, &tape.h[block]);
            let of_up = up.backward(group, &tape.x[block], &of_h)?;
            learn(down.weight_mut(), &of_down.weight);
            learn(up.weight_mut(), &of_up.weight);
            of_y = of_up.input;
        }
        Ok((loss, 0))
    }))
}

fn learn(weights: &mut [f32], gradients: &[f32]) {
    weights.iter_mut().zip(gradients).for_each(|(weight, of)| *weight -= LEARNING_RATE * of);
}

/// Elements of the activations of a microbatch.
const MICROBATCH: usize = TOKENS / MICROBATCHES * HIDDEN;

/// The blocks of a rank.
struct Blocks {
    weights: Vec<[Vec<f32>; 2]>,
    gradients: Vec<[Vec<f32>; 2]>,
    /// By microbatch: tapes, and on the last stage gradients of the outputs.
    kept: Vec<Option<(Tape, Option<Vec<f32>>)>>,
    /// Inputs of the first stage.
    x: Vec<f32>,
    is_last: bool,
    loss: f32,
}

impl Stage for Blocks {
    type Error = PipelineError;

    fn forward(
        &mut self,
        microbatch: u32,
        _: u32,
        inputs: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        let nth = microbatch as usize;
        let mut tape = Tape::new(inputs.unwrap_or(&self.x[nth * MICROBATCH..][..MICROBATCH]));
        tape.has_stage_before = inputs.is_some();
        for (block, [up, down]) in self.weights.iter().enumerate() {
            tape.forward(block, up, down);
        }
        let y = tape.x[self.weights.len()].clone();
        let (loss, of_y) = loss(&y);
        self.loss += if self.is_last { loss } else { 0.0 };
        self.kept[nth] = Some((tape, self.is_last.then_some(of_y)));
        Ok((!self.is_last).then_some(y))
    }

    fn backward(
        &mut self,
        _: Pass,
        microbatch: u32,
        _: u32,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        let kept = self.kept[microbatch as usize].take();
        let (tape, of_loss) = kept.ok_or(PipelineError::None { what: "forward pass" })?;
        let mut of_y = of_loss.or(gradient.map(<[f32]>::to_vec)).unwrap_or_default();
        let blocks = self.weights.iter().zip(&mut self.gradients).enumerate();
        for (block, ([up, down], [of_up, of_down])) in blocks.rev() {
            of_y = tape.backward(block, [up, down], &of_y, [of_up, of_down], true);
        }
        Ok((!of_y.is_empty()).then_some(of_y))
    }
}

fn pipeline(world: &World) -> Result<Step, Box<dyn Error>> {
    let (rank, ranks) = (world.rank(), world.size());
    let plan = Schedule::OneFOneB.plan(ranks, MICROBATCHES as u32)?;
    let mut pipeline = Pipeline::new(&world.all()?, &plan, MICROBATCH)?;
    let each = BLOCKS / ranks as usize;
    let own = rank as usize * each..(rank as usize + 1) * each;
    let zeros = || [vec![0.0; MATRIX], vec![0.0; MATRIX]];
    let mut blocks = Blocks {
        weights: own.map(weights).collect(),
        gradients: (0..each).map(|_| zeros()).collect(),
        kept: (0..MICROBATCHES).map(|_| None).collect(),
        x: values(1000, TOKENS * HIDDEN, 1.0),
        is_last: rank + 1 == ranks,
        loss: 0.0,
    };
    Ok(Box::new(move |_| {
        blocks.loss = 0.0;
        pipeline.take_counts();
        pipeline.run(&mut blocks)?;
        for (weights, gradients) in blocks.weights.iter_mut().zip(&mut blocks.gradients) {
            for (weight, gradient) in weights.iter_mut().zip(gradients) {
                learn(weight, gradient);
                gradient.fill(0.0);
            }
        }
        Ok((blocks.loss, pipeline.take_counts().intra_node_bytes))
    }))
}

/// Runs steps until standard input ends, and answers each with bytes and the loss.
pub fn run() -> Result<(), Box<dyn Error>> {
    let world = World::from_env()?;
    let mut group = Communicator::builder(&world.all()?).build()?;
    let mut alone = Communicator::builder(&world.group(&[world.rank()])?).build()?;
    let batch = |seed: u32| values(1000 + u64::from(seed), TOKENS * HIDDEN, 1.0);
    let mut models = HashMap::<String, Step>::new();
    println!("sidelane {}", env!("CARGO_PKG_VERSION"));
    for line in stdin().lock().lines() {
        let case = line?;
        let group = if case == "alone" { &mut alone } else { &mut group };
        if !models.contains_key(&case) {
            let model = match case.as_str() {
                "alone" | "data" => data_parallel(group, batch(world.rank()))?,
                "fully-sharded" => fully_sharded(group, batch(world.rank()))?,
                "tensor" => tensor_parallel(group, batch(0))?,
                "pipeline" => pipeline(&world)?,
                other => return Err(format!("no case {other}").into()),
            };
            models.insert(case.clone(), model);
        }
        group.take_counts();
        let step = models.get_mut(&case).ok_or("no model")?;
        let (loss, bytes) = step(group)?;
        println!("{} {loss}", bytes + group.take_counts().intra_node_bytes);
        stdout().flush()?;
    }
    Ok(())
}
