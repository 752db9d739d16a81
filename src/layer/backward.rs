//! Backward: the graph of a step's gradients, and what its nodes do.

use std::ops::Range;
use std::sync::Arc;

use super::forward::weigh_into;
use super::moe::OverlapSettings;
use super::pass_order::{self, BackwardOps};
use super::router_step::Routed;
use super::step::{
    ChunkTape, F32Rows, GroupOutputs, Outgoing, ReceivedChunk, SavedShared, StepContext, own_row_counts,
    round_into, source_row_counts, widened,
};
use super::{GradientOrder, MoeLayer, Saved, Segments, Tape};
use crate::dtype::Element;
use crate::error::{CallKind, Error, LayerError, PlanError};
use crate::overlap::{Handoff, Run};
use crate::rows::Arithmetic;

/// Gradients of one step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Gradients<E> {
    /// Of the tokens, `[tokens, hidden]`. That of the residual is what came in.
    pub x: Vec<E>,
    /// Of the router's weights, `[hidden, experts]`, by this rank's tokens.
    pub router: Vec<f32>,
    /// Of this rank's experts, as [`Experts::weights`](super::Experts::weights), from the tokens
    /// that this rank receives: those of all ranks or, where an expert has replicas, of the ranks
    /// that use this replica ([`ExpertMap::slot_for`](crate::plan::ExpertMap::slot_for)). A trainer
    /// adds those of replicas over their ranks.
    pub experts: Vec<f32>,
    /// Of the shared expert, by this rank's tokens; empty if there is none.
    pub shared: Vec<f32>,
}

/// Inputs of the nodes.
pub(super) struct BackwardStep<'s, 'm, E> {
    context: &'s StepContext<'m>,
    of_out: &'s [E],
    routed: &'s Routed,
    /// How many tokens there are.
    tokens: [i64; 1],
    /// How many slots there are, and which are this rank's.
    slots: usize,
    own: Range<usize>,
    /// How many rows this rank has for each slot, chunk after chunk.
    choices: Vec<u32>,
    order: Handoff<GradientOrder>,
    chunks: Vec<ChunkGradients<E>>,
    /// By the shared expert.
    saved: Handoff<Saved>,
    /// Through the shared expert, `[tokens, hidden]`.
    of_shared_expert: Handoff<Vec<f32>>,
    of_experts: Handoff<Vec<f32>>,
    of_shared: Handoff<Vec<f32>>,
}

/// Values that nodes leave to each other, of one chunk.
struct ChunkGradients<E> {
    tokens: Range<usize>,
    landed: ReceivedChunk,
    groups: Vec<GroupGradients>,
    /// Gradients of rows, where peers read them.
    of_rows: Outgoing,
    /// Gradients of tokens and of routing weights.
    returned: Handoff<(Vec<E>, Vec<f32>)>,
}

/// The same, of one group of its experts.
struct GroupGradients {
    /// Outputs of the experts, until the gradients of routing weights are computed; and their saved
    /// values.
    made: Handoff<GroupOutputs>,
    /// Gradients of the combined rows, of all groups: the last group that is done drops them.
    of_outputs: Handoff<Arc<F32Rows>>,
    /// Gradients of its rows' weights.
    of_weights: Handoff<Vec<f32>>,
}

impl MoeLayer {
    /// Gradients of one forward pass from that of its output, `[tokens, hidden]`, those of its
    /// losses included. Collective: ranks bring their tapes in the same order.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`LayerError::ForeignTape`].
    pub fn backward<E: Element>(&mut self, tape: Tape, of_out: &[E]) -> Result<Gradients<E>, Error> {
        if let Err(error) = self.check_backward(&tape, of_out) {
            return Err(self.refuse_backward(&tape, error));
        }
        let Tape { routed, chunks, shared, .. } = tape;
        let plan = self.plan;
        let (context, world) = self.context();
        let step = BackwardStep::new(&context, of_out, &routed, (chunks, shared), &plan)?;
        plan.run(pass_order::backward(&step, plan.cut(), plan.turns()), &world)?;
        let made = step.made()?;
        self.gradients(&routed, made)
    }

    /// In place of the first transfer of a backward pass.
    pub(super) fn refuse_backward(&mut self, tape: &Tape, error: Error) -> Error {
        match tape.chunks.first() {
            Some(kept) => {
                self.exchanges[0].refuse(CallKind::CombineBackward, Some(&kept.landed.handle), error)
            }
            None => error,
        }
    }

    /// What nodes have made, and through the router.
    pub(super) fn gradients<E: Element>(
        &self,
        routed: &Routed,
        made: StepGradients,
    ) -> Result<Gradients<E>, Error> {
        let StepGradients { mut of_x, of_weights, experts, shared } = made;
        let (through_router, router) = self.route_backward(routed, &of_weights)?;
        add(&mut of_x, &through_router);
        let mut x = vec![E::zeroed(); of_x.len()];
        round_into(&of_x, &mut x);
        Ok(Gradients { x, router, experts, shared })
    }

    pub(super) fn check_backward<E: Element>(&self, tape: &Tape, of_out: &[E]) -> Result<(), Error> {
        if tape.instance != self.instance {
            return Err(LayerError::ForeignTape { seen: tape.instance, expected: self.instance }.into());
        }
        let what = "gradients of the output";
        if E::DTYPE != self.dtype {
            return Err(PlanError::WrongDtype { what, seen: E::DTYPE, expected: self.dtype }.into());
        }
        self.check_rows(what, of_out.len(), tape.routed.tokens())
    }
}

impl<E> ChunkGradients<E> {
    fn new((tokens, kept): (Range<usize>, ChunkTape)) -> Self {
        let ChunkTape { landed, made } = kept;
        let group = |made| GroupGradients {
            made: Handoff::new(made),
            of_outputs: Handoff::empty(),
            of_weights: Handoff::empty(),
        };
        let groups = made.into_iter().map(group).collect();
        ChunkGradients { tokens, landed, groups, of_rows: Outgoing::default(), returned: Handoff::empty() }
    }
}

/// Results of the nodes when all have ended: gradients of tokens but through the router, of routing
/// weights, of weights.
pub(super) struct StepGradients {
    of_x: Vec<f32>,
    of_weights: Vec<f32>,
    experts: Vec<f32>,
    shared: Vec<f32>,
}

impl<'s, 'm, E: Element> BackwardStep<'s, 'm, E> {
    pub fn new(
        context: &'s StepContext<'m>,
        of_out: &'s [E],
        routed: &'s Routed,
        (chunks, shared): (Vec<ChunkTape>, Option<SavedShared>),
        plan: &OverlapSettings,
    ) -> Result<Self, Error> {
        let slices: Vec<_> = plan.slices(routed.tokens()).collect();
        let (choices, slots, own) = context.exchange(0).with(|ep| {
            let (map, choices) = (ep.expert_map(), own_row_counts(ep, &routed.gated.decision, &slices));
            Ok((choices, map.slots() as usize, map.slots_of(ep.rank())))
        })?;
        Ok(BackwardStep {
            context,
            of_out,
            routed,
            tokens: [routed.tokens() as i64],
            slots,
            own: own.start as usize..own.end as usize,
            choices,
            order: Handoff::empty(),
            chunks: slices.into_iter().zip(chunks).map(ChunkGradients::new).collect(),
            saved: shared.map_or_else(Handoff::empty, |SavedShared(saved)| Handoff::new(saved)),
            of_shared_expert: Handoff::empty(),
            of_experts: Handoff::empty(),
            of_shared: Handoff::empty(),
        })
    }

    /// What nodes have made, once all have ended.
    pub fn made(self) -> Result<StepGradients, Error> {
        let (mut of_x, mut of_weights) = (Vec::new(), Vec::new());
        for place in &self.chunks {
            let (tokens, weights) = place.returned.take()?;
            of_x.extend(widened(&tokens));
            of_weights.extend(weights);
        }
        let (experts, mut shared) = (self.of_experts.take()?, Vec::new());
        if self.context.shared.is_some() {
            shared = self.of_shared.take()?;
            add(&mut of_x, &self.of_shared_expert.take()?);
        }
        Ok(StepGradients { of_x, of_weights, experts, shared })
    }
}

impl<E: Element> BackwardOps<Run> for BackwardStep<'_, '_, E> {
    fn combine(&self, chunk: usize, run: &Run) -> Result<(), Error> {
        let ChunkGradients { tokens, landed, groups, .. } = &self.chunks[chunk];
        let of_out = &self.of_out[tokens.start * self.context.hidden..tokens.end * self.context.hidden];
        let (rows, _) = self.context.moves(chunk, run, |ep| ep.combine_backward(of_out, &landed.handle))?;
        let of_outputs = Arc::new(F32Rows::new::<E>(rows)?);
        groups.iter().try_for_each(|group| group.of_outputs.put(Arc::clone(&of_outputs)))
    }

    fn sources(&self, run: &Run) -> Result<(), Error> {
        let mine: &[u8] = bytemuck::cast_slice(&self.choices);
        let all =
            self.context.gathers(run, |sources| sources.all_gather_cached(mine, self.context.one_each))?;
        let all: Vec<u32> = bytemuck::pod_collect_to_vec(all.rows::<u8>()?);
        let expected = self.chunks.iter().map(|places| places.landed.handle.tokens_per_expert());
        let counts = source_row_counts(&all, self.choices.len(), (self.slots, &self.own), expected)?;
        // A group is a chunk to the code that computes it.
        let pieces = self.chunks.iter().zip(&counts).flat_map(|(places, counts)| {
            places.landed.groups.iter().map(move |group| (group.counts_of(counts), group.padded()))
        });
        let (counts, padded): (Vec<_>, Vec<_>) = pieces.unzip();
        self.order.put(GradientOrder::new(&counts, &padded))
    }

    fn experts(&self, chunk: usize, group: usize) -> Result<(), Error> {
        let ChunkGradients { landed, groups, of_rows, .. } = &self.chunks[chunk];
        let (Some(own), Some(places)) = (landed.groups.get(group), groups.get(group)) else { return Ok(()) };
        let (hidden, incoming) = (self.context.hidden, places.of_outputs.take()?);
        let values = own.values(hidden);
        let (incoming, weights) =
            (&incoming.values()?[values.clone()], &landed.handle.row_weights()[own.rows.clone()]);
        places.made.with(|GroupOutputs { outputs, saved }| {
            let rows = incoming.chunks_exact(hidden).zip(outputs.chunks_exact(hidden));
            let dot = |(g, y): (&[f32], &[f32])| {
                self.context.rows.dot_rows(Arithmetic::F32, bytemuck::cast_slice(g), bytemuck::cast_slice(y))
            };
            places.of_weights.put(rows.map(dot).collect())?;
            *outputs = Vec::new();
            let mut weighted = vec![0.0f32; incoming.len()];
            weigh_into(&mut weighted, incoming, weights, hidden);
            let gradients =
                self.context.experts.rows_backward(landed.segments(own, hidden)?, saved, weighted)?;
            of_rows.write(&landed.handle, values, |to: &mut [E]| round_into(&gradients, to))
        })
    }

    fn dispatch(&self, chunk: usize, run: &Run) -> Result<(), Error> {
        let ChunkGradients { tokens, landed, groups, of_rows, returned } = &self.chunks[chunk];
        let (handle, output) = (&landed.handle, of_rows.take()?);
        let mut of_weights = Vec::with_capacity(handle.row_weights().len());
        for group in groups {
            of_weights.extend(group.of_weights.take()?);
        }
        let mut of_tokens = vec![E::zeroed(); tokens.len() * self.context.hidden];
        let mut of_choices = vec![0.0; tokens.len() * self.routed.gated.decision.top_k() as usize];
        let (to, weights) = (&mut of_tokens[..], Some(of_weights.as_slice().into()));
        let choices = Some((&mut of_choices[..]).into());
        self.context.moves(chunk, run, |ep| match output {
            Ok(output) => ep.dispatch_backward_into(output, weights, handle, to, choices),
            Err(error) => Err(ep.refuse(CallKind::DispatchBackward, Some(handle), error)),
        })?;
        returned.put((of_tokens, of_choices))
    }

    fn weights(&self) -> Result<(), Error> {
        let groups = self.chunks.iter().flat_map(|places| &places.groups);
        let saved: Vec<Saved> =
            groups.map(|group| Ok(group.made.take()?.saved)).collect::<Result<_, Error>>()?;
        let rows = self.chunks.iter().flat_map(|ChunkGradients { landed, .. }| {
            landed.groups.iter().map(|group| landed.segments(group, self.context.hidden))
        });
        let chunks = rows.zip(&saved).map(|(rows, saved)| Ok((rows?, saved)));
        let chunks: Vec<_> = chunks.collect::<Result<_, Error>>()?;
        let order = self.order.take()?;
        self.of_experts.put(self.context.experts.weights_backward(&chunks, &order)?)
    }

    fn shared(&self) -> Result<(), Error> {
        let Some(shared) = self.context.shared else { return Ok(()) };
        let of_out = widened(self.of_out);
        self.saved.with(|saved| self.of_shared_expert.put(shared.rows_backward(self.all(), saved, of_out)?))
    }

    fn shared_weights(&self) -> Result<(), Error> {
        let Some(shared) = self.context.shared else { return Ok(()) };
        let saved = self.saved.take()?;
        let rows = self.all();
        let order = GradientOrder::whole(rows.len());
        self.of_shared.put(shared.weights_backward(&[(rows, &saved)], &order)?)
    }
}

impl<E> BackwardStep<'_, '_, E> {
    /// All tokens, as the shared expert takes them.
    fn all(&self) -> Segments<'_> {
        Segments {
            rows: &self.routed.x,
            hidden: self.context.hidden,
            counts: &self.tokens,
            padded: &self.tokens,
        }
    }
}

fn add(to: &mut [f32], values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
}
