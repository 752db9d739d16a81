//! Gradients: the transposes of dispatch and combine.

use sidelane::error::CallKind;

use super::along::along;
use super::combine::Outputs;
use super::memory::{Out, addresses, apart, optional, slice_mut};
use super::objects::{Ep, Handle, Output, Rows};
use super::tensor::{Source, Target, Tensor};
use super::{border, give};
use crate::Status;
use crate::fault::ArgumentError;
use crate::handles::{ExclusiveCell, Kind};

/// Gradient of dispatch: sums row gradients to their tokens, [tokens, hidden]. Collective.
///
/// Row gradients are `output` or `rows`, as for sidelane_ep_combine(). With `row_weight_gradients` (one per received row or,
/// rank-major, per row and choice: as many as `row_weights` of the handle) those come home, too: `weight_gradients` is
/// [tokens, top_k], 0 for dropped choices. Without, both are NULL.
///
/// The caller's word: as sidelane_ep_combine().
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
                let given = unsafe { Outputs::read(context, "rows", layer.landed(layout), (output, rows)) }?;
                let shape = (tokens, layer.hidden);
                // SAFETY: as the caller promised.
                let home = unsafe { Target::read(context, "token gradients", token_gradients, shape) }?;
                let words = layout.row_weights().len() as u64;
                // SAFETY: as the caller promised.
                let from = unsafe { optional("row weight gradients", row_weight_gradients, words) }?;
                let choices = if from.is_some() { tokens * layer.top_k } else { 0 };
                // SAFETY: as the caller promised.
                let weights = unsafe { slice_mut("weight gradients", weight_gradients, choices) }?;
                let rows_written = ("token gradients", home.addresses());
                let weights_written = ("weight gradients", addresses(weights));
                let weights_read = ("row weight gradients", addresses(from.unwrap_or_default()));
                given.apart_from(rows_written.clone())?;
                given.apart_from(weights_written.clone())?;
                apart(rows_written.clone(), weights_written.clone())?;
                apart(weights_read.clone(), rows_written)?;
                apart(weights_read, weights_written)?;
                Ok((given.used()?, from, home, weights))
            },
            |ep, layout, (given, from, mut home, weights)| {
                let weights = from.is_some().then(|| weights.into());
                let from = from.map(Into::into);
                Ok(given.with(|y| ep.dispatch_backward_into(y, from, layout, home.lend(), weights))?)
            },
        )
    })
}

/// Gradient of combine: brings token gradients, [tokens, hidden], to the rows that were summed. Collective.
///
/// If the layer is weighted, rows are multiplied with their weight, and `weight_gradients`, [tokens, top_k], gets the
/// gradients of the weights; otherwise it is NULL.
///
/// The caller's word: as sidelane_ep_combine().
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
                let choices = if layer.weighted { tokens * layer.top_k } else { 0 };
                // SAFETY: as the caller promised.
                let weights = unsafe { slice_mut("weight gradients", weight_gradients, choices) }?;
                apart(("gradients", gradients.addresses()), ("weight gradients", addresses(weights)))?;
                Ok((out, gradients, layer.weighted.then_some(weights)))
            },
            |ep, layout, (out, gradients, weights)| {
                let weights = weights.map(Into::into);
                let received = ep.combine_backward_into(gradients.lend(), layout, weights)?;
                give(ExclusiveCell::new(Kind::Rows, received), out)
            },
        )
    })
}
