//! What a call puts on the caller's stream: copies, bells and kernels.

use std::sync::Arc;

use super::REFUSED;
use super::common::Common;
use super::exchange::PlannedExchange;
use super::shape::Bell;
use crate::device::{Context, MemoryOperations, Order, Range, Regroup, SumChoices};
use crate::dtype::Wire;
use crate::ep::tensor::Tokens;
use crate::error::{DeviceError, Error};

/// What a stream does at the bells of each seat: the same in every call, so it is listed once.
pub(super) struct Lists {
    /// Per seat, where engines relay: what comes before the packing.
    listed: Vec<MemoryOperations>,
    /// Per seat: what follows the packing, and what follows the bell of a combine.
    packed: Vec<MemoryOperations>,
    offered: Vec<MemoryOperations>,
}

impl Lists {
    /// For all seats.
    pub fn new(common: &Common, context: &Arc<Context>) -> Result<Self, DeviceError> {
        let (mut listed, mut packed, mut offered) = (Vec::new(), Vec::new(), Vec::new());
        for seat in 0..common.shape.word_sets() {
            let mut list = MemoryOperations::with_capacity(context, 2);
            list.wait(common.word(seat, Bell::Listed)?, 1)?;
            list.write(common.word(seat, Bell::Listed)?, 0)?;
            listed.push(list);
            let mut list = MemoryOperations::with_capacity(context, 3);
            list.write(common.word(seat, Bell::Packed)?, 1)?;
            list.wait(common.word(seat, Bell::Dispatched)?, 1)?;
            list.write(common.word(seat, Bell::Dispatched)?, 0)?;
            packed.push(list);
            let mut list = MemoryOperations::with_capacity(context, 2);
            list.wait(common.word(seat, Bell::Combined)?, 1)?;
            list.write(common.word(seat, Bell::Combined)?, 0)?;
            offered.push(list);
        }
        Ok(Lists { listed, packed, offered })
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
        stream
            .write(common.word(seat, Bell::Dispatch)?, tokens.map_or(REFUSED, |tokens| tokens.count) + 1)?;
        if shape.arrives() {
            stream.operate(&mut self.lists.listed[seat as usize])?;
        }
        if let Some(Tokens { count, x, experts, .. }) = tokens.filter(|tokens| tokens.count > 0) {
            let order = common.piece(shape.order(seat))?;
            let (map, rows) = (common.piece(shape.map())?, common.piece(shape.staging(seat))?);
            let entries = count * spec.top_k;
            // Where engines relay, the planner has said it.
            if !shape.arrives() {
                self.kernels.order(
                    stream,
                    &Order {
                        experts: experts.span(0, u64::from(entries) * 4)?,
                        choices: entries,
                        top_k: spec.top_k,
                        bin_of: map.span(0, map.len())?,
                        n_experts: spec.map.experts(),
                        bins: common.fixed.bins.count(),
                        order: order.span(0, order.len())?,
                    },
                )?;
            }
            self.kernels.regroup(
                stream,
                &Regroup {
                    row_bytes: shape.row_bytes(),
                    sources: count,
                    rows: entries,
                    from: x.span(0, x.len())?,
                    index: order.span(0, order.len())?,
                    out: rows.span(0, rows.len())?,
                    status: common.word(seat, Bell::Status)?,
                },
            )?;
        }
        stream.operate(&mut self.lists.packed[seat as usize])?;
        match shape.budget() {
            Some(landing) if shape.arrives() => {
                common.regroup(stream, &self.kernels, (seat, shape.rows(seat).0, landing.rows))
            }
            _ => Ok(()),
        }
    }

    /// That outputs may be read, which lie so many `steps` into this rank's memory.
    pub(super) fn enqueue_offer(&self, seat: u32, steps: u32) -> Result<(), Error> {
        Ok(self.stream.write(self.common.word(seat, Bell::Combine)?, steps + 1)?)
    }

    /// That rows come back, and their sums go to `out`.
    pub(super) fn enqueue_sum(&mut self, seat: u32, tokens: u32, out: Option<&Range>) -> Result<(), Error> {
        let (common, stream) = (&*self.common, &*self.stream);
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        stream.operate(&mut self.lists.offered[seat as usize])?;
        if let Some(out) = out.filter(|_| tokens > 0) {
            let (rows, summands) = (common.piece(shape.staging(seat))?, common.piece(shape.summands(seat))?);
            self.kernels.sum_choices(
                stream,
                &SumChoices {
                    tokens,
                    top_k: spec.top_k,
                    columns: spec.hidden as u32,
                    dtype: spec.dtype,
                    wire: Wire::F32,
                    n_rows: shape.entries() as u32,
                    rows: rows.span(0, rows.len())?,
                    index: summands.span(0, summands.len())?,
                    n_experts: spec.map.experts(),
                    experts: None,
                    weights: None,
                    group_of: None,
                    status: common.word(seat, Bell::Status)?,
                    out: out.span(0, out.len())?,
                },
            )?;
        }
        Ok(())
    }
}
