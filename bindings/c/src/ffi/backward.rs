//! Gradients: the transposes of dispatch and combine.

use super::along::along;
use super::combine::Outputs;
use super::give;
use super::memory::{Out, apart, optional, slice_mut};
use super::objects::{Ep, Handle, Output, Rows};
use super::tensor::{self, Source, Tensor, with_element};
use crate::Status;
use crate::fault::ArgumentError;
use crate::handles::{Kind, Seat};
use crate::refuse::Call;

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
    along(
        (ep, handle, Call::DispatchBackward),
        |layer, layout| {
            let tokens = layout.tokens().into();
            // SAFETY: as the caller promised.
            let given = unsafe { Outputs::read("rows", layer.landed(layout), output, rows) }?;
            // SAFETY: as the caller promised.
            let home =
                unsafe { tensor::Target::read("token gradients", token_gradients, tokens, layer.hidden) }?;
            let words = layout.row_weights().len() as u64;
            // SAFETY: as the caller promised.
            let from = unsafe { optional("row weight gradients", row_weight_gradients, words) }?;
            let choices = if from.is_some() { tokens * layer.top_k } else { 0 };
            // SAFETY: as the caller promised.
            let weights = unsafe { slice_mut("weight gradients", weight_gradients, choices) }?;
            given.apart_from("token gradients", home.bytes())?;
            given.apart_from("weight gradients", weights)?;
            apart(("token gradients", home.bytes()), ("weight gradients", weights))?;
            apart(("row weight gradients", from.unwrap_or_default()), ("token gradients", home.bytes()))?;
            apart(("row weight gradients", from.unwrap_or_default()), ("weight gradients", weights))?;
            Ok((given.contribution()?, from, home, weights))
        },
        |ep, layout, (y, from, mut home, weights)| {
            with_element!(home.dtype, E => {
                ep.dispatch_backward_into(y, from, layout, home.elements::<E>(), weights)
            })?;
            Ok(())
        },
    )
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
    along(
        (ep, handle, Call::CombineBackward),
        |layer, layout| {
            let tokens = layout.tokens().into();
            // SAFETY: as the caller promised.
            let (out, gradients) = unsafe {
                (Out::new("rows", rows)?, Source::read("gradients", gradients, tokens, layer.hidden)?)
            };
            if !layer.weighted && !weight_gradients.is_null() {
                let (what, expected) = ("weight_gradients", "NULL: the layer is not weighted");
                let seen = weight_gradients.addr() as u64;
                return Err(ArgumentError::Value { what, seen, expected }.into());
            }
            let choices = if layer.weighted { tokens * layer.top_k } else { 0 };
            // SAFETY: as the caller promised.
            let weights = unsafe { slice_mut("weight gradients", weight_gradients, choices) }?;
            apart(("gradients", gradients.bytes()), ("weight gradients", weights))?;
            Ok((out, gradients, weights))
        },
        |ep, layout, (out, gradients, weights)| {
            let (received, home) =
                with_element!(gradients.dtype, E => ep.combine_backward(gradients.elements::<E>(), layout))?;
            weights.copy_from_slice(&home.unwrap_or_default());
            give(Seat::new(Kind::Rows, received), out)
        },
    )
}
