//! Mapped segments that GPUs see, too.

use std::ptr::NonNull;
use std::sync::Arc;

use super::PeerMapping;
use crate::device::{Context, PinnedMemory};
use crate::error::Error;

/// Pins the whole segment of a member, and holds the mapping as long as there are claims on it. All
/// processes that map the segment access it by atomics alone or, as a port does, between two
/// signals: the device has written, and may write again.
///
/// # Errors
/// [`DeviceError`](crate::error::DeviceError) if it cannot be pinned.
pub fn pin(context: &Arc<Context>, mapped: &Arc<PeerMapping>, member: u32) -> Result<PinnedMemory, Error> {
    let len = mapped.len_of(member);
    let at: NonNull<u8> = mapped.at(member, 0, len)?;
    // SAFETY: checked by `at`, and mapped as long as the value that is kept; ports refer to bytes
    // of it only while, by signals and write grants, no device writes them.
    Ok(unsafe { PinnedMemory::register(context, at, len as usize, mapped.clone()) }?)
}
