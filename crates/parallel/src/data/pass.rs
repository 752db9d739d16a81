//! Errors of the caller's code in a pass, and means of sums.

use sidelane::Error;
use sidelane::error::{OverlapError, PlanError};

use super::error::DataError;
use crate::calls;

/// An error of the caller's code or of a graph, as this module reports it.
pub(super) fn reason(said: Option<DataError>, run: OverlapError) -> DataError {
    said.unwrap_or_else(|| DataError::Call(calls::reason(run)))
}

/// Keeps an error of the caller's code for [`reason`], and ends its node.
pub(super) fn keep<T>(said: &mut Option<DataError>, result: Result<T, DataError>) -> Result<T, Error> {
    result.map_err(|error| {
        *said = Some(error);
        PlanError::RefusedHere.into()
    })
}

/// Turns sums of so many addends into means: a division for each, rounded once.
pub(super) fn mean(sums: &mut [f32], addends: u64) {
    let addends = addends as f32;
    sums.iter_mut().for_each(|sum| *sum /= addends);
}

/// Adds element by element.
pub(super) fn add(sums: &mut [f32], addends: &[f32]) {
    sums.iter_mut().zip(addends).for_each(|(sum, addend)| *sum += addend);
}
