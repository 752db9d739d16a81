//! Backward: the graph of a step's gradients on a device, and what its nodes enqueue.

use std::ops::Range;
use std::sync::Arc;

use super::device_experts::{DeviceChunk, Differentials, RoutedSaved, SharedSaved};
use super::device_memory::{DeviceTensor, StagingBuffer, span};
use super::device_moe::{DeviceChunkTape, DeviceGroupOutputs, FactorRows, PlacedExperts};
use super::{DeviceMoeLayer, DeviceTape};
use crate::device::{AccumulateArgs, ByteSpan, DeviceRange, MatmulArgs, MatmulShape, Stream};
use crate::dtype::Dtype;
use crate::ep::{ExpertOutput, ExpertParallel, ExpertRows, RowCollective, RowPartition, Tensor, TensorMut};
use crate::error::{CallKind, DeviceError, Error, LayerError, PlanError};
use crate::layer::GradientOrder;
use crate::layer::pass_order::{self, BackwardOps};
use crate::layer::router_step::Gated;
use crate::layer::step::{own_row_counts, source_row_counts};
use crate::overlap::Handoff;

/// Where the gradients of one step go: memory of the device, at multiples of 16 bytes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceGradients<'a> {
    /// Of the tokens, `[tokens, hidden]`, in the element type. That of the residual is what came
    /// in.
    pub x: &'a DeviceRange,
    /// Of the router's weights, `f32 [hidden, experts]`, by this rank's tokens.
    pub router: &'a DeviceRange,
    /// Of this rank's experts, f32, from the tokens that this rank receives
    /// ([`Gradients::experts`](crate::layer::Gradients::experts)).
    pub experts: &'a DeviceRange,
    /// Of the shared expert, f32, by this rank's tokens: given if there is one.
    pub shared: Option<&'a DeviceRange>,
}

impl<'a> DeviceGradients<'a> {
    /// Memory for the gradients of a layer; `shared` where it has a shared expert.
    pub const fn new(
        x: &'a DeviceRange,
        router: &'a DeviceRange,
        experts: &'a DeviceRange,
        shared: Option<&'a DeviceRange>,
    ) -> Self {
        DeviceGradients { x, router, experts, shared }
    }
}

/// Inputs of the nodes.
struct BackwardStep<'s> {
    placed: &'s PlacedExperts,
    exchange: Handoff<&'s mut ExpertParallel>,
    sources: Handoff<(&'s mut RowCollective, &'s RowPartition)>,
    staging: Handoff<&'s mut StagingBuffer>,
    of_out: &'s DeviceRange,
    into: DeviceGradients<'s>,
    x: &'s DeviceTensor,
    x_factors: Option<DeviceTensor>,
    counted: SlotCounts,
    order: Handoff<GradientOrder>,
    chunks: Vec<ChunkGradients>,
    /// By the shared expert, with the gradients of its outputs and through it.
    saved: Handoff<SharedSaved>,
    of_shared_expert: Handoff<SharedGradients>,
}

/// This rank's rows for each slot, chunk after chunk, how many slots there are, and its own.
struct SlotCounts {
    choices: Vec<u32>,
    slots: usize,
    own: Range<usize>,
}

/// Results of the shared expert.
struct SharedGradients {
    of_x: DeviceTensor,
    of_outputs: FactorRows,
    kept: Differentials,
}

/// Values that nodes leave to each other, of one chunk.
struct ChunkGradients {
    tape: ChunkInputs,
    /// Gradients of the combined rows, as they came, until all is joined.
    came: Handoff<ExpertRows>,
    differentials: Handoff<(FactorRows, Differentials)>,
    of_weights: Handoff<DeviceTensor>,
    of_rows: Handoff<Result<ExpertOutput, Error>>,
    returned: ChunkReturnTensors,
}

/// Gradients that return to all tokens: memory that transfers write.
struct ReturnTensors {
    chunks: Vec<ChunkReturnTensors>,
    /// Gradients of all routing weights, chunk after chunk.
    of_choices: DeviceTensor,
}

/// Gradients that return to the tokens of a chunk.
struct ChunkReturnTensors {
    tokens: Range<usize>,
    /// Gradients of the tokens, in the element type, and of their routing weights.
    of_tokens: DeviceTensor,
    of_choices: DeviceRange,
}

/// Part of the tape of a chunk.
struct ChunkInputs {
    received: super::device_moe::DeviceReceivedChunk,
    rows: FactorRows,
    saved: Handoff<RoutedSaved>,
}

impl DeviceMoeLayer {
    /// Enqueues the gradients of one forward pass from that of its output, `[tokens, hidden]`,
    /// those of its losses included. They are there for what is enqueued next. Collective: ranks
    /// bring their tapes in the same order.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`LayerError::ForeignTape`].
    pub fn backward(
        &mut self,
        tape: DeviceTape,
        of_out: &DeviceRange,
        into: DeviceGradients<'_>,
    ) -> Result<(), Error> {
        let prepared = self.check_backward(&tape, of_out, into).and_then(|()| {
            self.placed.refresh()?;
            self.returns(&tape)
        });
        let ReturnTensors { chunks: returns, of_choices } = match prepared {
            Ok(returns) => returns,
            Err(error) => return Err(self.refuse_backward(&tape, error)),
        };
        let DeviceTape { x, x_factors, mut gated, logits, chunks, shared, .. } = tape;
        let DeviceMoeLayer { exchange, sources, one_each, placed, staging, pool, plan, world, .. } = self;
        let slices: Vec<_> = returns.iter().map(|returned| returned.tokens.clone()).collect();
        let map = exchange.expert_map();
        let own = map.slots_of(exchange.rank());
        let counted = SlotCounts {
            choices: own_row_counts(exchange, &gated.decision, &slices),
            slots: map.slots() as usize,
            own: own.start as usize..own.end as usize,
        };
        let step = BackwardStep {
            placed,
            exchange: Handoff::new(exchange),
            sources: Handoff::new((sources, one_each)),
            staging: Handoff::new(staging),
            of_out,
            into,
            x: &x,
            x_factors,
            counted,
            order: Handoff::empty(),
            chunks: chunks.into_iter().zip(returns).map(ChunkGradients::new).collect(),
            saved: shared.map_or_else(Handoff::empty, Handoff::new),
            of_shared_expert: Handoff::empty(),
        };
        let (cut, turns) = (pass_order::ChunkCounts { transfers: 1, ..plan.cut() }, plan.turns());
        let on = (&*pool, &placed.compute.stream, plan.overlap);
        Self::run(on, pass_order::backward(&step, cut, turns), world)?;
        let chunks: Vec<_> = step.chunks.into_iter().map(|places| places.returned).collect();
        let of_shared_expert =
            step.of_shared_expert.into_inner().map(|of_shared_expert| of_shared_expert.of_x);
        let passed = self.bring_logits(&mut gated, logits).and_then(|()| {
            self.through_router(&x, &gated, (&ReturnTensors { chunks, of_choices }, of_shared_expert), into)
        });
        // All ranks have made their transfers: there is no call left to refuse.
        passed.map_err(|error| self.world.fail(&[], error))
    }

    /// Memory that transfers write, so taken before the graph begins.
    fn returns(&self, tape: &DeviceTape) -> Result<ReturnTensors, Error> {
        let (placed, k) = (&self.placed, tape.gated.decision.top_k() as usize);
        let (memory, of_token) = (&placed.compute.memory, k as u64 * 4);
        let of_choices = memory.words(tape.gated.tokens() * k)?;
        let returned = |tokens: Range<usize>| {
            let of_tokens = memory.take(tokens.len() as u64 * placed.row_bytes())?;
            let (first, len) = (tokens.start as u64 * of_token, tokens.len() as u64 * of_token);
            Ok(ChunkReturnTensors { of_tokens, of_choices: of_choices.range().part(first, len)?, tokens })
        };
        let chunks = self.plan.slices(tape.gated.tokens()).map(returned).collect::<Result<_, Error>>()?;
        Ok(ReturnTensors { chunks, of_choices })
    }

    /// Logits to the host, where the device chose by them.
    fn bring_logits(&mut self, gated: &mut Gated, logits: Option<DeviceTensor>) -> Result<(), Error> {
        if let Some(logits) = logits {
            gated.bring(self.staging.receive(&self.placed.compute.stream, logits.range())?);
        }
        Ok(())
    }

    /// What goes through the router, and all of it to the tokens. Waits for the stream, which
    /// brings the gradients of routing weights.
    fn through_router(
        &mut self,
        x: &DeviceTensor,
        gated: &Gated,
        (returns, of_shared_expert): (&ReturnTensors, Option<DeviceTensor>),
        into: DeviceGradients<'_>,
    ) -> Result<(), Error> {
        let (placed, compute) = (&self.placed, &self.placed.compute);
        let of_weights: Vec<f32> = self.staging.receive(&compute.stream, returns.of_choices.range())?;
        // The stream of a failed world goes on with values that are invalid.
        self.world.hub.health().check()?;
        let of_logits = gated.logits_backward(self.gate.config(), &of_weights)?;
        let sent = compute.memory.words(of_logits.len())?;
        self.staging.send(&compute.stream, sent.range(), &of_logits)?;
        let (tokens, hidden) = (gated.tokens() as u32, placed.hidden as u32);
        let experts = self.gate.config().experts;
        let of_x = compute.memory.words(gated.tokens() * placed.hidden)?;
        let product = MatmulArgs {
            a: sent.span()?,
            b: span(&self.router)?,
            out: of_x.span()?,
            shape: MatmulShape::Rows {
                rows: tokens,
                depth: experts,
                columns: hidden,
                transposed: true,
                apart: 0,
            },
            segments: None,
            add: false,
        };
        compute.router_product(&product)?;
        let shape = MatmulShape::Depth { rows: hidden, depth: tokens, columns: experts, apart: 0 };
        let (a, b, out) = (x.span()?, sent.span()?, span(into.router)?);
        let product = MatmulArgs { a, b, out, shape, segments: None, add: false };
        compute.router_product(&product)?;
        for ChunkReturnTensors { tokens, of_tokens, .. } in &returns.chunks {
            let wide = placed.hidden as u64 * 4;
            let (first, len) = (tokens.start as u64 * wide, tokens.len() as u64 * wide);
            let out = placed.part(into.x, tokens)?;
            let of_shared_expert = of_shared_expert
                .as_ref()
                .map(|of_shared_expert| of_shared_expert.range().span(first, len))
                .transpose()?;
            let sum = AccumulateArgs {
                count: (tokens.len() * placed.hidden) as u64,
                dtype: placed.dtype,
                rows: of_tokens.span()?,
                residual: None,
                more: [of_shared_expert, Some(of_x.range().span(first, len)?)],
                out: span(&out)?,
            };
            compute.kernels.accumulate(&compute.stream, &sum)?;
        }
        Ok(())
    }

    /// In place of the first transfer of a backward pass.
    fn refuse_backward(&mut self, tape: &DeviceTape, error: Error) -> Error {
        match tape.chunks.first() {
            Some(kept) => self.refuse_call(CallKind::CombineBackward, Some(&kept.received.handle), error),
            None => error,
        }
    }

    fn check_backward(
        &self,
        tape: &DeviceTape,
        of_out: &DeviceRange,
        into: DeviceGradients<'_>,
    ) -> Result<(), Error> {
        if tape.instance != self.instance {
            return Err(LayerError::ForeignTape { seen: tape.instance, expected: self.instance }.into());
        }
        let tokens = tape.gated.tokens() as u64;
        self.check_rows("gradients of the output", of_out, tokens)?;
        self.check_rows("gradients of tokens", into.x, tokens)?;
        self.check_words("gradients of the router", into.router, &self.router)?;
        let PlacedExperts { experts, shared, .. } = &self.placed;
        self.check_words("gradients of experts", into.experts, experts.weights().values())?;
        match (shared.as_ref().map(|shared| shared.weights().values()), into.shared) {
            (Some(weights), Some(shared)) => {
                self.check_words("gradients of the shared expert", shared, weights)
            }
            (None, None) => Ok(()),
            (weights, given) => {
                let (what, rows) = ("gradients of the shared expert", weights.map_or(0, |all| all.len() / 4));
                let seen = given.map_or(0, |all| all.len() / 4) as usize;
                Err(PlanError::WrongShape { what, seen, rows: rows as usize, columns: 1 }.into())
            }
        }
    }
}

impl ChunkGradients {
    fn new((tape, returned): (DeviceChunkTape, ChunkReturnTensors)) -> Self {
        let DeviceChunkTape { received, made: DeviceGroupOutputs { rows, saved } } = tape;
        ChunkGradients {
            tape: ChunkInputs { received, rows, saved: Handoff::new(saved) },
            came: Handoff::empty(),
            differentials: Handoff::empty(),
            of_weights: Handoff::empty(),
            of_rows: Handoff::empty(),
            returned,
        }
    }
}

impl BackwardStep<'_> {
    /// The tokens, as the shared expert takes them.
    fn x_factors(&self) -> Result<ByteSpan<'_>, DeviceError> {
        self.x_factors.as_ref().unwrap_or(self.x).span()
    }

    fn tokens(&self) -> usize {
        (self.of_out.len() / self.placed.row_bytes()) as usize
    }
}

impl BackwardOps<Arc<Stream>> for BackwardStep<'_> {
    fn combine(&self, chunk: usize, _: &Arc<Stream>) -> Result<(), Error> {
        let ChunkGradients { tape, came, returned, .. } = &self.chunks[chunk];
        let of_out = self.placed.part(self.of_out, &returned.tokens)?;
        let of_out = Tensor::device(&of_out, self.placed.dtype);
        came.put(self.exchange.with(|ep| ep.combine_backward_into(of_out, &tape.received.handle, None))?)
    }

    fn sources(&self, _: &Arc<Stream>) -> Result<(), Error> {
        let SlotCounts { choices, slots, own } = &self.counted;
        let came = || self.chunks.iter().map(|places| places.tape.received.handle.tokens_per_expert());
        // Rows of a single chunk are in order: it makes no difference that ranks sent them.
        let counts = if self.chunks.len() == 1 {
            let one = |came: &[i64]| vec![came.iter().map(|&rows| rows as u32).collect()];
            came().map(one).collect()
        } else {
            let all = self.sources.with(|(sources, one_each)| {
                sources.all_gather_cached(bytemuck::cast_slice::<_, u8>(choices), one_each)
            })?;
            let all: Vec<u32> = bytemuck::pod_collect_to_vec(all.rows::<u8>()?);
            source_row_counts(&all, choices.len(), (*slots, own), came())?
        };
        let handles = self.chunks.iter().map(|places| &places.tape.received.handle);
        let padded: Vec<_> = handles.map(|handle| handle.padded_tokens_per_expert()).collect();
        self.order.put(GradientOrder::new(&counts, &padded))
    }

    fn experts(&self, chunk: usize, _: usize) -> Result<(), Error> {
        let (places, placed) = (&self.chunks[chunk], self.placed);
        let (received, rows) = (&places.tape.received, &places.tape.rows);
        let (incoming, held) = placed.received(places.came.take()?)?;
        held.map_or(Ok(()), |held| places.came.put(held))?;
        let output = received.handle.output();
        let (of_weights, kept) = placed.experts.rows_backward(
            &placed.compute,
            received.segments(rows)?,
            places.tape.saved.take()?,
            (incoming.span()?, span(&received.weights)?),
            placed.returned(&output)?,
        )?;
        places.of_rows.put(output)?;
        places.of_weights.put(of_weights)?;
        places.differentials.put((incoming, kept))
    }

    fn dispatch(&self, chunk: usize, _: &Arc<Stream>) -> Result<(), Error> {
        let ChunkGradients { tape, of_weights, of_rows, returned, .. } = &self.chunks[chunk];
        let handle = &tape.received.handle;
        let to = TensorMut::device(returned.of_tokens.range(), self.placed.dtype);
        let choices = TensorMut::device(&returned.of_choices, Dtype::F32);
        let output = of_rows.take()?;
        // Its memory stays until all is joined.
        of_weights.with(|of_weights| {
            let of_weights = Tensor::device(of_weights.range(), Dtype::F32);
            self.exchange.with(|ep| match output {
                Ok(output) => ep.dispatch_backward_into(output, Some(of_weights), handle, to, Some(choices)),
                Err(error) => Err(ep.refuse(CallKind::DispatchBackward, Some(handle), error)),
            })
        })
    }

    fn weights(&self) -> Result<(), Error> {
        let held: Vec<_> =
            self.chunks.iter().map(|places| places.differentials.take()).collect::<Result<_, _>>()?;
        let parts = self.chunks.iter().zip(&held).map(|(places, (incoming, kept))| {
            Ok(DeviceChunk { rows: places.tape.rows.span()?, of_outputs: incoming.span()?, kept })
        });
        let parts: Vec<_> = parts.collect::<Result<_, DeviceError>>()?;
        let (placed, order) = (self.placed, self.order.take()?);
        self.staging.with(|staging| {
            placed.experts.weights_backward(&placed.compute, &parts, &order, (staging, self.into.experts))
        })?;
        // Rows that are factors as they came stay until the stream of transfers is behind this.
        self.chunks.iter().zip(held).try_for_each(|(places, held)| places.differentials.put(held))
    }

    fn shared(&self) -> Result<(), Error> {
        let Some(shared) = &self.placed.shared else { return Ok(()) };
        let rows = self.placed.all(self.x_factors()?, self.tokens());
        let (saved, of_outputs) = (self.saved.take()?, self.placed.factors(self.of_out)?);
        let (of_x, kept) =
            shared.rows_backward_shared(&self.placed.compute, rows, saved, of_outputs.span()?)?;
        self.of_shared_expert.put(SharedGradients { of_x, of_outputs, kept })
    }

    fn shared_weights(&self) -> Result<(), Error> {
        let (Some(shared), Some(into)) = (&self.placed.shared, self.into.shared) else { return Ok(()) };
        self.of_shared_expert.with(|SharedGradients { of_outputs, kept, .. }| {
            let chunk = DeviceChunk { rows: self.x_factors()?, of_outputs: of_outputs.span()?, kept };
            let order = GradientOrder::whole(self.tokens());
            self.staging.with(|staging| {
                shared.weights_backward(&self.placed.compute, &[chunk], &order, (staging, into))
            })
        })
    }
}
