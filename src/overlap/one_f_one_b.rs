//! Two microbatches at once: a layer's forward of one beside its backward of another ("1F1B"), in Megatron's launch
//! order.
//!
//! ```text
//!   transfer 0   combine' b |  dispatch f   dispatch' b |  combine f                        ' gradient   " weight gradient
//!   compute 0    before f   |  experts' b   experts" b  experts f | before' b   before" b
//! ```
//!
//! While rows of one microbatch move, the other computes, at no cost of smaller products. The order is that of
//! Megatron-core's combined schedule (`overlap_moe_expert_parallel_comm`). Its nodes of one microbatch wait for each
//! other in launch order, by a single event; here a node waits for the one whose result it takes, so gradients set out
//! without waiting for those of weights.

use super::graph::Body;
use super::{Graph, Node, Stream, Work};

/// Which pass a step is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The forward of one microbatch.
    Forward,
    /// The gradients of another's activations.
    Backward,
    /// The gradients of weights, of that other.
    WeightGradient,
}

/// Which part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
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
pub struct Step {
    /// Of which pass.
    pub pass: Pass,
    /// Of which part.
    pub part: Part,
}

impl Step {
    const fn of(pass: Pass, part: Part) -> Self {
        Step { pass, part }
    }

    /// Its name in errors and timelines.
    pub fn name(self) -> &'static str {
        match (self.pass, self.part) {
            (Pass::Forward, Part::Before) => "before",
            (Pass::Forward, Part::Dispatch) => "dispatch",
            (Pass::Forward, Part::Experts) => "experts",
            (Pass::Forward, Part::Combine) => "combine",
            (Pass::Backward, Part::Before) => "before backward",
            (Pass::Backward, Part::Dispatch) => "dispatch backward",
            (Pass::Backward, Part::Experts) => "experts backward",
            (Pass::Backward, Part::Combine) => "combine backward",
            (Pass::WeightGradient, Part::Before) => "before weights",
            (Pass::WeightGradient, Part::Experts) => "experts weights",
            (Pass::WeightGradient, Part::Dispatch | Part::Combine) => "no weights",
        }
    }

    /// Where it runs: what moves rows on [`Transfer(0)`](Stream::Transfer), the rest on [`Compute(0)`](Stream::Compute).
    pub fn stream(self) -> Stream {
        match self.part {
            Part::Dispatch | Part::Combine => Stream::Transfer(0),
            Part::Before | Part::Experts => Stream::Compute(0),
        }
    }

    /// The step whose result it takes; none for the first of a pass.
    pub fn after(self) -> Option<Step> {
        let Step { pass, part } = self;
        let before = match (pass, part) {
            (Pass::Forward, Part::Before) | (Pass::Backward, Part::Combine) => return None,
            (Pass::Forward, Part::Dispatch) => Part::Before,
            (Pass::Forward, Part::Experts) => Part::Dispatch,
            (Pass::Forward, Part::Combine) => Part::Experts,
            (Pass::Backward, Part::Experts) => Part::Combine,
            (Pass::Backward, Part::Dispatch) => Part::Experts,
            (Pass::Backward, Part::Before) => Part::Dispatch,
            (Pass::WeightGradient, part) => return Some(Step::of(Pass::Backward, part)),
        };
        Some(Step::of(pass, before))
    }
}

/// The launch order for a layer. With `early`, the gradients of what came before the layer are made before the
/// forward's products, so that what only they need is given back sooner.
pub fn one_f_one_b(early: bool) -> [Step; 10] {
    use Part::{Before, Combine, Dispatch, Experts};
    use Pass::{Backward, Forward, WeightGradient};
    let mut order = [
        Step::of(Backward, Combine),
        Step::of(Forward, Before),
        Step::of(Backward, Experts),
        Step::of(Forward, Dispatch),
        Step::of(WeightGradient, Experts),
        Step::of(Backward, Dispatch),
        Step::of(Forward, Experts),
        Step::of(Forward, Combine),
        Step::of(Backward, Before),
        Step::of(WeightGradient, Before),
    ];
    if early {
        order[6..9].rotate_right(1);
    }
    order
}

/// The last nodes of both passes, for the next layer of each.
#[derive(Clone, Copy, Debug, Default)]
pub struct Passes {
    /// Of the forward.
    pub forward: Option<Node>,
    /// Of the backward.
    pub backward: Option<Node>,
}

impl Passes {
    fn of(self, pass: Pass) -> Option<Node> {
        match pass {
            Pass::Forward => self.forward,
            Pass::Backward | Pass::WeightGradient => self.backward,
        }
    }
}

/// Adds a layer's two passes to a graph, behind those of the layers before. `microbatches` are the numbers of the forward
/// one and of the backward one, `body` gives each step its work; a step without work is left out, and so is a whole pass
/// at the beginning and at the end of a pipeline.
pub fn add_one_f_one_b<'a, G: 'a>(
    graph: &mut Graph<'a, G>,
    early: bool,
    microbatches: [u32; 2],
    behind: Passes,
    mut body: impl FnMut(Step) -> Option<Body<'a, G>>,
) -> Passes {
    let mut added: Vec<(Step, Node)> = Vec::new();
    let mut last = behind;
    for step in one_f_one_b(early) {
        let Some(body) = body(step) else { continue };
        let node_of = |step: Step| added.iter().find(|(one, _)| *one == step).map(|(_, node)| *node);
        // Past steps that are left out.
        let before = std::iter::successors(step.after(), |step| step.after()).find_map(node_of);
        let edges: Vec<Node> = before.or(behind.of(step.pass)).into_iter().collect();
        let chunk = microbatches[usize::from(step.pass != Pass::Forward)];
        let node = graph.add(step.stream(), Work { name: step.name(), chunk }, &edges, body);
        added.push((step, node));
        match step.pass {
            Pass::Forward => last.forward = Some(node),
            Pass::Backward => last.backward = Some(node),
            Pass::WeightGradient => {}
        }
    }
    last
}
