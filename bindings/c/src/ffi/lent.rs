//! Device memory of the caller: the driver looks its addresses up, and no code here dereferences
//! them.

use std::sync::Arc;

use sidelane::device::{Context, DeviceRange};

use crate::fault::{ArgumentError, Fault};

/// So many bytes of the caller's, in memory that the device reaches.
///
/// # Safety
/// They stay there until everything that is enqueued with the range is done.
pub unsafe fn range(
    context: &Arc<Context>,
    what: &'static str,
    address: usize,
    bytes: u64,
) -> Result<DeviceRange, Fault> {
    match (address, bytes) {
        (0, 1..) => Err(ArgumentError::Null { what }.into()),
        // An empty range may have any address. SAFETY: no bytes.
        (_, 0) => Ok(unsafe { DeviceRange::from_raw(context, what, 0, 0) }?),
        // SAFETY: as the caller promised.
        _ => Ok(unsafe { DeviceRange::from_raw(context, what, address as u64, bytes) }?),
    }
}

/// An address of the device's, as C has it.
pub fn pointer<T>(range: &DeviceRange) -> *mut T {
    std::ptr::without_provenance_mut(range.address() as usize)
}
