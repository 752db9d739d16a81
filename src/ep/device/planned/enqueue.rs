//! What a call puts on the caller's stream: copies, bells and kernels.

use std::sync::Arc;

use super::REFUSED;
use super::common::Common;
use super::exchange::{Driver, PlannedExchange};
use super::shape::StreamFlag;
use crate::device::{Context, DeviceRange, Kernels, MemOpBatch, PermuteArgs, SortArgs, Stream, SumChoices};
use crate::dtype::PartialDtype;
use crate::ep::tensor::Tokens;
use crate::error::{DeviceError, Error};

/// What a stream does at the bells of each seat: the same in every call, so it is listed once.
pub(super) struct Lists {
    /// Per seat, where engines relay: what comes before the packing.
    listed: Vec<MemOpBatch>,
    /// Per seat: what follows the packing, and what follows the bell of a combine.
    packed: Vec<MemOpBatch>,
    offered: Vec<MemOpBatch>,
}

impl Lists {
    /// For all seats.
    pub fn new(common: &Common, context: &Arc<Context>) -> Result<Self, DeviceError> {
        let (mut listed, mut packed, mut offered) = (Vec::new(), Vec::new(), Vec::new());
        for seat in 0..common.shape.word_sets() {
            let mut list = MemOpBatch::with_capacity(context, 2);
            list.wait(common.word(seat, StreamFlag::Listed)?, 1)?;
            list.write(common.word(seat, StreamFlag::Listed)?, 0)?;
            listed.push(list);
            let mut list = MemOpBatch::with_capacity(context, 3);
            list.write(common.word(seat, StreamFlag::Packed)?, 1)?;
            list.wait(common.word(seat, StreamFlag::Dispatched)?, 1)?;
            list.write(common.word(seat, StreamFlag::Dispatched)?, 0)?;
            packed.push(list);
            let mut list = MemOpBatch::with_capacity(context, 2);
            list.wait(common.word(seat, StreamFlag::Combined)?, 1)?;
            list.write(common.word(seat, StreamFlag::Combined)?, 0)?;
            offered.push(list);
        }
        Ok(Lists { listed, packed, offered })
    }
}

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
                order: order.span(0, order.len())?,
            },
        )?)
    }

    /// Enqueues that rows are packed in that order.
    pub fn pack(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        seat: u32,
        (count, x): (u32, &DeviceRange),
    ) -> Result<(), Error> {
        let shape = &self.shape;
        let (order, rows) = (self.piece(shape.order(seat))?, self.piece(shape.staging(seat))?);
        Ok(kernels.regroup(
            stream,
            &PermuteArgs {
                row_bytes: shape.row_bytes(),
                sources: count,
                rows: count * self.fixed.spec.top_k,
                from: x.span(0, x.len())?,
                index: order.span(0, order.len())?,
                out: rows.span(0, rows.len())?,
                status: self.word(seat, StreamFlag::Status)?,
            },
        )?)
    }
}

impl PlannedExchange {
    /// That tokens go, or, without any, that the call is refused; and that rows come.
    pub(super) fn enqueue_dispatch(&mut self, seat: u32, tokens: Option<Tokens<'_>>) -> Result<(), Error> {
        let (common, stream) = (&*self.common, &*self.stream);
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        if let Some(Tokens { count, experts, weights, .. }) = tokens {
            let choices = u64::from(count) * u64::from(spec.top_k) * 4;
            for (from, to) in [(experts, shape.host_experts(seat)), (weights, shape.host_weights(seat))] {
                stream.copy(common.host.range().span(to.0, choices)?, from.span(0, choices)?)?;
            }
        }
        stream.write(
            common.word(seat, StreamFlag::Dispatch)?,
            tokens.map_or(REFUSED, |tokens| tokens.count) + 1,
        )?;
        if let (Driver::Planner { lists, .. }, true) = (&mut self.driver, shape.arrives()) {
            stream.operate(&mut lists.listed[seat as usize])?;
        }
        let packs = tokens.filter(|tokens| tokens.count > 0);
        if let (Some(Tokens { count, x, experts, .. }), false) = (packs, self.packs_when_placed()) {
            // Where engines relay, the planner has said the order.
            if !shape.arrives() {
                common.order(stream, &self.kernels, seat, (count, experts))?;
            }
            common.pack(stream, &self.kernels, seat, (count, x))?;
        }
        let Driver::Planner { lists, .. } = &mut self.driver else { return Ok(()) };
        stream.operate(&mut lists.packed[seat as usize])?;
        match shape.budget() {
            Some(landing) if shape.arrives() => {
                common.regroup(stream, &self.kernels, (seat, shape.rows(seat).0, landing.rows))
            }
            _ => Ok(()),
        }
    }

    /// Whether rows are packed in the second half: where engines relay, the caller's thread knows only then in which order.
    pub(super) fn packs_when_placed(&self) -> bool {
        self.common.shape.arrives() && matches!(self.driver, Driver::Caller(_))
    }

    /// That outputs may be read, which lie so many `steps` into this rank's memory. On one node the caller's thread runs ahead:
    /// nobody hears of it but the streams of its peers.
    pub(super) fn enqueue_offer(&self, seat: u32, steps: u32) -> Result<(), Error> {
        if matches!(self.driver, Driver::Caller(_)) && !self.common.fixed.paths().rails() {
            return Ok(());
        }
        Ok(self.stream.write(self.common.word(seat, StreamFlag::Combine)?, steps + 1)?)
    }

    /// That rows come back, and their sums go to `out`.
    pub(super) fn enqueue_sum(
        &mut self,
        seat: u32,
        tokens: u32,
        out: Option<&DeviceRange>,
    ) -> Result<(), Error> {
        let (common, stream) = (&*self.common, &*self.stream);
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        if let Driver::Planner { lists, .. } = &mut self.driver {
            stream.operate(&mut lists.offered[seat as usize])?;
        }
        if let Some(out) = out.filter(|_| tokens > 0) {
            let (rows, summands) = (common.piece(shape.staging(seat))?, common.piece(shape.summands(seat))?);
            self.kernels.sum_choices(
                stream,
                &SumChoices {
                    tokens,
                    top_k: spec.top_k,
                    columns: spec.hidden as u32,
                    dtype: spec.dtype,
                    wire: PartialDtype::F32,
                    n_rows: shape.entries() as u32,
                    rows: rows.span(0, rows.len())?,
                    index: summands.span(0, summands.len())?,
                    n_experts: spec.map.experts(),
                    experts: None,
                    weights: None,
                    group_of: None,
                    status: common.word(seat, StreamFlag::Status)?,
                    out: out.span(0, out.len())?,
                },
            )?;
        }
        Ok(())
    }
}
