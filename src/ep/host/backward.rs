//! Gradients: the transposes of dispatch and combine.

use super::buffers::{HostInput, HostOutput, HostRows};
use super::exchange::HostExchange;
use super::flight::{Flight, Lent, options};
use super::handle::{HostHandle, RetainedBuffer};
use super::{Source, Target};
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::lane::Io;
use crate::rows::Arithmetic;
use crate::schedule::ReturnParts;

/// Numbers of rows, if there are any, as the caller brought them.
type Numbers<'a> = Option<Result<&'a [f32], Error>>;

impl HostExchange {
    /// Gradient of a dispatch, into tensors of the caller's.
    pub fn dispatch_backward(
        &mut self,
        (rows, row_weights): (Result<HostInput<'_>, Error>, Numbers<'_>),
        handle: Result<&HostHandle, Error>,
        (tokens, weights): (Target<'_>, Result<&mut [f32], Error>),
    ) -> Result<(), Error> {
        let parts = ReturnParts { rows: true, weights: row_weights.is_some() };
        let mut flight = Flight::returning(CallKind::DispatchBackward, parts, false);
        let output = self.sums(&mut flight, &handle, "token gradients", tokens);
        let row_weights = row_weights.and_then(|given| given.map_err(|error| flight.refuse(Err(error))).ok());
        let weights = weights.unwrap_or_else(|error| {
            flight.refuse(Err(error));
            &mut []
        });
        if let Ok(handle) = handle {
            flight.refuse(self.check_weights(row_weights, weights, handle));
        }
        let output = output.map(|output| Io { output, weights, ..Io::default() });
        self.ret(&mut flight, rows, handle, Lent { row_weights, output, ..Lent::default() })
    }

    fn check_weights(&self, rows: Option<&[f32]>, weights: &[f32], handle: &HostHandle) -> Result<(), Error> {
        let expected = rows.map_or(0, |_| self.choices(handle));
        let wrong = |what, seen, rows| PlanError::WrongShape { what, seen, rows, columns: 1 };
        if weights.len() != expected {
            return Err(wrong("weight gradients", weights.len(), expected).into());
        }
        let words = handle.inner().offer.notes as usize;
        match rows {
            Some(rows) if rows.len() != words => Err(wrong("row weight gradients", rows.len(), words).into()),
            _ => Ok(()),
        }
    }

    /// Choices of the tokens of a handle.
    pub fn choices(&self, handle: &HostHandle) -> usize {
        handle.tokens() as usize * self.fixed.spec.top_k as usize
    }

    /// Gradient of a combine. A weighted one takes two calls: the cached dispatch, then the return
    /// of weight gradients.
    pub fn combine_backward(
        &mut self,
        gradients: Source<'_>,
        handle: Result<&HostHandle, Error>,
        weights: Option<Result<&mut [f32], Error>>,
    ) -> Result<HostRows, Error> {
        let along = handle.as_ref().ok().copied();
        let weighted = if self.fixed.spec.weighted { options::WEIGHTED } else { 0 };
        let mut rows = self.cached((CallKind::CombineBackward, weighted), gradients, handle)?;
        let Some(handle) = along.filter(|_| weighted != 0) else { return Ok(rows) };
        let parts = ReturnParts { rows: false, weights: true };
        let mut flight = Flight::returning(CallKind::ReturnWeights, parts, true);
        let weights = weights.and_then(|weights| weights.map_err(|error| flight.refuse(Err(error))).ok());
        let (what, expected) = ("weight gradients", self.choices(handle));
        if let Some(seen) = weights.as_ref().map(|weights| weights.len()).filter(|&seen| seen != expected) {
            flight.refuse(Err(PlanError::WrongShape { what, seen, rows: expected, columns: 1 }.into()));
        }
        let y = self.weight_gradients(&mut rows, handle).map(HostInput::Output);
        let output = weights.map(|weights| Io { weights, ..Io::default() });
        self.ret(&mut flight, y, Ok(handle), Lent { output, ..Lent::default() })?;
        Ok(rows)
    }

    /// Multiplies gradient rows with their weights, after `<y, g>` has been taken of each; leaves
    /// these behind the rows of the kept output.
    fn weight_gradients(
        &mut self,
        gradients: &mut HostRows,
        handle: &HostHandle,
    ) -> Result<HostOutput, Error> {
        let inner = handle.inner();
        let Some(RetainedBuffer { extent, .. }) = inner.kept.take() else {
            return Err(CallError::NotKept { missing: "the output of a weighted combine" }.into());
        };
        let mut output =
            HostOutput { extent, chunk: inner.offer, number: inner.number, instance: inner.instance };
        let HostExchange { fixed, space, .. } = self;
        let (dtype, loops) = (Arithmetic::try_from(fixed.spec.dtype)?, &fixed.lanes.rows);
        let (row_bytes, products) = (inner.row_bytes as usize, &mut space.products);
        products.clear();
        let rows = output.rows_mut::<u8>()?.chunks_exact(row_bytes);
        let grads = gradients.rows_mut::<u8>()?.chunks_exact_mut(row_bytes);
        for ((y, g), &weight) in rows.zip(grads).zip(&inner.received.weights) {
            products.push(loops.dot_rows(dtype, y, g));
            loops.scale_row(dtype, g, weight);
        }
        output.weights_mut()?.copy_from_slice(products);
        Ok(output)
    }
}
