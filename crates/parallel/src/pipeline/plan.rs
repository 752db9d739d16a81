//! Plans: the passes and messages of each stage, in order.

use std::collections::HashMap;
use std::fmt;

use crate::error::PipelineError;

/// A pass over the layers of a model chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Outputs from inputs.
    Forward,
    /// Both gradients.
    Backward,
    /// Gradients of inputs, which the stage before waits for.
    BackwardInput,
    /// Gradients of weights, which no stage waits for.
    BackwardWeight,
}

/// A pass of one microbatch over one model chunk of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Compute {
    /// The pass.
    pub pass: Pass,
    /// The microbatch.
    pub microbatch: u32,
    /// The model chunk of the stage.
    pub model_chunk: u32,
}

impl fmt::Display for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::BackwardInput => "backward of inputs",
            Pass::BackwardWeight => "backward of weights",
        };
        write!(f, "{pass} of microbatch {}, chunk {}", self.microbatch, self.model_chunk)
    }
}

/// What a message carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tensor {
    /// Outputs of a virtual stage, for the next one.
    Activation,
    /// Gradients of these, for the one before.
    Gradient,
}

/// Whether a stage sends a message or receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the peer.
    Send,
    /// From the peer.
    Receive,
}

/// One side of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// The side.
    pub direction: Direction,
    /// What it carries.
    pub tensor: Tensor,
    /// The stage on the other side.
    pub peer: u32,
    /// The microbatch.
    pub microbatch: u32,
    /// The model chunk of the receiver, whose pass needs the message.
    pub model_chunk: u32,
}

impl Transfer {
    /// The same message as the peer of `stage` has it.
    fn other_side(&self, stage: u32) -> Transfer {
        let direction = match self.direction {
            Direction::Send => Direction::Receive,
            Direction::Receive => Direction::Send,
        };
        Transfer { direction, peer: stage, ..*self }
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensor = match self.tensor {
            Tensor::Activation => "activation",
            Tensor::Gradient => "gradient",
        };
        let (direction, way) = match self.direction {
            Direction::Send => ("send", "to"),
            Direction::Receive => ("receive", "from"),
        };
        let Transfer { peer, microbatch, model_chunk, .. } = self;
        write!(
            f,
            "{direction} {tensor} of microbatch {microbatch} for chunk {model_chunk} {way} stage {peer}"
        )
    }
}

/// A step of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A pass.
    Compute(Compute),
    /// A forward pass and a backward pass of other microbatches, one of which computes while the
    /// other communicates within the layer. Both end together.
    Overlap {
        /// The forward pass.
        forward: Compute,
        /// The backward pass, of any kind.
        backward: Compute,
    },
    /// Messages that begin together, as in a group call of NCCL. The step ends when all have.
    Transfer(Vec<Transfer>),
}

impl Step {
    /// Its passes: none, one or two.
    pub fn passes(&self) -> impl Iterator<Item = Compute> + Clone + use<> {
        let (first, second) = match *self {
            Step::Compute(compute) => (Some(compute), None),
            Step::Overlap { forward, backward } => (Some(forward), Some(backward)),
            Step::Transfer(_) => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// The same passes of microbatches that are numbered from another one on. Messages have none.
    pub(super) fn later(&self, first: u32) -> Option<Step> {
        let later = |of: Compute| Compute { microbatch: first + of.microbatch, ..of };
        match *self {
            Step::Compute(compute) => Some(Step::Compute(later(compute))),
            Step::Overlap { forward, backward } => {
                Some(Step::Overlap { forward: later(forward), backward: later(backward) })
            }
            Step::Transfer(_) => None,
        }
    }
}

/// Way of microbatches through the model chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Every microbatch passes all stages once for each model chunk: chunk `c` of stage `s` of `p`
    /// is the virtual stage `c p + s`.
    Rounds,
    /// The model is there twice. Microbatches of model chunk 0 go from the first stage to the last,
    /// as many others, of model chunk 1, from the last to the first.
    BothWays,
}

/// Forward passes of a plan, at most: 1,024 stages of 1,024 microbatches. A plan takes about 200
/// bytes for each.
const MOST_PASSES: u64 = 1 << 20;

/// Size of a pipeline's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Stages, one a rank.
    pub stages: u32,
    /// Microbatches of a step; of each way, if there are two.
    pub microbatches: u32,
    /// Model chunks of a stage.
    pub model_chunks: u32,
    /// Way through the model chunks.
    pub route: Route,
}

impl Shape {
    /// The stage and model chunk that take the outputs of this one; none behind the last.
    pub fn after(&self, stage: u32, model_chunk: u32) -> Option<(u32, u32)> {
        if self.route == Route::BothWays && model_chunk == 1 {
            return Some((stage.checked_sub(1)?, model_chunk));
        }
        if stage < self.stages.saturating_sub(1) {
            return Some((stage + 1, model_chunk));
        }
        let goes_on = self.route == Route::Rounds && model_chunk < self.model_chunks.saturating_sub(1);
        goes_on.then(|| (0, model_chunk + 1))
    }

    /// The stage and model chunk whose outputs this one takes; none before the first.
    pub fn before(&self, stage: u32, model_chunk: u32) -> Option<(u32, u32)> {
        if self.route == Route::BothWays && model_chunk == 1 {
            return (stage < self.stages.saturating_sub(1)).then(|| (stage + 1, model_chunk));
        }
        if stage > 0 {
            return Some((stage - 1, model_chunk));
        }
        Some((self.stages.checked_sub(1)?, model_chunk.checked_sub(1)?))
    }

    /// Checks that plans of this size can be made.
    pub(super) fn check(&self) -> Result<(), PipelineError> {
        let Shape { stages, microbatches, model_chunks, route } = *self;
        let counts = [("stage", stages), ("microbatch", microbatches), ("model chunk", model_chunks)];
        if let Some((what, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(PipelineError::None { what });
        }
        let passes = counts.iter().fold(1, |all: u64, (_, count)| all.saturating_mul((*count).into()));
        if passes > MOST_PASSES {
            return Err(PipelineError::TooMany { passes, most: MOST_PASSES });
        }
        if route == Route::BothWays && model_chunks != 2 {
            return Err(PipelineError::Ways { model_chunks });
        }
        Ok(())
    }

    /// The message that a pass needs, as its stage receives it; none if it needs none.
    pub(super) fn needs(&self, stage: u32, of: Compute) -> Option<Transfer> {
        let (tensor, peer) = match of.pass {
            Pass::Forward => (Tensor::Activation, self.before(stage, of.model_chunk)?.0),
            Pass::Backward | Pass::BackwardInput => (Tensor::Gradient, self.after(stage, of.model_chunk)?.0),
            Pass::BackwardWeight => return None,
        };
        let Compute { microbatch, model_chunk, .. } = of;
        let direction = Direction::Receive;
        (peer != stage).then_some(Transfer { direction, tensor, peer, microbatch, model_chunk })
    }

    /// The message that a pass makes, as its stage sends it; none if no other stage needs it.
    fn makes(&self, stage: u32, of: Compute) -> Option<Transfer> {
        let (tensor, (peer, model_chunk)) = match of.pass {
            Pass::Forward => (Tensor::Activation, self.after(stage, of.model_chunk)?),
            Pass::Backward | Pass::BackwardInput => (Tensor::Gradient, self.before(stage, of.model_chunk)?),
            Pass::BackwardWeight => return None,
        };
        let (direction, microbatch) = (Direction::Send, of.microbatch);
        (peer != stage).then_some(Transfer { direction, tensor, peer, microbatch, model_chunk })
    }
}

/// For each stage its passes and messages in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    shape: Shape,
    recompute: bool,
    stages: Vec<Vec<Step>>,
}

impl Plan {
    /// A plan of the caller's own. [`Plan::prove`] says whether it works.
    ///
    /// # Errors
    /// [`PipelineError::None`] and [`PipelineError::TooMany`] for a shape that is empty or too
    /// large, [`PipelineError::Ways`] if two ways do not have two model chunks,
    /// [`PipelineError::Stages`] if there is not one list for each stage.
    pub fn new(shape: Shape, stages: Vec<Vec<Step>>) -> Result<Plan, PipelineError> {
        shape.check()?;
        if stages.len() != shape.stages as usize {
            return Err(PipelineError::Stages { seen: stages.len(), stages: shape.stages });
        }
        Ok(Plan { shape, recompute: false, stages })
    }

    /// The passes of each stage with their messages: one group between two steps, of what the first
    /// made and what the second needs.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_messages(shape: Shape, stages: Vec<Vec<Step>>) -> Result<Plan, PipelineError> {
        let complete = |(stage, passes): (u32, Vec<Step>)| {
            let mut steps = Vec::with_capacity(2 * passes.len() + 1);
            let mut group = Vec::new();
            for step in passes {
                group.extend(step.passes().filter_map(|compute| shape.needs(stage, compute)));
                if !group.is_empty() {
                    steps.push(Step::Transfer(std::mem::take(&mut group)));
                }
                group.extend(step.passes().filter_map(|compute| shape.makes(stage, compute)));
                steps.push(step);
            }
            if !group.is_empty() {
                steps.push(Step::Transfer(group));
            }
            steps
        };
        Plan::new(shape, (0..).zip(stages).map(complete).collect())
    }

    /// So many steps one behind another, without a meeting between them: a stage begins the next
    /// one when its own passes of the last have ended. Microbatch `i` of step `k` is number `k m +
    /// i`, with `m` microbatches in a step. Messages are those of [`with_messages`].
    ///
    /// [`with_messages`]: Plan::with_messages
    ///
    /// ```
    /// use sidelane_parallel::pipeline::{Costs, Schedule};
    ///
    /// let (step, costs) = (Schedule::ZeroBubbleH2.plan(3, 5)?, Costs::new(1, 1, 1));
    /// assert_eq!(step.time(2, costs)?.time(), 17);
    /// assert_eq!(step.steps(4)?.time(2, costs)?.time(), 4 * 15 + 2);
    /// # Ok::<(), sidelane_parallel::PipelineError>(())
    /// ```
    ///
    /// # Errors
    /// [`PipelineError::None`] for no step, [`PipelineError::TooMany`] for too many.
    pub fn steps(&self, steps: u32) -> Result<Plan, PipelineError> {
        let of_step = self.shape.microbatches;
        let shape = Shape { microbatches: of_step.saturating_mul(steps), ..self.shape };
        if steps == 0 {
            return Err(PipelineError::None { what: "step" });
        }
        shape.check()?;
        let repeated = |own: &Vec<Step>| {
            let step = |nth| own.iter().filter_map(move |step| step.later(nth * of_step));
            (0..steps).flat_map(step).collect()
        };
        let plan = Plan::with_messages(shape, self.stages.iter().map(repeated).collect())?;
        Ok(plan.recompute(self.recompute))
    }

    /// With full activation recomputation: a stage keeps the inputs of a forward pass alone, and
    /// repeats the pass before it computes the gradients of inputs.
    pub fn recompute(mut self, recompute: bool) -> Plan {
        self.recompute = recompute;
        self
    }

    /// Whether forward passes are repeated.
    pub fn recomputes(&self) -> bool {
        self.recompute
    }

    /// Its size.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Steps of each stage.
    pub fn stages(&self) -> &[Vec<Step>] {
        &self.stages
    }

    /// The same plan with each message as a step of its own, for calls that block one after
    /// another.
    ///
    /// A stage first sends the result of its pass, because the message that it receives may depend
    /// on it. Where two stages have a message for each other in one step, the later stage receives
    /// first. Were both to send first, each would wait for the other, unless a receiver holds
    /// messages unread.
    pub fn one_by_one(&self) -> Plan {
        let steps = (0..).zip(&self.stages).flat_map(|(stage, steps)| {
            (0..).zip(steps).flat_map(move |(nth, step)| match step {
                Step::Transfer(group) => group.iter().map(|of| ((stage, *of), nth)).collect(),
                Step::Compute(_) | Step::Overlap { .. } => Vec::new(),
            })
        });
        let steps: HashMap<(u32, Transfer), usize> = steps.collect();
        let of_peer = |stage, of: &Transfer| steps.get(&(of.peer, of.other_side(stage)));
        // Whether a receive comes before the sends of its step.
        let first = |stage, of: &Transfer, group: &[Transfer]| {
            let mut sends =
                group.iter().filter(|one| one.direction == Direction::Send && one.peer == of.peer);
            let there = of_peer(stage, of);
            stage > of.peer && there.is_some() && sends.any(|send| of_peer(stage, send) == there)
        };
        let apart = |stage, step: &Step| match step {
            Step::Compute(_) | Step::Overlap { .. } => vec![step.clone()],
            Step::Transfer(group) => {
                let mut sorted = group.clone();
                sorted.sort_by_key(|of| match of.direction {
                    Direction::Receive if first(stage, of, group) => 0,
                    Direction::Send => 1,
                    Direction::Receive => 2,
                });
                sorted.into_iter().map(|of| Step::Transfer(vec![of])).collect()
            }
        };
        let stages = (0..).zip(&self.stages);
        let stages = stages.map(|(stage, steps)| steps.iter().flat_map(|step| apart(stage, step)).collect());
        Plan { stages: stages.collect(), ..*self }
    }

    /// Passes of a stage in order.
    pub fn passes(&self, stage: u32) -> impl Iterator<Item = Compute> {
        self.stages.get(stage as usize).into_iter().flatten().flat_map(Step::passes)
    }
}
