//! Choices that were recorded, in place of those that would be made.

use crate::error::GateError;

/// Checks the recorded choices of one token.
pub(super) fn check(token: u32, ids: &[i32], experts: u32) -> Result<(), GateError> {
    for (k, &expert) in ids.iter().enumerate() {
        let known = expert == -1 || u32::try_from(expert).is_ok_and(|id| id < experts);
        if !known || expert >= 0 && ids[..k].contains(&expert) {
            return Err(GateError::BadReplay { token, k: k as u32, expert, experts });
        }
    }
    Ok(())
}
