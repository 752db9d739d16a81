//! Generators of plans.

use super::plan::{Compute, Pass, Plan, Route, Shape, Step};
use crate::error::PipelineError;

/// Forward passes of an interleaved schedule before the first backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WarmUp {
    /// `2 (p-s-1) + (v-1) p`, as Megatron has it: receives are posted a round early.
    Megatron,
    /// `(p-s-1) + (v-1) p`: the same time with fewer activations, but the first stage must hold up
    /// to `p / 2` messages of the last one unread.
    Least,
}

/// Rule by which stages order their passes, for microbatches that enter at the first stage.
///
/// ```
/// use sidelane_parallel::pipeline::{Costs, Schedule};
///
/// let plan = Schedule::OneFOneB.plan(4, 8)?;
/// let proof = plan.prove(0)?;
/// assert_eq!(proof.peaks.iter().map(|peak| peak.inputs).collect::<Vec<_>>(), [4, 3, 2, 1]);
///
/// let costs = Costs::new(1, 1, 1);
/// let bubble = |schedule: Schedule| -> Result<u64, sidelane_parallel::PipelineError> {
///     Ok(schedule.plan(4, 8)?.time(1, costs)?.bubble())
/// };
/// assert_eq!(bubble(Schedule::OneFOneB), Ok(9));
/// assert_eq!(bubble(Schedule::ZeroBubbleH1), Ok(3));
/// assert_eq!(bubble(Schedule::ZeroBubbleH2), Ok(0));
/// # Ok::<(), sidelane_parallel::PipelineError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// All forward passes, then all backward passes.
    GPipe,
    /// One forward pass, one backward pass.
    OneFOneB,
    /// The same over several model chunks of a stage.
    Interleaved {
        /// Model chunks of a stage.
        model_chunks: u32,
        /// Forward passes before the first backward pass.
        warm_up: WarmUp,
    },
    /// Zero bubble with the memory of 1F1B: gradients of weights fill the bubble.
    ZeroBubbleH1,
    /// Zero bubble with about twice the memory of 1F1B.
    ZeroBubbleH2,
}

impl Schedule {
    /// The plan of all stages.
    ///
    /// # Errors
    /// [`PipelineError::None`] for no stage, microbatch or model chunk, [`PipelineError::TooMany`]
    /// for too many of them; [`PipelineError::Rounds`] if several model chunks do not get whole
    /// rounds of microbatches.
    pub fn plan(self, stages: u32, microbatches: u32) -> Result<Plan, PipelineError> {
        let model_chunks = match self {
            Schedule::Interleaved { model_chunks, .. } => model_chunks,
            _ => 1,
        };
        if model_chunks > 1 && stages > 0 && !microbatches.is_multiple_of(stages) {
            return Err(PipelineError::Rounds { microbatches, stages, model_chunks });
        }
        let shape = Shape { stages, microbatches, model_chunks, route: Route::Rounds };
        shape.check()?;
        let steps = |stage| self.passes(shape, stage).into_iter().map(Step::Compute).collect();
        Plan::with_messages(shape, (0..stages).map(steps).collect())
    }

    /// Forward passes before the first backward pass, and backward passes before the first gradient
    /// of weights, if these are passes of their own.
    fn order(self, shape: Shape, stage: u32) -> (u32, Option<u32>) {
        let behind = shape.stages - stage - 1;
        let rounds = (shape.model_chunks - 1) * shape.stages;
        match self {
            Schedule::GPipe => (shape.microbatches, None),
            Schedule::OneFOneB => (behind, None),
            Schedule::Interleaved { warm_up: WarmUp::Megatron, .. } => (2 * behind + rounds, None),
            Schedule::Interleaved { warm_up: WarmUp::Least, .. } => (behind + rounds, None),
            Schedule::ZeroBubbleH1 => (behind, Some(stage)),
            Schedule::ZeroBubbleH2 => (2 * behind, Some(2 * stage)),
        }
    }

    fn passes(self, shape: Shape, stage: u32) -> Vec<Compute> {
        let all = shape.microbatches * shape.model_chunks;
        let (warm_up, delay) = self.order(shape, stage);
        let warm_up = warm_up.min(all);
        let backward = if delay.is_some() { Pass::BackwardInput } else { Pass::Backward };
        let mut passes: Vec<_> = (0..warm_up).map(|slot| pass(shape, Pass::Forward, slot)).collect();
        for slot in 0..all {
            if warm_up + slot < all {
                passes.push(pass(shape, Pass::Forward, warm_up + slot));
            }
            passes.push(pass(shape, backward, slot));
            if let Some(delayed) = delay.and_then(|delay| slot.checked_sub(delay)) {
                passes.push(pass(shape, Pass::BackwardWeight, delayed));
            }
        }
        if let Some(delay) = delay {
            let rest = all.saturating_sub(delay)..all;
            passes.extend(rest.map(|slot| pass(shape, Pass::BackwardWeight, slot)));
        }
        passes
    }
}

/// The pass of a slot. Slots go in rounds: as many microbatches as there are stages pass the first
/// model chunk, then the second, and so on; backward from the last.
fn pass(shape: Shape, pass: Pass, slot: u32) -> Compute {
    if shape.model_chunks == 1 {
        return Compute { pass, microbatch: slot, model_chunk: 0 };
    }
    let Shape { stages, model_chunks, .. } = shape;
    let round = stages * model_chunks;
    let (microbatch, nth) = (slot / round * stages + slot % stages, slot % round / stages);
    let model_chunk = if pass == Pass::Forward { nth } else { model_chunks - 1 - nth };
    Compute { pass, microbatch, model_chunk }
}
