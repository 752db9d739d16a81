//! What the caller brings: tensors where its device has them, and the checks of their shapes.

use crate::device::Range;
use crate::ep::builder::Spec;
use crate::error::{DeviceError, Error, PlanError};

/// A rank's tokens, where its device has them.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Rows, `[tokens, hidden]`, at a multiple of 16 bytes.
    pub x: &'a Range,
    /// Chosen experts, `i32 [tokens, top_k]`; -1 is dropped.
    pub experts: &'a Range,
    /// Routing weights, `f32 [tokens, top_k]`.
    pub weights: &'a Range,
}

impl Tokens<'_> {
    /// How many there are: as many as have choices, if all tensors fit these.
    pub(super) fn count(self, spec: &Spec) -> Result<u32, Error> {
        let top_k = spec.top_k as usize;
        let count = self.experts.len() / (top_k as u64 * 4);
        check_tensor("routing", self.experts, count, (top_k, 4), 4)?;
        check_tensor("routing weights", self.weights, count, (top_k, 4), 4)?;
        check_tensor("tokens", self.x, count, (spec.hidden, spec.dtype.size()), 16)?;
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if count > spec.max_tokens {
            return Err(PlanError::TooManyTokens { tokens: count, max: spec.max_tokens }.into());
        }
        Ok(count)
    }
}

/// Checks the shape of a tensor, and that kernels can read it: an address that is a multiple of `align`.
pub(super) fn check_tensor(
    what: &'static str,
    tensor: &Range,
    rows: u64,
    (columns, size): (usize, usize),
    align: u64,
) -> Result<(), Error> {
    if tensor.len() != rows * (columns * size) as u64 {
        let (seen, rows) = (tensor.len() as usize / size, rows as usize);
        return Err(PlanError::WrongShape { what, seen, rows, columns }.into());
    }
    if !tensor.address().is_multiple_of(align) {
        return Err(DeviceError::Misaligned { what, value: tensor.address(), align }.into());
    }
    Ok(())
}
