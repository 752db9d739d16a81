//! Two microbatches at once: a layer's forward of one concurrent with its backward of another
//! ("1F1B"), in Megatron's launch order.
//!
//! ```text
//!   transfer 0   combine' b |  dispatch f   dispatch' b |  combine f                        ' gradient   " weight gradient
//!   compute 0    before f   |  experts' b   experts" b  experts f | before' b   before" b
//! ```
//!
//! While rows of one microbatch move, the other computes, at no cost of smaller products. The order
//! is that of Megatron-core's combined schedule (`overlap_moe_expert_parallel_comm`). Its nodes of
//! one microbatch wait for each other in launch order, by a single event; here a node waits for the
//! one whose result it takes, so gradients leave without waiting for those of weights.

use super::task_graph::Body;
use super::{Graph, Node, NodeLabel, StreamId};

/// Which pass a step is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Direction {
    /// The forward of one microbatch.
    Forward,
    /// The gradients of another's activations.
    Backward,
    /// The gradients of weights, of that other.
    WeightGradient,
}

/// Which part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerOp {
    /// Whatever comes before: attention, norms, the gate, shared experts.
    Before,
    /// Tokens to experts; backward, the sum of row gradients.
    Dispatch,
    /// The products.
    Experts,
    /// Sums to tokens; backward, gradients to rows.
    Combine,
}

/// A node of the two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerStep {
    /// Of which pass.
    pub pass: Direction,
    /// Of which part.
    pub part: LayerOp,
}

impl LayerStep {
    const fn of(pass: Direction, part: LayerOp) -> Self {
        LayerStep { pass, part }
    }

    /// The launch order for a layer. With `early`, the gradients of the layers before are computed
    /// before the forward's products, so that memory that only they need is freed sooner.
    pub fn one_f_one_b(early: bool) -> [LayerStep; 10] {
        use Direction::{Backward, Forward, WeightGradient};
        use LayerOp::{Before, Combine, Dispatch, Experts};
        let mut order = [
            LayerStep::of(Backward, Combine),
            LayerStep::of(Forward, Before),
            LayerStep::of(Backward, Experts),
            LayerStep::of(Forward, Dispatch),
            LayerStep::of(WeightGradient, Experts),
            LayerStep::of(Backward, Dispatch),
            LayerStep::of(Forward, Experts),
            LayerStep::of(Forward, Combine),
            LayerStep::of(Backward, Before),
            LayerStep::of(WeightGradient, Before),
        ];
        if early {
            order[6..9].rotate_right(1);
        }
        order
    }

    /// Its name in errors and timelines.
    pub fn name(self) -> &'static str {
        match (self.pass, self.part) {
            (Direction::Forward, LayerOp::Before) => "before",
            (Direction::Forward, LayerOp::Dispatch) => "dispatch",
            (Direction::Forward, LayerOp::Experts) => "experts",
            (Direction::Forward, LayerOp::Combine) => "combine",
            (Direction::Backward, LayerOp::Before) => "before backward",
            (Direction::Backward, LayerOp::Dispatch) => "dispatch backward",
            (Direction::Backward, LayerOp::Experts) => "experts backward",
            (Direction::Backward, LayerOp::Combine) => "combine backward",
            (Direction::WeightGradient, LayerOp::Before) => "before weights",
            (Direction::WeightGradient, LayerOp::Experts) => "experts weights",
            (Direction::WeightGradient, LayerOp::Dispatch | LayerOp::Combine) => "no weights",
        }
    }

    /// Its stream: transfers on [`Transfer(0)`](StreamId::Transfer), the rest on
    /// [`Compute(0)`](StreamId::Compute).
    pub fn stream(self) -> StreamId {
        match self.part {
            LayerOp::Dispatch | LayerOp::Combine => StreamId::Transfer(0),
            LayerOp::Before | LayerOp::Experts => StreamId::Compute(0),
        }
    }

    /// The step whose result it takes; `None` for the first of a pass.
    pub fn after(self) -> Option<LayerStep> {
        let LayerStep { pass, part } = self;
        let before = match (pass, part) {
            (Direction::Forward, LayerOp::Before) | (Direction::Backward, LayerOp::Combine) => return None,
            (Direction::Forward, LayerOp::Dispatch) => LayerOp::Before,
            (Direction::Forward, LayerOp::Experts) => LayerOp::Dispatch,
            (Direction::Forward, LayerOp::Combine) => LayerOp::Experts,
            (Direction::Backward, LayerOp::Experts) => LayerOp::Combine,
            (Direction::Backward, LayerOp::Dispatch) => LayerOp::Experts,
            (Direction::Backward, LayerOp::Before) => LayerOp::Dispatch,
            (Direction::WeightGradient, part) => return Some(LayerStep::of(Direction::Backward, part)),
        };
        Some(LayerStep::of(pass, before))
    }
}

/// The last nodes of both passes, for the next layer of each.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Passes {
    /// Of the forward.
    pub forward: Option<Node>,
    /// Of the backward.
    pub backward: Option<Node>,
}

impl Passes {
    fn of(self, pass: Direction) -> Option<Node> {
        match pass {
            Direction::Forward => self.forward,
            Direction::Backward | Direction::WeightGradient => self.backward,
        }
    }
}

impl<'a, G: 'a> Graph<'a, G> {
    /// Adds a layer's two passes, behind those of the layers before. `microbatches` are the numbers
    /// of the forward one and of the backward one, `body` returns the work of each step; a step
    /// without work is left out, and so is a whole pass at the beginning and at the end of a
    /// pipeline.
    pub fn add_one_f_one_b(
        &mut self,
        early: bool,
        microbatches: [u32; 2],
        behind: Passes,
        mut body: impl FnMut(LayerStep) -> Option<Body<'a, G>>,
    ) -> Passes {
        let mut added: Vec<(LayerStep, Node)> = Vec::new();
        let mut last = behind;
        for step in LayerStep::one_f_one_b(early) {
            let Some(body) = body(step) else { continue };
            let node_of = |step: LayerStep| added.iter().find(|(one, _)| *one == step).map(|(_, node)| *node);
            // Past steps that are left out.
            let before = std::iter::successors(step.after(), |step| step.after()).find_map(node_of);
            let edges: Vec<Node> = before.or(behind.of(step.pass)).into_iter().collect();
            let chunk = microbatches[usize::from(step.pass != Direction::Forward)];
            let node = self.add(step.stream(), NodeLabel { name: step.name(), chunk }, &edges, body);
            added.push((step, node));
            match step.pass {
                Direction::Forward => last.forward = Some(node),
                Direction::Backward => last.backward = Some(node),
                Direction::WeightGradient => {}
            }
        }
        last
    }
}
