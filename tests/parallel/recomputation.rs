//! Layers that keep their inputs alone and repeat their forward pass: they make the same gradients
//! to the bit, and hold what the proof of the plan says.

use std::collections::HashMap;

use sidelane::error::Error;
use sidelane_parallel::PipelineError;
use sidelane_parallel::pipeline::{Pass, Pipeline, Plan, Schedule, Shape, Stage, WarmUp, dual_pipe};
use sidelane_parallel::tensor::Dropout;

use crate::pipelines::options;
use crate::ranks::on_ranks;
use crate::tensors::{bits, tensor, times_transposed, transposed, transposed_times};

const TOKENS: usize = 4;
const WIDTH: usize = 6;

/// By microbatch and model chunk.
type Kept<T> = HashMap<(u32, u32), T>;

/// `y = dropout(relu(x W'))` in each model chunk. The loss is half the square of the last outputs.
struct Layers {
    shape: Shape,
    stage: u32,
    recompute: bool,
    inputs: Kept<Vec<f32>>,
    /// Products, from which outputs and gradients are made.
    activations: Kept<Vec<f32>>,
    /// Gradients of products that wait for those of weights.
    of_products: Kept<Vec<f32>>,
    gradients: Kept<Vec<f32>>,
    /// The most that were kept at once: inputs, and activations.
    peaks: [usize; 2],
    products: usize,
}

impl Layers {
    fn new(plan: &Plan, stage: u32) -> Layers {
        let (shape, recompute) = (plan.shape(), plan.recomputes());
        let (inputs, activations, of_products, gradients) = Default::default();
        let (peaks, products) = ([0; 2], 0);
        Layers { shape, stage, recompute, inputs, activations, of_products, gradients, peaks, products }
    }

    fn weight(&self, chunk: u32) -> Vec<f32> {
        tensor(1, u64::from(self.stage * self.shape.model_chunks + chunk), WIDTH * WIDTH)
    }

    fn dropout(&self, chunk: u32) -> Dropout {
        Dropout::new(0.25, 7, self.stage * self.shape.model_chunks + chunk).unwrap()
    }

    fn multiply(&mut self, chunk: u32, x: &[f32]) -> Vec<f32> {
        self.products += 1;
        times_transposed(x, &self.weight(chunk), WIDTH)
    }

    fn outputs(&self, (microbatch, chunk): (u32, u32), products: &[f32]) -> Vec<f32> {
        let positive: Vec<f32> = products.iter().map(|value| value.max(0.0)).collect();
        self.dropout(chunk).forward(&numbers(microbatch), &positive).unwrap()
    }

    fn keep_activations(&mut self, of: (u32, u32), products: Vec<f32>) {
        self.activations.insert(of, products);
        self.peaks[1] = self.peaks[1].max(self.activations.len());
    }
}

/// Numbers of the tokens of a microbatch.
fn numbers(microbatch: u32) -> Vec<u64> {
    (0..TOKENS as u64).map(|token| u64::from(microbatch) * TOKENS as u64 + token).collect()
}

impl Stage for Layers {
    type Error = PipelineError;

    fn forward(
        &mut self,
        microbatch: u32,
        chunk: u32,
        inputs: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        let of = (microbatch, chunk);
        let x = inputs.map_or_else(|| tensor(2, microbatch.into(), TOKENS * WIDTH), <[f32]>::to_vec);
        let products = self.multiply(chunk, &x);
        let outputs = self.outputs(of, &products);
        self.inputs.insert(of, x);
        self.peaks[0] = self.peaks[0].max(self.inputs.len());
        if !self.recompute {
            self.keep_activations(of, products);
        }
        Ok(Some(outputs))
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        chunk: u32,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        let of = (microbatch, chunk);
        let mut of_inputs = None;
        if pass != Pass::BackwardWeight {
            if self.recompute {
                let x = self.inputs[&of].clone();
                let products = self.multiply(chunk, &x);
                self.keep_activations(of, products);
            }
            let products = &self.activations[&of];
            // The gradient of half a square is the value.
            let of_outputs = gradient.map_or_else(|| self.outputs(of, products), <[f32]>::to_vec);
            let mut of_products = self
                .dropout(chunk)
                .backward(&numbers(microbatch), &of_outputs)
                .map_err(|error| PipelineError::Sidelane(Error::from(error)))?;
            of_products.iter_mut().zip(products).for_each(|(of, product)| {
                *of = if *product > 0.0 { *of } else { 0.0 };
            });
            let across = transposed(&self.weight(chunk), WIDTH);
            of_inputs = Some(times_transposed(&of_products, &across, WIDTH));
            self.of_products.insert(of, of_products);
        }
        if pass != Pass::BackwardInput {
            let (x, of_products) = (self.inputs.remove(&of).unwrap(), self.of_products.remove(&of).unwrap());
            self.activations.remove(&of).unwrap();
            let gradient = transposed_times(&of_products, &x, TOKENS);
            assert!(self.gradients.insert(of, gradient).is_none());
        }
        Ok(of_inputs)
    }
}

/// The layers of each stage behind a step.
fn train(nodes: &[u32], plan: &Plan) -> Vec<Layers> {
    on_ranks(nodes, &options(), |world| {
        let mut layers = Layers::new(plan, world.rank());
        let mut pipeline = Pipeline::new(&world.all().unwrap(), plan, TOKENS * WIDTH).unwrap();
        pipeline.run(&mut layers).unwrap();
        layers
    })
}

#[test]
fn repeated_forward_passes_give_the_same_bits_and_hold_what_is_proved() {
    let nodes = [0, 0, 1, 1];
    let interleaved = |warm_up| Schedule::Interleaved { model_chunks: 2, warm_up };
    let schedules = [
        Schedule::GPipe,
        Schedule::OneFOneB,
        interleaved(WarmUp::Megatron),
        interleaved(WarmUp::Least),
        Schedule::ZeroBubbleH1,
        Schedule::ZeroBubbleH2,
    ];
    let plans = schedules.into_iter().map(|schedule| schedule.plan(4, 8).unwrap());
    for plan in plans.chain([dual_pipe(4, 8).unwrap()]) {
        let kept = train(&nodes, &plan);
        let repeated = train(&nodes, &plan.clone().recompute(true));
        for (recompute, all) in [(false, &kept), (true, &repeated)] {
            let proof = plan.clone().recompute(recompute).prove(u32::MAX).unwrap();
            for (layers, peak) in all.iter().zip(proof.peaks) {
                let [inputs, activations] = layers.peaks.map(|of| of as u32);
                assert_eq!((inputs, activations), (peak.inputs, peak.activations), "{:?}", plan.shape());
            }
        }
        for (kept, repeated) in kept.iter().zip(&repeated) {
            assert_eq!(repeated.products, 2 * kept.products);
            assert_eq!(kept.gradients.len(), kept.products);
            for (of, gradient) in &kept.gradients {
                assert!(gradient.iter().any(|value| *value != 0.0), "{of:?}");
                assert_eq!(bits(gradient), bits(&repeated.gradients[of]), "{of:?} of {:?}", plan.shape());
            }
        }
    }
}
