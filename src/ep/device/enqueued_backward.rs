//! Gradients of an instance on a device with exact sizes or a budget.
//!
//! ```text
//!   dispatch_backward             a return of rows; with gradients of weights these return behind them
//!   combine_backward              a dispatch of gradients by the handle's choices; of a weighted combine
//!                                 also products with the kept output, whose sums return to the choices
//! ```
//!
//! The kernel of these products stands between two calls, in no program: it reads and writes on the
//! caller's stream alone, as experts do.

use super::enqueued_exchange::EnqueuedExchange;
use super::enqueued_results::{EnqueuedHandle, EnqueuedOutput, EnqueuedRows};
use crate::device::{DeviceRange, DotScale};
use crate::dtype::Dtype;
use crate::ep::CombineInput;
use crate::ep::tensor::{Shape, Tensor, TensorMut};
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::rows::Arithmetic;

/// Option of a gradient of dispatch: weight gradients return behind it.
const WITH_WEIGHTS: u32 = 1;

impl EnqueuedExchange {
    /// Enqueues that gradients of rows return and their sums go to `tokens`; with `of_rows`, one
    /// gradient for the weight of each row, those return, too, to `weights`. Collective.
    ///
    /// # Errors
    /// As
    /// [`ExpertParallel::dispatch_backward_into`](crate::ExpertParallel::dispatch_backward_into).
    pub fn dispatch_backward(
        &mut self,
        (rows, of_rows): (CombineInput<'_>, Option<Tensor<'_>>),
        handle: &EnqueuedHandle,
        (tokens, weights): (TensorMut<'_>, Option<TensorMut<'_>>),
    ) -> Result<(), Error> {
        self.refuse_capture()?;
        if let Err(foreign) = self.own(handle) {
            return Err(self.refuse(CallKind::DispatchBackward, None, foreign));
        }
        let sums =
            tokens.on_device("token gradients", self.tokens_shape(handle.tokens()), self.stream.device());
        let keeps = of_rows.is_some();
        let checked = self.weights(of_rows, handle, weights.as_ref());
        let summed = Arithmetic::try_from(self.common().fixed.spec.dtype).map_err(Error::from);
        let output = summed.and_then(|_| self.output(rows, handle));
        let unfit = sums.as_ref().err().or(checked.as_ref().err()).cloned();
        let (sums, (of_rows, weights_out)) = (sums.ok(), checked.unwrap_or_default());
        if let (Some(from), Ok(output), None) = (of_rows, &output, &unfit) {
            let copied = self.copy_behind(output, from);
            copied.map_err(|error| self.common().fixed.fail(error))?;
        }
        let options = if keeps { WITH_WEIGHTS } else { 0 };
        let call = self.offer((CallKind::DispatchBackward, options), handle, output.as_ref(), unfit)?;
        self.finish_return(call, sums)?;
        if keeps { self.return_weights(handle, output.as_ref(), weights_out) } else { Ok(()) }
    }

    /// Enqueues that weight gradients of rows lie behind the rows of an output.
    fn copy_behind(&self, output: &EnqueuedOutput, from: &DeviceRange) -> Result<(), Error> {
        let (behind, len) = (output.weights()?, from.len());
        Ok(self.stream.copy(behind.span(0, len)?, from.span(0, len)?)?)
    }

    /// Tensors of weight gradients, of rows and of choices: both or none, unless there are no
    /// choices.
    fn weights<'t>(
        &self,
        of_rows: Option<Tensor<'t>>,
        handle: &EnqueuedHandle,
        of_choices: Option<&'t TensorMut<'_>>,
    ) -> Result<(Option<&'t DeviceRange>, Option<&'t DeviceRange>), Error> {
        let device = self.stream.device();
        let words = |rows: u64| Shape { rows, columns: 1, dtype: Dtype::F32 };
        let of_row = u64::from(self.common().fixed.sizing(CallKind::Combine).return_words);
        let of_all = words(u64::from(handle.rows()) * of_row);
        let rows = of_rows.map(|given| given.on_device("row weight gradients", of_all, device));
        let all = u64::from(handle.tokens()) * u64::from(self.common().fixed.spec.top_k);
        let expected = if of_rows.is_some() { all } else { 0 };
        let choices = of_choices.map(|out| out.on_device("weight gradients", words(expected), device));
        let (rows, choices) = (rows.transpose()?, choices.transpose()?);
        if expected > 0 && choices.is_none() {
            let (what, rows) = ("weight gradients", expected as usize);
            return Err(PlanError::WrongShape { what, seen: 0, rows, columns: 1 }.into());
        }
        Ok((rows, choices))
    }

    /// Enqueues that gradients of token sums go to the rows that were summed. Those of a weighted
    /// combine are multiplied with the weights of the rows, and weight gradients return to
    /// `weights`. Collective.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine_backward_into`](crate::ExpertParallel::combine_backward_into).
    pub fn combine_backward(
        &mut self,
        gradients: Tensor<'_>,
        handle: &EnqueuedHandle,
        weights: Option<TensorMut<'_>>,
    ) -> Result<EnqueuedRows, Error> {
        if !self.common().fixed.spec.weighted {
            return self.cached(CallKind::CombineBackward, gradients, handle);
        }
        let choices = u64::from(handle.tokens()) * u64::from(self.common().fixed.spec.top_k);
        let words = Shape { rows: choices, columns: 1, dtype: Dtype::F32 };
        let weights_out = weights
            .as_ref()
            .map(|weights| weights.on_device("weight gradients", words, self.stream.device()))
            .transpose();
        // Refused before the first of two calls, so the output of the combine is still there.
        let weights_out = match weights_out {
            Ok(weights_out) => weights_out,
            Err(unfit) => return Err(self.refuse(CallKind::CombineBackward, Some(handle), unfit)),
        };
        let rows = self.cached(CallKind::CombineBackward, gradients, handle)?;
        // It stays in the handle: the gradient may be asked for again.
        let (kept, missing) = (handle.kept(), "the output of a weighted combine");
        let lacking = CallError::NotKept { missing }.into();
        let output = kept.as_ref().ok_or(&lacking);
        if let Ok(output) = output {
            self.enqueue_products(output, &rows).map_err(|error| self.common().fixed.fail(error))?;
        }
        self.return_weights(handle, output, weights_out)?;
        Ok(rows)
    }

    /// Enqueues that what lies behind the rows of an output returns to the choices.
    fn return_weights(
        &mut self,
        handle: &EnqueuedHandle,
        output: Result<&EnqueuedOutput, &Error>,
        weights_out: Option<&DeviceRange>,
    ) -> Result<(), Error> {
        let call = self.offer((CallKind::ReturnWeights, 0), handle, output, None)?;
        self.finish_return(call, weights_out)
    }

    /// That gradients of a weighted combine are multiplied with the weights of their rows, after
    /// `<y, g>` was taken of each.
    fn enqueue_products(&self, y: &EnqueuedOutput, gradients: &EnqueuedRows) -> Result<(), Error> {
        let (spec, rows) = (&self.common().fixed.spec, gradients.len());
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
