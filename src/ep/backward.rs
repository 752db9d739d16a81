//! Gradients: the transposes of dispatch and combine.

use super::flight::{Flight, Lent, options};
use super::handle::Kept;
use super::{Contribution, ExpertOutput, ExpertParallel, ExpertRows, Handle};
use crate::dtype::Element;
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::lane::Io;
use crate::rows::Arithmetic;
use crate::schedule::Parts;

impl ExpertParallel {
    /// Gradient of [`ExpertParallel::dispatch`]: sums row gradients to their tokens (`[tokens, hidden]`), in the order of
    /// combine; with `row_weight_gradients` (one per received row or, rank-major, per row and choice) also brings those home, `[tokens, top_k]`, zero for
    /// dropped choices. Collective.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`].
    pub fn dispatch_backward<'a, E: Element>(
        &mut self,
        row_gradients: impl Into<Contribution<'a>>,
        row_weight_gradients: Option<&[f32]>,
        handle: &Handle,
    ) -> Result<(Vec<E>, Option<Vec<f32>>), Error> {
        let mut tokens = vec![E::zeroed(); handle.tokens() as usize * self.fixed.spec.hidden];
        let mut weights = vec![0.0; row_weight_gradients.map_or(0, |_| self.choices(handle))];
        self.dispatch_backward_into(row_gradients, row_weight_gradients, handle, &mut tokens, &mut weights)?;
        Ok((tokens, row_weight_gradients.map(|_| weights)))
    }

    /// As [`ExpertParallel::dispatch_backward`], into tensors of the caller's. Without `row_weight_gradients`, `weights`
    /// is empty.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`].
    pub fn dispatch_backward_into<'a, E: Element>(
        &mut self,
        row_gradients: impl Into<Contribution<'a>>,
        row_weight_gradients: Option<&[f32]>,
        handle: &Handle,
        tokens: &mut [E],
        weights: &mut [f32],
    ) -> Result<(), Error> {
        let checked = super::buffers::check_tensor(
            "token gradients",
            tokens,
            handle.tokens(),
            (self.fixed.spec.hidden, self.fixed.spec.dtype),
        )
        .and_then(|()| self.check_weights(row_weight_gradients, weights, handle));
        let parts = Parts { rows: true, weights: row_weight_gradients.is_some() };
        let mut flight = Flight::returning(CallKind::DispatchBackward, parts, false);
        flight.refuse(checked);
        let io = Io { output: bytemuck::cast_slice_mut(tokens), weights, ..Io::default() };
        let lent = Lent {
            handle: Some(handle),
            rows: Some(row_gradients.into()),
            row_weights: row_weight_gradients,
            output: Some(io),
            ..Lent::default()
        };
        self.ret(&mut flight, lent)
    }

    fn check_weights(&self, rows: Option<&[f32]>, weights: &[f32], handle: &Handle) -> Result<(), Error> {
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

    fn choices(&self, handle: &Handle) -> usize {
        handle.tokens() as usize * self.fixed.spec.top_k as usize
    }

    /// Gradient of [`ExpertParallel::combine`]: brings token gradients (`[tokens, hidden]`) to the rows that were
    /// summed. If the combine was weighted, rows are multiplied with their weight, and the weight gradients `<y, g>`
    /// come home, `[tokens, top_k]`, zero for dropped choices. Collective.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch_cached`]; [`CallError::NotKept`] if a weighted combine of this handle has not been
    /// made before.
    pub fn combine_backward<E: Element>(
        &mut self,
        gradients: &[E],
        handle: &Handle,
    ) -> Result<(ExpertRows, Option<Vec<f32>>), Error> {
        if !self.fixed.spec.weighted {
            let rows = self.cached(CallKind::CombineBackward, 0, Ok(()), gradients, handle)?;
            return Ok((rows, None));
        }
        let mut rows =
            self.cached(CallKind::CombineBackward, options::WEIGHTED, Ok(()), gradients, handle)?;
        let parts = Parts { rows: false, weights: true };
        let mut flight = Flight::returning(CallKind::WeightsHome, parts, true);
        let output = self.weight_gradients(&mut rows, handle).map_err(|error| flight.refuse(Err(error))).ok();
        let mut weights = vec![0.0; self.choices(handle)];
        let io = Io { weights: &mut weights, ..Io::default() };
        let (rows_home, output) = (output.map(Contribution::from), Some(io));
        self.ret(&mut flight, Lent { handle: Some(handle), rows: rows_home, output, ..Lent::default() })?;
        Ok((rows, Some(weights)))
    }

    /// Multiplies gradient rows with their weights, after `<y, g>` has been taken of each; leaves these behind the rows
    /// of the kept output.
    fn weight_gradients(
        &mut self,
        gradients: &mut ExpertRows,
        handle: &Handle,
    ) -> Result<ExpertOutput, Error> {
        let inner = handle.inner();
        let Some(Kept { extent, .. }) = inner.kept.take() else {
            return Err(CallError::NotKept { missing: "the output of a weighted combine" }.into());
        };
        let mut output = ExpertOutput::new(extent, inner.offer, inner.number, inner.instance);
        let dtype = Arithmetic::try_from(self.fixed.spec.dtype)?;
        let row_bytes = inner.row_bytes as usize;
        let mut products = std::mem::take(&mut self.space.products);
        products.clear();
        let rows = output.rows_mut::<u8>()?.chunks_exact(row_bytes);
        let grads = gradients.rows_mut::<u8>()?.chunks_exact_mut(row_bytes);
        for ((y, g), &weight) in rows.zip(grads).zip(&inner.received.weights) {
            products.push(self.fixed.lanes.rows.dot_rows(dtype, y, g));
            self.fixed.lanes.rows.scale_row(dtype, g, weight);
        }
        output.weights_mut()?.copy_from_slice(&products);
        self.space.products = products;
        Ok(output)
    }
}
