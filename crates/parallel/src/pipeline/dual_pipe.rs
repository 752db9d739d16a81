//! DualPipe: microbatches from both ends of the pipeline.
//!
//! ```text
//!   stage               0            1            2            3
//!   model chunk 0       layers 0  -> layers 1  -> layers 2  -> layers 3       first half of the microbatches
//!   model chunk 1       layers 3  <- layers 2  <- layers 1  <- layers 0       second half
//! ```
//!
//! The middle of a step is pairs: a forward pass of one way overlaps with a backward pass of the
//! other. So dispatch and combine of each hide in the compute of the other.

use std::collections::VecDeque;

use super::plan::{Compute, Pass, Plan, Route, Shape, Step};
use crate::error::PipelineError;

/// The plan of DualPipe. Each stage holds two pieces of the model: model chunk 0 for the first half
/// of the microbatches, model chunk 1 for the second, which enters at the last stage. Microbatches
/// are counted within their half.
///
/// ```
/// use sidelane_parallel::pipeline::{Costs, dual_pipe};
///
/// let plan = dual_pipe(4, 8)?;
/// assert!(plan.prove(1)?.peaks.iter().all(|peak| peak.inputs == 5));
/// // Pairs that take 2 instead of 3 units.
/// let costs = Costs { overlap: 2, ..Costs::new(1, 1, 1) };
/// assert_eq!(plan.time(1, costs)?.time(), 22);
/// # Ok::<(), sidelane_parallel::PipelineError>(())
/// ```
///
/// # Errors
/// [`PipelineError::Dual`] unless stages and microbatches are even, with two microbatches a stage
/// or more; [`PipelineError::None`] for no stage, [`PipelineError::TooMany`] for too many.
pub fn dual_pipe(stages: u32, microbatches: u32) -> Result<Plan, PipelineError> {
    let even = stages.is_multiple_of(2) && microbatches.is_multiple_of(2);
    if !even || microbatches / 2 < stages {
        return Err(PipelineError::Dual { stages, microbatches });
    }
    let shape = Shape { stages, microbatches: microbatches / 2, model_chunks: 2, route: Route::BothWays };
    shape.check()?;
    Plan::with_messages(shape, (0..stages).map(|stage| steps(shape, stage)).collect())
}

/// Steps of a stage so far.
#[derive(Default)]
struct Steps {
    steps: Vec<Step>,
    /// Microbatches by model chunk that have begun, forward and backward.
    forward: [u32; 2],
    backward: [u32; 2],
    /// Gradients of weights that were put off.
    late: VecDeque<Compute>,
}

fn steps(shape: Shape, stage: u32) -> Vec<Step> {
    // Stages to the nearer end, and to the middle.
    let outside = stage.min(shape.stages - 1 - stage);
    let inside = shape.stages / 2 - 1 - outside;
    // The way that begins at the nearer end, and the other.
    let (near, far) = if stage < shape.stages / 2 { (0, 1) } else { (1, 0) };
    let mut steps = Steps::default();
    for _ in 0..2 * inside {
        steps.forward(near);
    }
    for _ in 0..=outside {
        steps.forward(near);
        steps.forward(far);
    }
    for _ in 0..inside {
        steps.backward_input(far);
        steps.backward_weight();
        steps.forward(far);
    }
    for round in 0..=shape.microbatches - shape.stages + outside {
        if round == 0 && inside == 0 {
            // The pass of a middle stage that others wait for first would end later in a pair.
            steps.forward(near);
            steps.backward(far);
        } else {
            steps.overlap(near, far);
        }
        steps.overlap(far, near);
    }
    for _ in 0..inside {
        steps.backward(far);
        steps.overlap(far, near);
    }
    for nth in 0..2 * (outside + 1) {
        let way = if nth % 2 == 0 { far } else { near };
        if nth <= outside { steps.backward(way) } else { steps.backward_input(way) }
    }
    for _ in 0..inside {
        steps.backward_weight();
        steps.backward_input(near);
    }
    while !steps.late.is_empty() {
        steps.backward_weight();
    }
    steps.steps
}

impl Steps {
    fn next(&mut self, pass: Pass, way: usize) -> Compute {
        let begun = if pass == Pass::Forward { &mut self.forward } else { &mut self.backward };
        let microbatch = begun[way];
        begun[way] += 1;
        Compute { pass, microbatch, model_chunk: way as u32 }
    }

    fn forward(&mut self, way: usize) {
        let compute = self.next(Pass::Forward, way);
        self.steps.push(Step::Compute(compute));
    }

    fn backward(&mut self, way: usize) {
        let compute = self.next(Pass::Backward, way);
        self.steps.push(Step::Compute(compute));
    }

    fn backward_input(&mut self, way: usize) {
        let compute = self.next(Pass::BackwardInput, way);
        self.steps.push(Step::Compute(compute));
        self.late.push_back(Compute { pass: Pass::BackwardWeight, ..compute });
    }

    fn backward_weight(&mut self) {
        self.steps.extend(self.late.pop_front().map(Step::Compute));
    }

    fn overlap(&mut self, forward: usize, backward: usize) {
        let (forward, backward) = (self.next(Pass::Forward, forward), self.next(Pass::Backward, backward));
        self.steps.push(Step::Overlap { forward, backward });
    }
}
