//! Forward: the graph of a step on a device, and what its nodes enqueue.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::device_experts::SharedSaved;
use super::device_memory::{DeviceTensor, span};
use super::device_moe::{DeviceChunkTape, DeviceGroupOutputs, DeviceReceivedChunk, PlacedExperts};
use super::{DeviceMoeLayer, DeviceTape};
use crate::device::{AccumulateArgs, DeviceRange, GateArgs, MatmulArgs, MatmulShape, Stream};
use crate::ep::{Choices, ExpertOutput, ExpertParallel, ExpertRows, Tensor, TensorMut};
use crate::error::{CallKind, DeviceError, Error, OverlapError, PlanError};
use crate::gate::ScoreFunction;
use crate::layer::Input;
use crate::layer::moe::OverlapSettings;
use crate::layer::pass_order::{self, ForwardOps};
use crate::layer::router_step::{GateOptions, Gated};
use crate::overlap::Handoff;

/// The tokens as f32, their choices, and these on the device.
struct Routed {
    x: DeviceTensor,
    /// The tokens as factors of the shared expert's products, where these are not f32: the caller's
    /// may be gone when gradients are made.
    x_factors: Option<DeviceTensor>,
    gated: Gated,
    /// Experts, then weights, then whether a kernel found a logit that is not finite.
    choices: DeviceTensor,
    /// The router's logits, if the device chose by them.
    logits: Option<DeviceTensor>,
}

impl Routed {
    /// Experts and weights of all choices.
    fn experts_and_weights(&self) -> Result<[DeviceRange; 2], DeviceError> {
        halves(self.choices.range(), self.gated.decision.experts().len())
    }
}

/// So many words of a range, and as many behind them.
fn halves(range: &DeviceRange, words: usize) -> Result<[DeviceRange; 2], DeviceError> {
    let bytes = words as u64 * 4;
    Ok([range.part(0, bytes)?, range.part(bytes, bytes)?])
}

/// Inputs of the nodes.
struct ForwardStep<'s> {
    placed: &'s PlacedExperts,
    exchange: Handoff<&'s mut ExpertParallel>,
    input: Input<'s, DeviceRange>,
    out: &'s DeviceRange,
    routed: &'s Routed,
    of_shared_expert: Handoff<(DeviceTensor, SharedSaved)>,
    chunks: Vec<ChunkOutputs>,
}

/// Values that nodes leave to each other, of one chunk.
struct ChunkOutputs {
    tokens: Range<usize>,
    received: OnceLock<DeviceReceivedChunk>,
    /// What came. Rows that were widened stay until the stream of transfers is behind that.
    rows: Handoff<ExpertRows>,
    made: Handoff<DeviceGroupOutputs>,
    /// Where peers read, or why there is no room.
    output: Handoff<Result<ExpertOutput, Error>>,
}

impl DeviceMoeLayer {
    /// Enqueues one forward pass: `residual + combined + shared`, `[tokens, hidden]`, into `out`,
    /// which is there for what is enqueued next. Returns the tape for its gradients. Collective.
    ///
    /// `x`, the residual and `out` stay until the stream has passed; `out` is none of the others.
    ///
    /// # Errors
    /// As [`MoeLayer::forward`](crate::layer::MoeLayer::forward);
    /// [`DeviceError`](crate::error::DeviceError), which ends the world unless the input is at
    /// fault, or room is lacking before the graph runs.
    pub fn forward(
        &mut self,
        input: &Input<'_, DeviceRange>,
        out: &DeviceRange,
    ) -> Result<DeviceTape, Error> {
        // Behind the wait for the choices: the stream has let go of what changed the weights.
        let routed = self.route(input, out).and_then(|routed| {
            self.placed.refresh()?;
            Ok(routed)
        });
        let routed = match routed {
            Ok(routed) => routed,
            Err(error) => return Err(self.refuse_call(CallKind::Dispatch, None, error)),
        };
        let DeviceMoeLayer { exchange, placed, pool, plan, world, instance, .. } = self;
        let step = ForwardStep::new(placed, exchange, (*input, out), &routed, plan);
        let (cut, turns) = (pass_order::ChunkCounts { transfers: 1, ..plan.cut() }, plan.turns());
        let on = (&*pool, &placed.compute.stream, plan.overlap);
        Self::run(on, pass_order::forward(&step, cut, turns), world)?;
        let (chunks, shared) = step.kept()?;
        let Routed { x, x_factors, gated, logits, .. } = routed;
        Ok(DeviceTape { instance: *instance, x, x_factors, gated, logits, chunks, shared })
    }

    /// Chooses experts: waits for the stream, which makes the logits or, by them, the choices.
    fn route(&mut self, input: &Input<'_, DeviceRange>, out: &DeviceRange) -> Result<Routed, Error> {
        let tokens = input.x.len() / self.placed.row_bytes();
        self.check_rows("tokens", input.x, tokens)?;
        if tokens > self.max_tokens.into() {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            return Err(PlanError::TooManyTokens { tokens, max: self.max_tokens }.into());
        }
        self.check_rows("output", out, tokens)?;
        input.residual.map_or(Ok(()), |residual| self.check_rows("residual", residual, tokens))?;
        let (placed, compute) = (&self.placed, &self.placed.compute);
        let (x, x_factors) = (placed.widened(input.x)?, placed.kept_factors(input.x)?);
        let experts = self.gate.config().experts;
        let logits = compute.memory.words(tokens as usize * experts as usize)?;
        let (rows, depth) = (tokens as u32, placed.hidden as u32);
        let product = MatmulArgs {
            a: x.span()?,
            b: span(&self.router)?,
            out: logits.span()?,
            shape: MatmulShape::Rows { rows, depth, columns: experts, transposed: false, apart: 0 },
            segments: None,
            add: false,
        };
        compute.router_product(&product)?;
        let count = tokens as usize * self.gate.config().top_k as usize;
        let choices = compute.memory.words(2 * count + 1)?;
        if let Some(gated) = self.choose_there(input, &logits, (&choices, count))? {
            return Ok(Routed { x, x_factors, gated, choices, logits: Some(logits) });
        }
        let compute = &self.placed.compute;
        let logits = self.staging.receive(&compute.stream, logits.range())?;
        // The stream of a failed world goes on with values that are invalid.
        self.world.hub.health().check()?;
        let Input { bias, token_mask, training, draw, .. } = *input;
        let options = GateOptions { bias, token_mask, training, draw };
        let gated = Gated::new(&mut self.gate, &self.losses, logits, options)?;
        let [experts, weights] = halves(choices.range(), count)?;
        self.staging.send(&compute.stream, &experts, gated.decision.experts())?;
        self.staging.send(&compute.stream, &weights, gated.decision.weights())?;
        Ok(Routed { x, x_factors, gated, choices, logits: None })
    }

    /// Has the device choose experts, if it can, and waits for what it chose. None where it cannot
    /// use the input: the host's gate then says why.
    fn choose_there(
        &mut self,
        input: &Input<'_, DeviceRange>,
        logits: &DeviceTensor,
        (choices, count): (&DeviceTensor, usize),
    ) -> Result<Option<Gated>, Error> {
        let (compute, config) = (&self.placed.compute, self.gate.config());
        let Input { bias, token_mask, .. } = *input;
        let tokens = count / config.top_k as usize;
        let good = |bias: &[f32]| {
            let finite = bias.iter().all(|value| value.is_finite());
            finite && bias.len() == config.experts as usize && config.score != ScoreFunction::SoftmaxOfChosen
        };
        if !self.device_gate || !bias.is_none_or(good) || token_mask.is_some_and(|mask| mask.len() != tokens)
        {
            return Ok(None);
        }
        let (stream, memory, range) = (&compute.stream, &compute.memory, choices.range());
        let (of_bias, of_mask) = (memory.words(config.experts as usize)?, memory.take(tokens as u64)?);
        bias.map_or(Ok(()), |bias| self.staging.send(stream, of_bias.range(), bias))?;
        let flags = token_mask.map(|mask| mask.iter().map(|&chooses| chooses.into()).collect::<Vec<u8>>());
        flags.map_or(Ok(()), |flags| self.staging.send(stream, of_mask.range(), &flags))?;
        let ([experts, weights], status) = (halves(range, count)?, range.part(count as u64 * 8, 4)?);
        self.staging.send(stream, &status, &[0_u32])?;
        let gate = GateArgs {
            tokens: tokens as u32,
            logits: logits.span()?,
            bias: bias.map(|_| of_bias.span()).transpose()?,
            used: token_mask.map(|_| of_mask.span()).transpose()?,
            experts: span(&experts)?,
            weights: span(&weights)?,
            status: status.word(0)?,
        };
        compute.kernels.gate(stream, config, &gate)?;
        let words: Vec<u32> = self.staging.receive(stream, range)?;
        // The stream of a failed world goes on with values that are invalid.
        self.world.hub.health().check()?;
        if words[2 * count] != 0 {
            return Ok(None);
        }
        let (experts, weights) = words[..2 * count].split_at(count);
        let (experts, weights) = (bytemuck::cast_slice(experts), bytemuck::cast_slice(weights));
        Ok(Some(Gated::chosen(self.gate.accept(experts, weights)?.clone())))
    }
}

impl<'s> ForwardStep<'s> {
    fn new(
        placed: &'s PlacedExperts,
        exchange: &'s mut ExpertParallel,
        (input, out): (Input<'s, DeviceRange>, &'s DeviceRange),
        routed: &'s Routed,
        plan: &OverlapSettings,
    ) -> Self {
        let chunk = |tokens| ChunkOutputs {
            tokens,
            received: OnceLock::new(),
            rows: Handoff::empty(),
            made: Handoff::empty(),
            output: Handoff::empty(),
        };
        let chunks = plan.slices(routed.gated.tokens()).map(chunk).collect();
        ForwardStep {
            placed,
            exchange: Handoff::new(exchange),
            input,
            out,
            routed,
            of_shared_expert: Handoff::empty(),
            chunks,
        }
    }

    /// The values for the gradients, once all is enqueued and streams are joined.
    fn kept(self) -> Result<(Vec<DeviceChunkTape>, Option<SharedSaved>), Error> {
        let kept = |places: ChunkOutputs| {
            Some(DeviceChunkTape { received: places.received.into_inner()?, made: places.made.into_inner()? })
        };
        let chunks = self.chunks.into_iter().map(kept).collect::<Option<_>>();
        let shared = self.of_shared_expert.into_inner().map(|(_, saved)| saved);
        Ok((chunks.ok_or(OverlapError::HandoffEmpty)?, shared))
    }
}

impl ChunkOutputs {
    fn received(&self) -> Result<&DeviceReceivedChunk, Error> {
        Ok(self.received.get().ok_or(OverlapError::HandoffEmpty)?)
    }
}

impl ForwardOps<Arc<Stream>> for ForwardStep<'_> {
    fn dispatch(&self, chunk: usize, _: &Arc<Stream>) -> Result<(), Error> {
        let ChunkOutputs { tokens, received, rows: of_chunk, .. } = &self.chunks[chunk];
        let (placed, k) = (self.placed, u64::from(self.routed.gated.decision.top_k()) * 4);
        let x = placed.part(self.input.x, tokens)?;
        let (first, len) = (tokens.start as u64 * k, tokens.len() as u64 * k);
        let [experts, weights] = self.routed.experts_and_weights()?;
        let (experts, weights) = (experts.part(first, len)?, weights.part(first, len)?);
        let choices = Choices::Device { experts: &experts, weights: &weights };
        let (rows, handle) =
            self.exchange.with(|ep| ep.dispatch(Tensor::device(&x, placed.dtype), choices))?;
        let (weights, counts) = (rows.weights()?, rows.counts()?);
        let counts = counts.part(0, handle.tokens_per_expert().len() as u64 * 16)?;
        of_chunk.put(rows)?;
        received
            .set(DeviceReceivedChunk { handle, weights, counts })
            .map_err(|_| OverlapError::HandoffInUse.into())
    }

    fn shared(&self) -> Result<(), Error> {
        let Some(shared) = &self.placed.shared else { return Ok(()) };
        let Routed { x, x_factors, gated, .. } = self.routed;
        let rows = self.placed.all(x_factors.as_ref().unwrap_or(x).span()?, gated.tokens());
        self.of_shared_expert.put(shared.forward_shared(&self.placed.compute, rows)?)
    }

    fn experts(&self, chunk: usize, _: usize) -> Result<(), Error> {
        let (places, placed) = (&self.chunks[chunk], self.placed);
        let received = places.received()?;
        let (rows, held) = placed.received(places.rows.take()?)?;
        held.map_or(Ok(()), |held| places.rows.put(held))?;
        let (output, weights) = (received.handle.output(), span(&received.weights)?);
        let (segments, returned) = (received.segments(&rows)?, placed.returned(&output)?);
        let saved = placed.experts.forward(&placed.compute, segments, weights, returned)?;
        places.output.put(output)?;
        places.made.put(DeviceGroupOutputs { rows, saved })
    }

    fn combine(&self, chunk: usize, _: &Arc<Stream>) -> Result<(), Error> {
        let places = &self.chunks[chunk];
        let handle = &places.received()?.handle;
        let out = self.placed.part(self.out, &places.tokens)?;
        let output = places.output.take()?;
        self.exchange.with(|ep| match output {
            Ok(output) => ep.combine_into(output, handle, TensorMut::device(&out, self.placed.dtype)),
            Err(error) => Err(ep.refuse(CallKind::Combine, Some(handle), error)),
        })
    }

    fn sum(&self, chunk: usize) -> Result<(), Error> {
        let (placed, tokens) = (self.placed, &self.chunks[chunk].tokens);
        let part = placed.part(self.out, tokens)?;
        let residual = self.input.residual.map(|residual| placed.part(residual, tokens)).transpose()?;
        let sum = |shared: Option<&DeviceTensor>| {
            let wide = placed.hidden as u64 * 4;
            let (first, len) = (tokens.start as u64 * wide, tokens.len() as u64 * wide);
            let sum = AccumulateArgs {
                count: (tokens.len() * placed.hidden) as u64,
                dtype: placed.dtype,
                rows: span(&part)?,
                residual: residual.as_ref().map(span).transpose()?,
                more: [shared.map(|shared| shared.range().span(first, len)).transpose()?, None],
                out: span(&part)?,
            };
            Ok(placed.compute.kernels.accumulate(&placed.compute.stream, &sum)?)
        };
        match (&placed.shared, &residual) {
            (Some(_), _) => self.of_shared_expert.with(|(shared, _)| sum(Some(shared))),
            (None, Some(_)) => sum(None),
            (None, None) => Ok(()),
        }
    }
}
