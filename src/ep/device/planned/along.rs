//! Calls along a handle that bring rows: dispatches along its layout, and the gradients.

use std::sync::atomic::Ordering;

use super::exchange::PlannedExchange;
use super::handle::{PlannedHandle, PlannedOutput, PlannedRows};
use super::space::Extent;
use crate::device::{DeviceRange, Kernels};
use crate::dtype::Dtype;
use crate::ep::CombineInput;
use crate::ep::tensor::{Shape, Tensor, TensorMut};
use crate::error::{CallError, CallKind, Error, PlanError};

/// Option of a gradient of dispatch: weight gradients return behind it.
const WITH_WEIGHTS: u32 = 1;

impl PlannedExchange {
    /// Enqueues that rows go along the layout of a handle, and that they come. Collective.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch_cached`](crate::ExpertParallel::dispatch_cached).
    pub fn cached(
        &mut self,
        kind: CallKind,
        x: Tensor<'_>,
        handle: &PlannedHandle,
    ) -> Result<PlannedRows, Error> {
        self.refuse_capture()?;
        if let Err(foreign) = self.own(handle) {
            return Err(self.refuse(kind, None, foreign));
        }
        let dtype = x.dtype();
        let shape = Shape::brought(&self.common.fixed.spec, kind, handle.tokens(), dtype);
        let x = x.on_device("tokens", shape, self.stream.device()).map(|x| (x, dtype));
        let extent = self.along((kind, handle.seat()), handle.tokens(), x)?;
        let (common, place) = (&self.common, (handle.seat(), extent.offset(), handle.rows()));
        if common.shape.arrives() {
            let regrouped = common.regroup(&self.stream, &self.kernels, kind, place);
            regrouped.map_err(|error| common.fixed.fail(error))?;
        }
        PlannedRows::new(handle.lease(), (kind, handle.rows()), extent)
    }

    /// Makes a call of this kind along the layout of a seat: where rows land.
    pub(super) fn along(
        &mut self,
        (kind, seat): (CallKind, u32),
        tokens: u32,
        x: Result<(&DeviceRange, Dtype), Error>,
    ) -> Result<Extent, Error> {
        self.common.fixed.shared.hub.health().check()?;
        let (x, refused) = x.map_or_else(|error| (None, Some(error)), |x| (Some(x), None));
        self.common.space.count();
        let fail = |error| self.common.fixed.fail(error);
        let x = x.filter(|_| tokens > 0);
        let lies = x.filter(|&x| self.common.lie_here(kind, x).is_some() && self.may_lie(seat));
        if let (Some((x, dtype)), None) = (x, lies) {
            let packed = self.common.pack(&self.stream, &self.kernels, (kind, seat), (tokens, x, dtype));
            packed.map_err(fail)?;
        }
        self.enqueue_reached(seat, 0).map_err(fail)?;
        let machine = self.start(kind, seat)?;
        let x = lies.map(|(x, dtype)| (x.clone(), dtype));
        let landed = self.enqueuer.cached(&self.programs, machine, (kind, seat), (x, refused));
        self.common.served.fetch_add(1, Ordering::Relaxed);
        landed.map_err(|error| self.common.fixed.fail(error))?
    }

    /// Whether tokens may be sent along the layout of a seat as they lie.
    fn may_lie(&self, seat: u32) -> bool {
        self.enqueuer.kept[seat as usize].in_place.is_some()
    }

    /// Enqueues that gradients of rows return and their sums go to `tokens`; with `of_rows`, one
    /// gradient for the weight of each row, those return, too, to `weights`. Collective.
    ///
    /// # Errors
    /// As
    /// [`ExpertParallel::dispatch_backward_into`](crate::ExpertParallel::dispatch_backward_into).
    pub fn dispatch_backward(
        &mut self,
        (rows, of_rows): (CombineInput<'_>, Option<Tensor<'_>>),
        handle: &PlannedHandle,
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
        let output = Kernels::sum_choices_names(self.common.fixed.spec.dtype)
            .map_err(Error::from)
            .and_then(|_| self.output(rows, handle));
        let unfit = sums.as_ref().err().or(checked.as_ref().err()).cloned();
        let (sums, (of_rows, home)) = (sums.ok(), checked.unwrap_or_default());
        if let (Some(from), Ok(output), None) = (of_rows, &output, &unfit) {
            let behind = output.weights()?;
            self.stream.copy(behind.span(0, from.len())?, from.span(0, from.len())?)?;
        }
        let options = if keeps { WITH_WEIGHTS } else { 0 };
        let call = self.offer((CallKind::DispatchBackward, options), handle, output.as_ref(), unfit)?;
        self.finish_return(call, sums)?;
        if keeps { self.weights_home(handle, output.as_ref(), home) } else { Ok(()) }
    }

    /// Tensors of weight gradients, of rows and of choices: both or none, unless there are no
    /// choices.
    fn weights<'t>(
        &self,
        of_rows: Option<Tensor<'t>>,
        handle: &PlannedHandle,
        of_choices: Option<&'t TensorMut<'_>>,
    ) -> Result<(Option<&'t DeviceRange>, Option<&'t DeviceRange>), Error> {
        let device = self.stream.device();
        let words = |rows: u64| Shape { rows, columns: 1, dtype: Dtype::F32 };
        let of_row = u64::from(self.common.fixed.sizing(CallKind::Combine).words_home);
        let of_all = words(u64::from(handle.rows()) * of_row);
        let rows = of_rows.map(|given| given.on_device("row weight gradients", of_all, device));
        let all = u64::from(handle.tokens()) * u64::from(self.common.fixed.spec.top_k);
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
        handle: &PlannedHandle,
        weights: Option<TensorMut<'_>>,
    ) -> Result<PlannedRows, Error> {
        if !self.common.fixed.spec.weighted {
            return self.cached(CallKind::CombineBackward, gradients, handle);
        }
        let choices = u64::from(handle.tokens()) * u64::from(self.common.fixed.spec.top_k);
        let words = Shape { rows: choices, columns: 1, dtype: Dtype::F32 };
        let home = weights
            .as_ref()
            .map(|weights| weights.on_device("weight gradients", words, self.stream.device()))
            .transpose();
        // Refused before the first of two calls, so the output of the combine is still there.
        let home = match home {
            Ok(home) => home,
            Err(unfit) => return Err(self.refuse(CallKind::CombineBackward, Some(handle), unfit)),
        };
        let rows = self.cached(CallKind::CombineBackward, gradients, handle)?;
        // It stays in the handle: the gradient may be asked for again.
        let (kept, missing) = (handle.kept(), "the output of a weighted combine");
        let lacking = CallError::NotKept { missing }.into();
        let output = kept.as_ref().ok_or(&lacking);
        if let Ok(output) = output {
            self.enqueue_products(output, &rows).map_err(|error| self.common.fixed.fail(error))?;
        }
        self.weights_home(handle, output, home)?;
        Ok(rows)
    }

    /// Enqueues that what lies behind the rows of an output returns to the choices.
    fn weights_home(
        &mut self,
        handle: &PlannedHandle,
        output: Result<&PlannedOutput, &Error>,
        home: Option<&DeviceRange>,
    ) -> Result<(), Error> {
        let call = self.offer((CallKind::ReturnWeights, 0), handle, output, None)?;
        self.finish_return(call, home)
    }
}
