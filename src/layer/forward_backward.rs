//! Two microbatches at once: the forward pass of one concurrent with the backward pass of another.

use super::backward::{self, Gradients, StepGradients};
use super::moe::OverlapSettings;
use super::pass_order::{BackwardOps, ChunkCounts, ForwardOps};
use super::router_step::{Input, Routed};
use super::step::{ChunkTape, SavedShared, StepContext};
use super::{MoeLayer, Tape, forward};
use crate::dtype::Element;
use crate::error::{Error, NodeLabel, StreamId};
use crate::overlap::{Body, Direction, Graph, LayerOp, LayerStep, Passes, Run};
use crate::world::WorldState;

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
        let plan = self.plan;
        let (context, world) = self.context();
        let pair = CombinedPass { ahead: (&context, &plan), back: (&context, &plan), world: &world };
        let (out, kept, made) = pair.run((input, &routed), (of_out, &before), (chunks, shared))?;
        let gradients = self.gradients(&before, made)?;
        let (chunks, shared) = kept;
        Ok((out, Tape { instance, routed, chunks, shared }, gradients))
    }

    /// As [`combined_forward_backward`](Self::combined_forward_backward), with the backward pass of
    /// another layer, whose tape it is: a stage of DualPipe holds two pieces of the model. The
    /// other layer is of the same ranks. Collective.
    ///
    /// # Errors
    /// As both. If either is refused, so is the other, and the tape is used up.
    pub fn combined_with<E: Element>(
        &mut self,
        input: &Input<'_, [E]>,
        other: &mut MoeLayer,
        tape: Tape,
        of_out: &[E],
    ) -> Result<(Vec<E>, Tape, Gradients<E>), Error> {
        let routed = match other.check_backward(&tape, of_out).and_then(|()| self.route(input)) {
            Ok(routed) => routed,
            Err(error) => return Err(other.refuse_backward(&tape, error)),
        };
        let Tape { routed: before, chunks, shared, .. } = tape;
        let (instance, plan, plan_of_other) = (self.instance, self.plan, other.plan);
        let ((context, world), (context_of_other, _)) = (self.context(), other.context());
        let back = (&context_of_other, &plan_of_other);
        let pair = CombinedPass { ahead: (&context, &plan), back, world: &world };
        let (out, kept, made) = pair.run((input, &routed), (of_out, &before), (chunks, shared))?;
        let gradients = other.gradients(&before, made)?;
        let (chunks, shared) = kept;
        Ok((out, Tape { instance, routed, chunks, shared }, gradients))
    }
}

/// What a forward pass keeps for the backward pass: of chunks, and of the shared expert.
type ForwardTape = (Vec<ChunkTape>, Option<SavedShared>);

/// The layer of the forward pass and that of the backward pass, which may be one.
struct CombinedPass<'p, 'm> {
    ahead: (&'p StepContext<'m>, &'p OverlapSettings),
    back: (&'p StepContext<'m>, &'p OverlapSettings),
    world: &'p WorldState,
}

impl CombinedPass<'_, '_> {
    /// Outputs and what the forward pass keeps, and what the backward pass makes of what was kept.
    fn run<E: Element>(
        &self,
        (input, routed): (&Input<'_, [E]>, &Routed),
        (of_out, before): (&[E], &Routed),
        kept: ForwardTape,
    ) -> Result<(Vec<E>, ForwardTape, StepGradients), Error> {
        let CombinedPass { ahead: (context, plan), back: (context_of_back, plan_of_back), world } = *self;
        let cuts = [plan.cut(), plan_of_back.cut()];
        let mut out = vec![E::zeroed(); input.x.len()];
        let ahead = forward::ForwardStep::new(context, input, routed, &mut out, plan);
        let back = backward::BackwardStep::new(context_of_back, of_out, before, kept, plan_of_back)?;
        let mut graph = Graph::new();
        let last = graph.add_one_f_one_b(false, MICROBATCHES, Passes::default(), |step| {
            work_of(step, cuts, &ahead, &back)
        });
        let combined: Vec<_> = last.forward.into_iter().collect();
        let sum = NodeLabel { name: "sum", chunk: MICROBATCHES[0] };
        let chunks = cuts[0].chunks;
        graph.add(StreamId::Compute(0), sum, &combined, |_| all(chunks, |chunk| ahead.sum(chunk)));
        let limit = |plan: &OverlapSettings| plan.limit(world).saturating_mul(plan.chunks);
        let deadline = Some(limit(plan).max(limit(plan_of_back)));
        OverlapSettings { deadline, ..*plan }.run(graph, world)?;
        let kept = ahead.kept()?;
        Ok((out, kept, back.made()?))
    }
}

/// Work of a step of the two passes.
fn work_of<'g, E: Element>(
    step: LayerStep,
    [cut, cut_of_back]: [ChunkCounts; 2],
    ahead: &'g forward::ForwardStep<'_, '_, E>,
    back: &'g backward::BackwardStep<'_, '_, E>,
) -> Option<Body<'g, Run>> {
    let of = if step.pass == Direction::Forward { cut } else { cut_of_back };
    let ChunkCounts { chunks, groups, .. } = of;
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
