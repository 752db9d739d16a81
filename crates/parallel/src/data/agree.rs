//! What ranks must have alike, and verdicts of all of them.

use sidelane::collective::Communicator;
use sidelane::digest::Digest;
use sidelane::error::CallKind;

use super::error::DataError;
use crate::calls::Calls;
use crate::check::alike;

/// A digest of numbers, which ranks compare.
pub(super) fn digest(numbers: impl IntoIterator<Item = u64>) -> u64 {
    Digest::of(numbers.into_iter().flat_map(u64::to_le_bytes))
}

/// Compares settings between all ranks. A rank whose own cannot be used says so to the others.
pub(super) fn agree(
    group: &mut Communicator,
    settings: Result<Vec<(&'static str, u64)>, DataError>,
) -> Result<(), DataError> {
    match settings {
        Ok(settings) => Ok(alike(group, &settings)?),
        Err(error) => Err(Calls::new(group, vec![CallKind::AllGather]).refuse(error)),
    }
}
