//! Gradients: the transposes of dispatch and combine.

use sidelane::error::CallKind;

use super::combine::Outputs;
use super::handle_calls::along;
use super::memory::{Out, apart};
use super::objects::{Ep, Handle, Output, Rows};
use super::tensor::{Source, Target, Tensor};
use super::{border, give};
use crate::Status;
use crate::fault::ArgumentError;
use crate::handles::{ExclusiveCell, Kind};

/// Gradient of dispatch: sums row gradients to their tokens, [tokens, hidden]. Collective.
///
/// Row gradients are `output` or `rows`, as for sidelane_ep_combine(). With `row_weight_gradients`
/// (one per received row or, rank-major, per row and choice: as many as `row_weights` of the
/// handle) those return, too: `weight_gradients` is [tokens, top_k], 0 for dropped choices. Without
/// them, both are NULL. On a device both are device addresses, at multiples of 16 bytes.
///
/// The caller guarantees: as sidelane_ep_combine().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_dispatch_backward(
    ep: *mut Ep,
    output: *mut Output,
    rows: *const Tensor,
    row_weight_gradients: *const f32,
    handle: *mut Handle,
    token_gradients: *const Tensor,
    weight_gradients: *mut f32,
) -> Status {
    let call = (ep, handle, CallKind::DispatchBackward);
    border(|| {
        along(
            call,
            |layer, layout| {
                let (context, tokens) = (layer.context.as_ref(), layout.tokens().into());
                // SAFETY: as the caller promised.
                let brought =
                    unsafe { Outputs::read(context, "rows", layer.landed(layout), (output, rows)) }?;
                let shape = (tokens, layer.hidden);
                // SAFETY: as the caller promised.
                let returned = unsafe { Target::read(context, "token gradients", token_gradients, shape) }?;
                let words = match context {
                    None => layout.row_weights().len() as u64,
                    Some(_) => u64::from(layout.rows()) * layer.numbers,
                };
                let given = |at| Tensor::numbers(at, words, context.is_some());
                let numbers = (!row_weight_gradients.is_null()).then(|| given(row_weight_gradients));
                // SAFETY: as the caller promised.
                let read = |numbers: Tensor| unsafe {
                    Source::read(context, "row weight gradients", &numbers, (Some(words), 1))
                };
                let from = numbers.map(read).transpose()?;
                let choices = tokens * layer.top_k;
                let to =
                    from.is_some().then(|| Tensor::numbers(weight_gradients, choices, context.is_some()));
                // SAFETY: as the caller promised.
                let write = |numbers: Tensor| unsafe {
                    Target::read(context, "weight gradients", &numbers, (choices, 1))
                };
                let weights = to.map(write).transpose()?;
                let rows_written = ("token gradients", returned.addresses());
                let weights_written = ("weight gradients", weights.as_ref().map_or(0..0, Target::addresses));
                let weights_read = ("row weight gradients", from.as_ref().map_or(0..0, Source::addresses));
                brought.apart_from(rows_written.clone())?;
                brought.apart_from(weights_written.clone())?;
                apart(rows_written.clone(), weights_written.clone())?;
                apart(weights_read.clone(), rows_written)?;
                apart(weights_read, weights_written)?;
                Ok((brought.used()?, from, returned, weights))
            },
            |ep, layout, (given, from, mut returned, mut weights)| {
                let (from, weights) = (from.as_ref().map(Source::lend), weights.as_mut().map(Target::lend));
                Ok(given.with(|y| ep.dispatch_backward_into(y, from, layout, returned.lend(), weights))?)
            },
        )
    })
}

/// Gradient of combine: brings token gradients, [tokens, hidden], to the rows that were summed.
/// Collective.
///
/// If the layer is weighted, rows are multiplied with their weight, and `weight_gradients`,
/// [tokens, top_k], gets the gradients of the weights; otherwise it is NULL. On a device it is a
/// device address, at a multiple of 16 bytes.
///
/// The caller guarantees: as sidelane_ep_combine().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_combine_backward(
    ep: *mut Ep,
    gradients: *const Tensor,
    handle: *mut Handle,
    rows: *mut *mut Rows,
    weight_gradients: *mut f32,
) -> Status {
    let call = (ep, handle, CallKind::CombineBackward);
    border(|| {
        along(
            call,
            |layer, layout| {
                let tokens = layout.tokens().into();
                // SAFETY: as the caller promised.
                let (out, gradients) = unsafe {
                    let shape = (Some(tokens), layer.hidden);
                    let out = Out::new("rows", rows)?;
                    (out, Source::read(layer.context.as_ref(), "gradients", gradients, shape)?)
                };
                if !layer.weighted && !weight_gradients.is_null() {
                    let (what, expected) = ("weight_gradients", "NULL: the layer is not weighted");
                    let seen = weight_gradients.addr() as u64;
                    return Err(ArgumentError::Value { what, seen, expected }.into());
                }
                let (context, choices) = (layer.context.as_ref(), tokens * layer.top_k);
                let to =
                    layer.weighted.then(|| Tensor::numbers(weight_gradients, choices, context.is_some()));
                // SAFETY: as the caller promised.
                let write = |numbers: Tensor| unsafe {
                    Target::read(context, "weight gradients", &numbers, (choices, 1))
                };
                let weights = to.map(write).transpose()?;
                let written = weights.as_ref().map_or(0..0, Target::addresses);
                apart(("gradients", gradients.addresses()), ("weight gradients", written))?;
                Ok((out, gradients, weights))
            },
            |ep, layout, (out, gradients, mut weights)| {
                let weights = weights.as_mut().map(Target::lend);
                let received = ep.combine_backward_into(gradients.lend(), layout, weights)?;
                give(ExclusiveCell::new(Kind::Rows, received), out)
            },
        )
    })
}
