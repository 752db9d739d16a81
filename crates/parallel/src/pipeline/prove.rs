//! Proof of a plan: each pass once, with what it needs, and no deadlock.
//!
//! Stages are checked one by one, and then all together. A stage alone shows that each of its
//! passes comes once, behind the passes and the messages that it needs, and that it sends what it
//! has computed to the stage that needs it. The [replay](super::plan_replay) shows that messages
//! match in order and that no stage waits for ever. A stage waits for counts that only grow, so one
//! replay stands for all interleavings.

use super::plan::{Compute, Direction, Pass, Plan, Shape, Step, Tensor, Transfer};
use super::plan_replay::replay;
use super::plan_times::Costs;
use crate::error::PipelineError;

/// What holds for a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Passes of all stages.
    pub passes: u64,
    /// Messages between them.
    pub messages: u64,
    /// By stage: what it holds at most.
    pub peaks: Vec<Peak>,
}

/// Microbatches that a stage holds at most, each for one model chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// From the forward pass to the last backward pass: at least the inputs are held.
    pub inputs: u32,
    /// With all activations. With recomputation these live from the backward pass on only.
    pub activations: u32,
}

impl Plan {
    /// Proves the plan for channels on which a receiver holds up to `unread` messages that it has
    /// not asked for. With 0, a send waits for its receive.
    ///
    /// # Errors
    /// [`PipelineError`] says which step of which stage is wrong, or which stages wait for each
    /// other.
    pub fn prove(&self, unread: u32) -> Result<Proof, PipelineError> {
        let (mut passes, mut messages, mut peaks) = (0, 0, Vec::new());
        for (stage, steps) in (0..).zip(self.stages()) {
            let mut checked = Stage::new(self, stage);
            for (nth, step) in steps.iter().enumerate() {
                match step {
                    Step::Compute(compute) => checked.compute(nth, *compute)?,
                    Step::Overlap { forward, backward } => checked.overlap(nth, *forward, *backward)?,
                    Step::Transfer(group) => {
                        group.iter().try_for_each(|transfer| checked.transfer(nth, transfer))?;
                        let sends = group.iter().filter(|of| of.direction == Direction::Send);
                        messages += sends.count() as u64;
                    }
                }
            }
            checked.complete()?;
            passes += self.passes(stage).count() as u64;
            peaks.push(checked.peak);
        }
        replay(self, unread, Costs::default())?;
        Ok(Proof { passes, messages, peaks })
    }

    /// Messages that a receiver must hold unread, at least, lest the plan deadlocks.
    ///
    /// # Errors
    /// As [`Plan::prove`], if no number helps.
    pub fn least_unread(&self) -> Result<u32, PipelineError> {
        let Shape { microbatches, model_chunks, .. } = self.shape();
        let all = microbatches.saturating_mul(model_chunks);
        self.prove(all)?;
        // More room never hurts, so the numbers that work are all those from the least one on.
        let (mut least, mut works) = (0, all);
        while least < works {
            let middle = least + (works - least) / 2;
            match replay(self, middle, Costs::default()) {
                Ok(_) => works = middle,
                Err(_) => least = middle + 1,
            }
        }
        Ok(works)
    }
}

/// What has happened to a microbatch in a model chunk.
#[derive(Clone, Copy, Default)]
struct Progress {
    forward: bool,
    input: bool,
    weight: bool,
    activation_came: bool,
    gradient_came: bool,
    activation_sent: bool,
    gradient_sent: bool,
}

/// A stage amid its steps.
struct Stage {
    shape: Shape,
    stage: u32,
    recompute: bool,
    progress: Vec<Progress>,
    held: Peak,
    peak: Peak,
}

impl Stage {
    fn new(plan: &Plan, stage: u32) -> Stage {
        let shape = plan.shape();
        let count = shape.microbatches as usize * shape.model_chunks as usize;
        let (held, peak) = (Peak::default(), Peak::default());
        let progress = vec![Progress::default(); count];
        Stage { shape, stage, recompute: plan.recomputes(), progress, held, peak }
    }

    fn at(&mut self, microbatch: u32, model_chunk: u32) -> Option<&mut Progress> {
        let Shape { microbatches, model_chunks, .. } = self.shape;
        let exists = microbatch < microbatches && model_chunk < model_chunks;
        exists.then(|| &mut self.progress[(model_chunk * microbatches + microbatch) as usize])
    }

    fn compute(&mut self, step: usize, compute: Compute) -> Result<(), PipelineError> {
        self.check(step, compute)?;
        self.mark(compute);
        Ok(())
    }

    /// Two passes at once: neither can need the other.
    fn overlap(&mut self, step: usize, forward: Compute, backward: Compute) -> Result<(), PipelineError> {
        if forward.pass != Pass::Forward || backward.pass == Pass::Forward {
            return Err(PipelineError::Overlap { stage: self.stage, step, forward, backward });
        }
        self.check(step, forward)?;
        self.check(step, backward)?;
        self.mark(forward);
        self.mark(backward);
        Ok(())
    }

    fn check(&mut self, step: usize, compute: Compute) -> Result<(), PipelineError> {
        let (shape, stage) = (self.shape, self.stage);
        let Compute { pass, microbatch, model_chunk } = compute;
        let Some(&mut state) = self.at(microbatch, model_chunk) else {
            return Err(PipelineError::Unknown { stage, step, compute });
        };
        let twice = match pass {
            Pass::Forward => state.forward,
            Pass::Backward => state.input || state.weight,
            Pass::BackwardInput => state.input,
            Pass::BackwardWeight => state.weight,
        };
        if twice {
            return Err(PipelineError::Twice { stage, step, compute });
        }
        let before = match pass {
            Pass::Forward => shape.before(stage, model_chunk),
            Pass::Backward | Pass::BackwardInput => {
                self.done(step, compute, Compute { pass: Pass::Forward, ..compute })?;
                shape.after(stage, model_chunk)
            }
            Pass::BackwardWeight => {
                self.done(step, compute, Compute { pass: Pass::BackwardInput, ..compute })?;
                None
            }
        };
        match (before, shape.needs(stage, compute)) {
            (_, Some(needs)) => {
                let came = match needs.tensor {
                    Tensor::Activation => state.activation_came,
                    Tensor::Gradient => state.gradient_came,
                };
                if !came {
                    return Err(PipelineError::BeforeMessage { stage, step, compute, needs });
                }
            }
            (Some((_, model_chunk)), None) => self.done(step, compute, Compute { model_chunk, ..compute })?,
            (None, None) => {}
        }
        Ok(())
    }

    /// Checks that a pass of this stage has been made, which another needs.
    fn done(&mut self, step: usize, compute: Compute, needs: Compute) -> Result<(), PipelineError> {
        let made = self.at(needs.microbatch, needs.model_chunk).is_some_and(|state| match needs.pass {
            Pass::Forward => state.forward,
            Pass::Backward | Pass::BackwardInput => state.input,
            Pass::BackwardWeight => state.weight,
        });
        let stage = self.stage;
        if made { Ok(()) } else { Err(PipelineError::BeforePass { stage, step, compute, needs }) }
    }

    fn mark(&mut self, compute: Compute) {
        let recompute = self.recompute;
        if let Some(state) = self.at(compute.microbatch, compute.model_chunk) {
            state.forward |= compute.pass == Pass::Forward;
            state.input |= matches!(compute.pass, Pass::Backward | Pass::BackwardInput);
            state.weight |= matches!(compute.pass, Pass::Backward | Pass::BackwardWeight);
        }
        let (held, begins) = (&mut self.held, compute.pass == Pass::Forward);
        let repeats = recompute && matches!(compute.pass, Pass::Backward | Pass::BackwardInput);
        held.inputs += u32::from(begins);
        held.activations += u32::from(if recompute { repeats } else { begins });
        self.peak.inputs = self.peak.inputs.max(held.inputs);
        self.peak.activations = self.peak.activations.max(held.activations);
        if matches!(compute.pass, Pass::Backward | Pass::BackwardWeight) {
            held.inputs -= 1;
            held.activations -= 1;
        }
    }

    fn transfer(&mut self, step: usize, transfer: &Transfer) -> Result<(), PipelineError> {
        let (shape, stage) = (self.shape, self.stage);
        let Transfer { direction, tensor, peer, microbatch, model_chunk } = *transfer;
        let stray = PipelineError::Stray { stage, step, transfer: *transfer };
        if peer >= shape.stages || peer == stage || model_chunk >= shape.model_chunks {
            return Err(stray);
        }
        let receiver = if direction == Direction::Send { peer } else { stage };
        let source = match tensor {
            Tensor::Activation => shape.before(receiver, model_chunk),
            Tensor::Gradient => shape.after(receiver, model_chunk),
        };
        let Some((sender, made_by)) = source else { return Err(stray) };
        if sender != if direction == Direction::Send { stage } else { peer } {
            return Err(stray);
        }
        let chunk = if direction == Direction::Send { made_by } else { model_chunk };
        let Some(state) = self.at(microbatch, chunk) else { return Err(stray) };
        let moved = match (direction, tensor) {
            (Direction::Send, Tensor::Activation) => &mut state.activation_sent,
            (Direction::Send, Tensor::Gradient) => &mut state.gradient_sent,
            (Direction::Receive, Tensor::Activation) => &mut state.activation_came,
            (Direction::Receive, Tensor::Gradient) => &mut state.gradient_came,
        };
        if std::mem::replace(moved, true) {
            return Err(stray);
        }
        let (pass, made) = match tensor {
            Tensor::Activation => (Pass::Forward, state.forward),
            Tensor::Gradient => (Pass::BackwardInput, state.input),
        };
        if direction == Direction::Send && !made {
            let needs = Compute { pass, microbatch, model_chunk: chunk };
            return Err(PipelineError::SentEarly { stage, step, transfer: *transfer, needs });
        }
        Ok(())
    }

    /// Checks that every pass has been made.
    fn complete(&self) -> Result<(), PipelineError> {
        let missing = (0..).zip(&self.progress).find_map(|(at, state): (u32, _)| {
            let pass = match (state.forward, state.input, state.weight) {
                (false, ..) => Pass::Forward,
                (_, false, _) => Pass::Backward,
                (.., false) => Pass::BackwardWeight,
                _ => return None,
            };
            let (microbatch, model_chunk) = (at % self.shape.microbatches, at / self.shape.microbatches);
            Some(Compute { pass, microbatch, model_chunk })
        });
        missing.map_or(Ok(()), |compute| Err(PipelineError::Missing { stage: self.stage, compute }))
    }
}
