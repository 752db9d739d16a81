//! What a call puts on the caller's stream: copies, flags and kernels.

use super::REFUSED;
use super::common::Common;
use super::exchange::{Brought, PlannedExchange};
use super::handle::{PlannedOutput, PlannedRows};
use super::shape::StreamFlag;
use crate::device::{DeviceRange, DotScale, FetchWeights, Kernels, SortArgs, Stream, SumChoices};
use crate::dtype::Dtype;
use crate::ep::tensor::Chosen;
use crate::error::{CallKind, Error};

impl Common {
    /// Enqueues that the order of rows is found: by bin, then by token.
    pub fn order(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        seat: u32,
        (count, experts): (u32, &DeviceRange),
    ) -> Result<(), Error> {
        let spec = &self.fixed.spec;
        let (order, map) = (self.piece(self.shape.order(seat))?, self.piece(self.shape.map())?);
        let choices = count * spec.top_k;
        Ok(kernels.order(
            stream,
            &SortArgs {
                experts: experts.span(0, u64::from(choices) * 4)?,
                choices,
                top_k: spec.top_k,
                bin_of: map.span(0, map.len())?,
                n_experts: spec.map.experts(),
                bins: self.fixed.bins.count(),
                once: spec.layout.is_per_rank(),
                order: order.span(0, order.len())?,
            },
        )?)
    }
}

impl PlannedExchange {
    /// That choices go, with their tokens or before those, or, without any, that the call is
    /// refused; and that rows come.
    pub(super) fn enqueue_dispatch(&mut self, seat: u32, brought: Option<Brought<'_>>) -> Result<(), Error> {
        let (common, stream) = (&*self.common, &*self.stream);
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        if let Some((Chosen { tokens, experts, weights }, _)) = brought {
            let choices = u64::from(tokens) * u64::from(spec.top_k) * 4;
            for (from, to) in [(experts, shape.host_experts()), (weights, shape.host_weights())] {
                stream.copy(common.host.range().span(to.0, choices)?, from.span(0, choices)?)?;
            }
        }
        stream.write(
            common.word(seat, StreamFlag::Dispatch)?,
            brought.map_or(REFUSED, |(chosen, _)| chosen.tokens) + 1,
        )?;
        let packs = brought.filter(|(chosen, _)| chosen.tokens > 0);
        if let Some((Chosen { tokens, experts, .. }, x)) = packs {
            // Where engines relay, the second half finds the order.
            if !shape.arrives() {
                common.order(stream, &self.kernels, seat, (tokens, experts))?;
            }
            if let Some((x, dtype)) = x.filter(|&x| !self.packs_when_placed(x)) {
                common.pack(stream, &self.kernels, (CallKind::Dispatch, seat), (tokens, x, dtype))?;
            }
        }
        Ok(())
    }

    /// Whether these tokens are packed in the second half: where engines relay, the caller's thread
    /// knows only then in which order; and whether they need be packed, where engines can read
    /// them.
    pub(super) fn packs_when_placed(&self, x: (&DeviceRange, Dtype)) -> bool {
        self.common.shape.arrives() || self.common.lie_here(CallKind::Dispatch, x).is_some()
    }

    /// That the stream has come to a call along a known layout. In a return, outputs may be read,
    /// which lie so many `steps` into this rank's memory. On one node the caller's thread runs
    /// ahead: nobody hears of it but the streams of its peers.
    pub(super) fn enqueue_reached(&self, seat: u32, steps: u32) -> Result<(), Error> {
        if !self.common.fixed.paths().is_multi_node() {
            return Ok(());
        }
        Ok(self.stream.write(self.common.word(seat, StreamFlag::Combine)?, steps + 1)?)
    }

    /// That what returned goes to `out`: sums of rows, or weight gradients.
    pub(super) fn enqueue_returned(
        &mut self,
        (kind, seat): (CallKind, u32),
        tokens: u32,
        out: Option<&DeviceRange>,
    ) -> Result<(), Error> {
        let (common, stream) = (&*self.common, &*self.stream);
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        let Some(out) = out.filter(|_| tokens > 0) else { return Ok(()) };
        let (rows, index) = (common.span(shape.staging())?, common.span(shape.places(seat))?);
        let (n_rows, top_k) = (shape.entries() as u32, spec.top_k);
        let (status, out) = (common.word(seat, StreamFlag::Status)?, out.span(0, out.len())?);
        if kind == CallKind::ReturnWeights {
            let words = common.fixed.sizing(CallKind::Combine).words_home;
            let choices = tokens * top_k;
            let fetch = FetchWeights { choices, n_rows, words, from: rows, index, status, out };
            return Ok(self.kernels.fetch_weights(stream, &fetch)?);
        }
        let weights = common.span(shape.weights(seat))?;
        let groups = common.span(shape.groups())?;
        Ok(self.kernels.sum_choices(
            stream,
            &SumChoices {
                tokens,
                top_k,
                columns: spec.hidden as u32,
                dtype: spec.dtype,
                wire: spec.wire,
                n_rows,
                rows,
                index,
                n_experts: common.fixed.bins.count(),
                experts: Some(common.span(shape.sums(seat))?),
                weights: (spec.weighted && kind == CallKind::Combine).then_some(weights),
                group_of: spec.order.has_partials().then_some(groups),
                status,
                out,
            },
        )?)
    }

    /// That gradients of a weighted combine are multiplied with the weights of their rows, after
    /// `<y, g>` was taken of each.
    pub(super) fn enqueue_products(&self, y: &PlannedOutput, gradients: &PlannedRows) -> Result<(), Error> {
        let (spec, rows) = (&self.common.fixed.spec, gradients.len());
        if rows == 0 {
            return Ok(());
        }
        let (g, weights, products) = (gradients.rows()?, gradients.weights()?, y.weights()?);
        Ok(self.kernels.dot_scale(
            &self.stream,
            &DotScale {
                rows,
                columns: spec.hidden as u32,
                dtype: spec.dtype,
                y: y.rows().span(0, y.rows().len())?,
                gradients: g.span(0, g.len())?,
                weights: weights.span(0, weights.len())?,
                products: products.span(0, products.len())?,
            },
        )?)
    }
}
