//! Gradients: the transposes of dispatch and combine.

use super::buffers::{HostInput, HostRows, elements};
use super::exchange::HostExchange;
use super::flight::{Flight, Lent, options};
use super::handle::HostHandle;
use super::{Source, Target};
use crate::error::{CallKind, Error, PlanError};
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
        let wrong = |what, seen, rows| PlanError::WrongShape { what, seen, rows, columns: 1 };
        let words = handle.inner().offer.notes as usize;
        match rows {
            None if !weights.is_empty() => Err(wrong("weight gradients", weights.len(), 0).into()),
            None => Ok(()),
            Some(_) if weights.len() != self.choices(handle) => self.check_choices(weights.len(), handle),
            Some(rows) if rows.len() != words => Err(wrong("row weight gradients", rows.len(), words).into()),
            Some(_) => Ok(()),
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
        // A tensor that cannot be used refuses the first of the two calls.
        let (weights, checked) = match weights.transpose() {
            Ok(weights) => {
                let lens = weights.as_ref().map(|weights| weights.len()).zip(along);
                (weights, lens.map_or(Ok(()), |(seen, handle)| self.check_choices(seen, handle)))
            }
            Err(error) => (None, Err(error)),
        };
        let gradients = gradients.and_then(|gradients| checked.map(|()| gradients));
        let weighted = if self.fixed.spec.weighted { options::WEIGHTED } else { 0 };
        let mut rows = self.cached((CallKind::CombineBackward, weighted), gradients, handle)?;
        let Some(handle) = along.filter(|_| weighted != 0) else { return Ok(rows) };
        let parts = ReturnParts { rows: false, weights: true };
        let mut flight = Flight::returning(CallKind::ReturnWeights, parts, true);
        let y = self.weight_gradients(&mut rows, handle).map(|()| HostInput::Kept);
        let output = weights.map(|weights| Io { weights, ..Io::default() });
        self.ret(&mut flight, y, Ok(handle), Lent { output, ..Lent::default() })?;
        Ok(rows)
    }

    fn check_choices(&self, seen: usize, handle: &HostHandle) -> Result<(), Error> {
        let (what, rows) = ("weight gradients", self.choices(handle));
        if seen != rows {
            return Err(PlanError::WrongShape { what, seen, rows, columns: 1 }.into());
        }
        Ok(())
    }

    /// Multiplies gradient rows with their weights, after `<y, g>` has been taken of each; leaves
    /// these behind the rows of the kept output.
    fn weight_gradients(&mut self, gradients: &mut HostRows, handle: &HostHandle) -> Result<(), Error> {
        let (inner, HostExchange { fixed, space, .. }) = (handle.inner(), self);
        let (dtype, loops) = (Arithmetic::try_from(fixed.spec.dtype)?, &fixed.lanes.rows);
        let (row_bytes, products) = (inner.row_bytes as usize, &mut space.products);
        let grads = gradients.rows_mut::<u8>()?.chunks_exact_mut(row_bytes);
        inner.kept_output(|kept| {
            let (extent, chunk) = (&mut kept.extent, inner.offer);
            let rows = extent.slice::<u8>(0, elements::<u8>(chunk.rows, chunk.row_bytes))?;
            products.clear();
            for ((y, g), &weight) in rows.chunks_exact(row_bytes).zip(grads).zip(&inner.received.weights) {
                products.push(loops.dot_rows(dtype, y, g));
                loops.scale_row(dtype, g, weight);
            }
            extent.slice_mut(chunk.notes_at(), chunk.notes as usize)?.copy_from_slice(products);
            Ok(())
        })?
    }
}
