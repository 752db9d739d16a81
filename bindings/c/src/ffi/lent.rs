//! Tensors in memory of a device: the same structs, whose pointers are looked up by the driver and never followed here.

use std::sync::Arc;

use sidelane::Dtype;
use sidelane::device::{Context, Range};
use sidelane::error::PlanError;

use super::memory::structure;
use super::tensor::{Routing, Tensor, reserved};
use crate::fault::{ArgumentError, Fault};

/// A tensor of the caller's, `[rows, columns]` of this type.
///
/// # Safety
/// `at` is null or points to a tensor, whose memory stays there until everything that is enqueued with it is done.
pub unsafe fn tensor(
    context: &Arc<Context>,
    what: &'static str,
    at: *const Tensor,
    (rows, columns): (u64, u64),
    expected: Dtype,
) -> Result<Range, Fault> {
    // SAFETY: as the caller promised.
    let tensor = unsafe { structure(what, at) }?;
    let (seen, bytes) = tensor.extent(what, rows, columns)?;
    if seen != expected {
        return Err(PlanError::WrongDtype { what, seen, expected }.into());
    }
    // SAFETY: as the caller promised.
    unsafe { range(context, what, tensor.data.addr(), bytes) }
}

/// What a rank sends: its tokens, and where they go.
pub struct Sent {
    pub tokens: u64,
    pub x: Range,
    pub experts: Range,
    pub weights: Range,
}

impl Sent {
    /// # Safety
    /// As [`tensor`], of the tensor and of both arrays of the routing.
    pub unsafe fn read(
        context: &Arc<Context>,
        (x, routing): (*const Tensor, *const Routing),
        (hidden, top_k): (u64, u32),
        dtype: Dtype,
    ) -> Result<Sent, Fault> {
        // SAFETY: as the caller promised.
        let routing = unsafe { structure("routing", routing) }?;
        reserved("reserved field of a routing", routing.reserved)?;
        let (what, rows) = ("routing", routing.tokens);
        if routing.top_k != top_k {
            let (columns, expected_columns) = (routing.top_k.into(), top_k.into());
            return Err(
                ArgumentError::Shape { what, rows, columns, expected_rows: rows, expected_columns }.into()
            );
        }
        let columns = u64::from(top_k);
        let bytes = rows.checked_mul(columns).and_then(|choices| choices.checked_mul(4));
        let bytes = bytes.ok_or(ArgumentError::TooLarge { what, rows, columns })?;
        // SAFETY: as the caller promised.
        unsafe {
            Ok(Sent {
                tokens: rows,
                x: tensor(context, "x", x, (rows, hidden), dtype)?,
                experts: range(context, "routing.experts", routing.experts.addr(), bytes)?,
                weights: range(context, "routing.weights", routing.weights.addr(), bytes)?,
            })
        }
    }
}

/// # Safety
/// As [`tensor`].
unsafe fn range(
    context: &Arc<Context>,
    what: &'static str,
    address: usize,
    bytes: u64,
) -> Result<Range, Fault> {
    match (address, bytes) {
        (0, 1..) => Err(ArgumentError::Null { what }.into()),
        // Where there is nothing, the address means nothing.
        // SAFETY: no bytes.
        (_, 0) => Ok(unsafe { Range::lent(context, what, 0, 0) }?),
        // SAFETY: as the caller promised.
        _ => Ok(unsafe { Range::lent(context, what, address as u64, bytes) }?),
    }
}

/// A byte that no device may touch. As a tensor it is refused, whatever is expected: rows are multiples of 16 bytes.
pub fn nowhere() -> Range {
    // SAFETY: no device reaches it, so no stream takes it.
    unsafe { Range::of_caller(0, 1, &[], Arc::new(())) }
}
