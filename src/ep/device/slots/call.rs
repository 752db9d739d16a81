//! One call in slots: each step of its program, for a stream.
//!
//! [`schedule::call`](crate::schedule::call) alone holds the order of steps.
//!
//! A kernel or copy before the first stage can be refused, and the call made again. Peers wait for
//! later steps, so an error there ends the world. Sums concern this rank only, so their errors do
//! not.

use std::sync::Arc;

use super::exchange::SlotState;
use super::expand::{Expansion, Received};
use super::handle::SlotHandle;
use crate::device::{Check, DeviceRange, Pack, Stream, SumArgs};
use crate::ep::buffers::OutputAt;
use crate::ep::tensor::{Shape, Side, TensorMut, Tokens, wrong_place};
use crate::ep::{CombineInput, ExpertOutput};
use crate::error::{CallError, Error};
use crate::exec::{Executor, Lowered};
use crate::schedule::call::{Part, Role, SlotCall, StageId, Work};

/// Tensors of the caller that a half needs.
pub(super) enum Given<'a> {
    Nothing,
    /// First half of a dispatch.
    Tokens(Tokens<'a>),
    /// First half of a combine.
    Outputs(CombineInput<'a>, &'a SlotHandle),
    /// Second half of a combine.
    Sums(TensorMut<'a>),
}

/// A call amid its steps.
pub(super) struct ConstantCall<'a> {
    pub state: &'a SlotState,
    /// The operations of its stage.
    pub stage: &'a mut Lowered,
    pub stream: &'a Stream,
    pub call: SlotCall,
    pub given: Given<'a>,
    /// Tokens of the last dispatch.
    pub tokens: u32,
}

impl Executor for ConstantCall<'_> {
    fn run(&mut self, _: Role, _: StageId, part: Part) -> Result<(), Error> {
        self.stage.enqueue(part, self.stream).map_err(|error| self.state.fail(error.into()))
    }

    fn compute(&mut self, _: Role, work: Work) -> Result<(), Error> {
        let ConstantCall { state, stream, given, tokens: last, .. } = self;
        match (work, given) {
            (Work::Pack, Given::Tokens(tokens)) => state.pack(stream, tokens),
            (Work::Check, _) => state.check(stream, *last).map_err(|error| state.fail(error)),
            (Work::Partials, Given::Outputs(y, handle)) => {
                state.bring(stream, y, handle)?;
                state.fold(stream)
            }
            (Work::Sum, Given::Sums(out)) => state.sum(stream, out, *last),
            _ => Err(CallError::unknown_step(self.call.kind(), &work).into()),
        }
    }

    /// Ranks agreed on all constants when they built the exchange.
    fn agree(&mut self, _: Role) -> Result<(), Error> {
        Ok(())
    }

    fn admit(&mut self, _: Role) -> Result<(), Error> {
        Ok(())
    }
}

impl SlotState {
    fn pack(&self, stream: &Stream, tokens: &Tokens<'_>) -> Result<(), Error> {
        let Tokens { count, x, experts, weights, .. } = *tokens;
        let pack = Pack {
            shape: self.shape,
            tokens: count,
            x: x.span(0, x.len())?,
            experts: experts.span(0, experts.len())?,
            weights: weights.span(0, weights.len())?,
            n_experts: self.experts,
            rank_of: self.rank_of.span(0, self.rank_of.len())?,
            local_of: self.local_of.span(0, self.local_of.len())?,
            slots: &self.packed_at,
            places: self.rows.span(0, self.rows.len())?,
            counter: self.counter()?,
            status: self.status_word()?,
            digest: self.digest,
        };
        self.kernels.pack(stream, &pack)?;
        let Some(expansion) = &self.expansion else { return Ok(()) };
        // `pack` has counted the call: it cannot be made again.
        let tallied = expansion.tally((&self.kernels, stream), &self.packed_at, (count, pack.experts));
        tallied.map_err(|error| self.fail(error))
    }

    /// Compares the headers with what they must be. So a rank that makes another call is found
    /// before its rows are used.
    fn check(&self, stream: &Stream, tokens: u32) -> Result<(), Error> {
        let check = Check {
            shape: self.shape,
            ranks: self.size(),
            received: self.received.span(0, self.received.len())?,
            counter: self.counter()?,
            status: self.status_word()?,
            digest: self.digest,
        };
        self.kernels.check(stream, &check)?;
        let Some(expansion) = &self.expansion else { return Ok(()) };
        let (status, verdict) = (self.status_word()?, self.call_status()?);
        let received = Received { slots: &self.received, status, verdict };
        expansion.expand((&self.kernels, stream), received, tokens)
    }

    /// Makes one partial row of the outputs for a token.
    fn fold(&self, stream: &Stream) -> Result<(), Error> {
        let Some(expansion) = &self.expansion else { return Ok(()) };
        expansion.fold((&self.kernels, stream), &self.partials)
    }

    /// Copies outputs that lie elsewhere to where peers expect them.
    fn bring(&self, stream: &Stream, y: &CombineInput<'_>, handle: &SlotHandle) -> Result<(), Error> {
        let tensor = match y {
            CombineInput::Output(ExpertOutput(OutputAt::Slots(output))) => {
                let (seen, expected) = (output.nth, handle.nth);
                return match output.nth == handle.nth && Arc::ptr_eq(&output.facts, &handle.facts) {
                    true => Ok(()),
                    false => Err(CallError::WrongOutput { seen, expected }.into()),
                };
            }
            CombineInput::Output(ExpertOutput(OutputAt::Planned(output))) => {
                let (seen, expected) = (output.instance(), self.facts.instance);
                return Err(CallError::ForeignHandle { seen, expected }.into());
            }
            CombineInput::Output(_) => return Err(wrong_place("expert outputs", Side::Device)),
            CombineInput::Elsewhere(tensor) => tensor,
        };
        let outputs = &self.facts.outputs;
        let (columns, dtype) = (self.spec.hidden, self.spec.dtype);
        let rows = outputs.len() / self.spec.row_bytes();
        let from = tensor.on_device("expert outputs", Shape { rows, columns, dtype }, stream.device())?;
        if from.address() == outputs.address() || rows == 0 {
            return Ok(());
        }
        stream.copy(outputs.span(0, from.len())?, from.span(0, from.len())?)?;
        handle.count_copied(from.len());
        Ok(())
    }

    /// Where sums of the last dispatch's tokens go.
    pub(super) fn sums<'o>(&self, out: &TensorMut<'o>, tokens: u32) -> Result<&'o DeviceRange, Error> {
        let (rows, columns) = (tokens.into(), self.spec.hidden);
        let dtype = self.spec.dtype;
        out.on_device("combined tokens", Shape { rows, columns, dtype }, self.device)
    }

    /// Sums by rank, ascending.
    fn sum(&self, stream: &Stream, out: &TensorMut<'_>, tokens: u32) -> Result<(), Error> {
        let out = self.sums(out, tokens)?;
        let sum = SumArgs {
            shape: self.shape,
            tokens,
            columns: self.spec.hidden as u32,
            rows: self.expansion.as_ref().map_or(self.spec.dtype, Expansion::home),
            dtype: self.spec.dtype,
            homes: &self.summed_from,
            places: self.rows.span(0, self.rows.len())?,
            status: self.call_status()?,
            out: out.span(0, out.len())?,
        };
        Ok(self.kernels.sum(stream, &sum)?)
    }
}
