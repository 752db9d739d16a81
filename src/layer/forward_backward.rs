//! Two microbatches at once: the forward pass of one concurrent with the backward pass of another.

use super::backward::{self, Gradients};
use super::forward;
use super::input::Input;
use super::moe::Plan;
use super::pass_order::{BackwardOps, ChunkCounts, ForwardOps};
use super::{MoeLayer, Tape};
use crate::dtype::Element;
use crate::error::{Error, NodeLabel, StreamId};
use crate::overlap::{Body, Direction, Graph, LayerOp, LayerStep, Passes, Run};

/// Of the forward and of the backward pass, as errors and timelines name them.
const MICROBATCHES: [u32; 2] = [1, 0];

impl MoeLayer {
    /// One microbatch forward, as [`forward`](Self::forward), and the tape of another backward, as
    /// [`backward`](Self::backward), to the same bits: while rows of one move, the other computes,
    /// in the order of [1F1B](crate::overlap::LayerStep::one_f_one_b). This needs no chunks; with
    /// chunks, each step goes through all of them, and its deadline is that of one times their
    /// number. [Streams](super::MoeLayerBuilder::streams) do not apply: the caller's thread runs
    /// all experts. Collective.
    ///
    /// # Errors
    /// As both. If either is refused, so is the other, and the tape is used up.
    pub fn combined_forward_backward<E: Element>(
        &mut self,
        input: &Input<'_, [E]>,
        tape: Tape,
        of_out: &[E],
    ) -> Result<(Vec<E>, Tape, Gradients<E>), Error> {
        let routed = match self.check_backward(&tape, of_out).and_then(|()| self.route(input)) {
            Ok(routed) => routed,
            Err(error) => return Err(self.refuse_backward(&tape, error)),
        };
        let Tape { instance, routed: before, chunks, shared } = tape;
        let (plan, cut) = (self.plan, self.plan.cut());
        let mut out = vec![E::zeroed(); input.x.len()];
        let (context, world) = self.context();
        let ahead = forward::Step::new(&context, input, &routed, &mut out, &plan);
        let back = backward::Step::new(&context, of_out, &before, (chunks, shared), &plan)?;
        let mut graph = Graph::new();
        let last = graph.add_one_f_one_b(false, MICROBATCHES, Passes::default(), |step| {
            work_of(step, cut, &ahead, &back)
        });
        let combined: Vec<_> = last.forward.into_iter().collect();
        let sum = NodeLabel { name: "sum", chunk: MICROBATCHES[0] };
        graph.add(StreamId::Compute(0), sum, &combined, |_| all(cut.chunks, |chunk| ahead.sum(chunk)));
        let deadline = Some(plan.limit(&world).saturating_mul(plan.chunks));
        Plan { deadline, ..plan }.run(graph, &world)?;
        let (chunks, shared) = ahead.kept()?;
        let made = back.made()?;
        let gradients = self.gradients(&before, made)?;
        Ok((out, Tape { instance, routed, chunks, shared }, gradients))
    }
}

/// Work of a step of the two passes.
fn work_of<'g, E: Element>(
    step: LayerStep,
    ChunkCounts { chunks, groups, .. }: ChunkCounts,
    ahead: &'g forward::Step<'_, '_, E>,
    back: &'g backward::Step<'_, '_, E>,
) -> Option<Body<'g, Run>> {
    Some(match (step.pass, step.part) {
        (Direction::Forward, LayerOp::Before) => Box::new(|_| ahead.shared()),
        (Direction::Forward, LayerOp::Dispatch) => {
            Box::new(move |run| all(chunks, |chunk| ahead.dispatch(chunk, run)))
        }
        (Direction::Forward, LayerOp::Experts) => {
            Box::new(move |_| all(chunks, |chunk| all(groups, |group| ahead.experts(chunk, group))))
        }
        (Direction::Forward, LayerOp::Combine) => {
            Box::new(move |run| all(chunks, |chunk| ahead.combine(chunk, run)))
        }
        (Direction::Backward, LayerOp::Combine) => Box::new(move |run| {
            all(chunks, |chunk| back.combine(chunk, run))?;
            // As in backward alone: two objects that are called in different orders would wait for
            // each other, while one object reports the difference.
            back.sources(run)
        }),
        (Direction::Backward, LayerOp::Experts) => {
            Box::new(move |_| all(chunks, |chunk| all(groups, |group| back.experts(chunk, group))))
        }
        (Direction::Backward, LayerOp::Dispatch) => {
            Box::new(move |run| all(chunks, |chunk| back.dispatch(chunk, run)))
        }
        (Direction::Backward, LayerOp::Before) => Box::new(|_| back.shared()),
        (Direction::WeightGradient, LayerOp::Experts) => Box::new(|_| back.weights()),
        (Direction::WeightGradient, LayerOp::Before) => Box::new(|_| back.shared_weights()),
        (Direction::WeightGradient, LayerOp::Dispatch | LayerOp::Combine) => return None,
    })
}

fn all(count: usize, work: impl Fn(usize) -> Result<(), Error>) -> Result<(), Error> {
    (0..count).try_for_each(work)
}
