//! Forward: the graph of a step, and what its nodes do.

use std::ops::Range;
use std::sync::OnceLock;

use super::moe::{OverlapSettings, routing_of};
use super::pass_order::{self, ForwardOps};
use super::router_step::{Input, Routed};
use super::step::{
    ChunkTape, F32Rows, GroupOutputs, Outgoing, ReceivedChunk, SavedShared, StepContext, round_into, widened,
};
use super::{MoeLayer, Saved, Segments, Tape};
use crate::dtype::Element;
use crate::error::{CallKind, Error, OverlapError};
use crate::gate::Routing;
use crate::overlap::{Handoff, Run};

/// Inputs of the nodes.
pub(super) struct ForwardStep<'s, 'm, E> {
    context: &'s StepContext<'m>,
    input: Input<'s, [E]>,
    routing: Routing<'s>,
    /// The tokens as f32.
    x: &'s [f32],
    shared_output: Handoff<(Vec<f32>, Saved)>,
    chunks: Vec<ChunkOutputs<'s, E>>,
}

/// Values that nodes leave to each other, of one chunk.
struct ChunkOutputs<'s, E> {
    tokens: Range<usize>,
    /// Read by all groups of experts at once.
    landed: OnceLock<ReceivedChunk>,
    /// By each group.
    made: Vec<Handoff<GroupOutputs>>,
    /// Where peers read.
    output: Outgoing,
    out: Handoff<&'s mut [E]>,
}

impl MoeLayer {
    /// One forward pass: `residual + combined + shared`, `[tokens, hidden]`, and the tape for its
    /// gradients. Collective.
    ///
    /// # Errors
    /// On every rank, with no rows moved and the layer still usable:
    /// [`PlanError`](crate::error::PlanError) or [`GateError`](crate::error::GateError) where the
    /// input is wrong, and on the others, by [`OverlapError::Failed`],
    /// [`CallError::PeerRefused`](crate::error::CallError); likewise
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError) if a rank lacks room. A failure that
    /// ends the world is an [`OverlapError`] that names work and chunk, and holds the
    /// [`LayerError`](crate::error::LayerError), [`LaneError`](crate::error::LaneError) or
    /// [`Cause`](crate::error::Cause).
    pub fn forward<E: Element>(&mut self, input: &Input<'_, [E]>) -> Result<(Vec<E>, Tape), Error> {
        let routed = match self.route(input) {
            Ok(routed) => routed,
            Err(error) => return Err(self.refuse(CallKind::Dispatch, error)),
        };
        let (plan, instance) = (self.plan, self.instance);
        let mut out = vec![E::zeroed(); input.x.len()];
        let (context, world) = self.context();
        let step = ForwardStep::new(&context, input, &routed, &mut out, &plan);
        plan.run(pass_order::forward(&step, plan.cut(), plan.turns()), &world)?;
        let (chunks, shared) = step.kept()?;
        Ok((out, Tape { instance, routed, chunks, shared }))
    }
}

fn chunk_outputs<'s, E>(
    out: &'s mut [E],
    tokens: usize,
    plan: &OverlapSettings,
    hidden: usize,
) -> Vec<ChunkOutputs<'s, E>> {
    let mut rest = out;
    let place = |tokens: Range<usize>| {
        let (part, behind) = std::mem::take(&mut rest).split_at_mut(tokens.len() * hidden);
        rest = behind;
        let made = (0..plan.groups).map(|_| Handoff::empty()).collect();
        let (landed, output) = (OnceLock::new(), Outgoing::default());
        ChunkOutputs { tokens, landed, made, output, out: Handoff::new(part) }
    };
    plan.slices(tokens).map(place).collect()
}

impl<E> ChunkOutputs<'_, E> {
    fn landed(&self) -> Result<&ReceivedChunk, Error> {
        Ok(self.landed.get().ok_or(OverlapError::HandoffEmpty)?)
    }

    fn kept(self) -> Option<ChunkTape> {
        let landed = self.landed.into_inner()?;
        let made = self.made.into_iter().take(landed.groups.len()).map(Handoff::into_inner);
        Some(ChunkTape { made: made.collect::<Option<_>>()?, landed })
    }
}

impl<'s, 'm, E: Element> ForwardStep<'s, 'm, E> {
    pub fn new(
        context: &'s StepContext<'m>,
        input: &Input<'s, [E]>,
        routed: &'s Routed,
        out: &'s mut [E],
        plan: &OverlapSettings,
    ) -> Self {
        let chunks = chunk_outputs(out, routed.tokens(), plan, context.hidden);
        let routing = routed.gated.decision.routing();
        ForwardStep { context, input: *input, routing, x: &routed.x, shared_output: Handoff::empty(), chunks }
    }

    /// The values for the gradients, once all nodes have ended.
    pub fn kept(self) -> Result<(Vec<ChunkTape>, Option<SavedShared>), Error> {
        let shared = self.shared_output.into_inner().map(|(_, saved)| SavedShared(saved));
        let kept = self.chunks.into_iter().map(ChunkOutputs::kept).collect::<Option<_>>();
        Ok((kept.ok_or(OverlapError::HandoffEmpty)?, shared))
    }
}

impl<E: Element> ForwardOps<Run> for ForwardStep<'_, '_, E> {
    fn dispatch(&self, chunk: usize, run: &Run) -> Result<(), Error> {
        let ChunkOutputs { tokens, landed, made, .. } = &self.chunks[chunk];
        let routing = routing_of(&self.routing, tokens)?;
        let x = &self.input.x[tokens.start * self.context.hidden..tokens.end * self.context.hidden];
        let (rows, handle) = self.context.moves(chunk, run, |ep| ep.dispatch(x, &routing))?;
        let here = ReceivedChunk::new(F32Rows::new::<E>(rows)?, handle, made.len() as u32);
        landed.set(here).map_err(|_| OverlapError::HandoffInUse.into())
    }

    fn shared(&self) -> Result<(), Error> {
        let Some(shared) = self.context.shared else { return Ok(()) };
        let all = [self.x.len() as i64 / self.context.hidden as i64];
        let rows = Segments { rows: self.x, hidden: self.context.hidden, counts: &all, padded: &all };
        self.shared_output.put(shared.forward(rows)?)
    }

    fn experts(&self, chunk: usize, group: usize) -> Result<(), Error> {
        let (chunk_outputs, hidden) = (&self.chunks[chunk], self.context.hidden);
        let landed = chunk_outputs.landed()?;
        let Some(own) = landed.groups.get(group) else { return Ok(()) };
        let (outputs, saved) = self.context.experts.forward(landed.segments(own, hidden)?)?;
        let weights = &landed.handle.row_weights()[own.rows.clone()];
        let fill = |to: &mut [E]| weigh_into(to, &outputs, weights, hidden);
        chunk_outputs.output.write(&landed.handle, own.values(hidden), fill)?;
        chunk_outputs.made[group].put(GroupOutputs { outputs, saved })
    }

    fn combine(&self, chunk: usize, run: &Run) -> Result<(), Error> {
        let chunk_outputs = &self.chunks[chunk];
        let ReceivedChunk { handle, .. } = chunk_outputs.landed()?;
        self.context.moves(chunk, run, |ep| match chunk_outputs.output.take()? {
            Ok(output) => chunk_outputs.out.with(|out| ep.combine_into(output, handle, &mut **out)),
            Err(error) => Err(ep.refuse(CallKind::Combine, Some(handle), error)),
        })
    }

    fn sum(&self, chunk: usize) -> Result<(), Error> {
        let ChunkOutputs { tokens, out, .. } = &self.chunks[chunk];
        let part = tokens.start * self.context.hidden..tokens.end * self.context.hidden;
        out.with(|out| {
            let mut sum = widened(out);
            if let Some(residual) = self.input.residual {
                let residual = widened(&residual[part.clone()]);
                sum.iter_mut().zip(residual).for_each(|(sum, residual)| *sum += residual);
            }
            if self.context.shared.is_some() {
                self.shared_output.with(|(shared, _)| {
                    sum.iter_mut().zip(&shared[part]).for_each(|(sum, shared)| *sum += shared);
                    Ok(())
                })?;
            }
            round_into(&sum, out);
            Ok(())
        })
    }
}

/// Each row times its weight, rounded to elements.
pub(super) fn weigh_into<E: Element>(to: &mut [E], rows: &[f32], weights: &[f32], hidden: usize) {
    let mut weighted = vec![0.0; hidden];
    for ((to, row), weight) in to.chunks_exact_mut(hidden).zip(rows.chunks_exact(hidden)).zip(weights) {
        weighted.iter_mut().zip(row).for_each(|(weighted, value)| *weighted = weight * value);
        round_into(&weighted, to);
    }
}
