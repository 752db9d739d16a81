//! Mapped segments that GPUs see, too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::{PeerMapping, Segment};
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

/// Pinned memory of the host that several processes share: a sealed file, which each of them pins
/// for its own devices.
#[derive(Debug)]
pub struct SharedPinned {
    file: Segment,
    memory: PinnedMemory,
}

impl SharedPinned {
    /// New memory of at least `bytes` bytes, zeroed.
    ///
    /// # Errors
    /// [`MemoryError`](crate::error::MemoryError), or [`DeviceError`](crate::error::DeviceError) if
    /// it cannot be pinned.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, Error> {
        let page = rustix::param::page_size() as u64;
        Self::pin(context, Segment::create("sidelane-pinned", bytes.max(1).next_multiple_of(page))?)
    }

    /// What another process has made, by its descriptor.
    ///
    /// # Errors
    /// [`MemoryError::NotSealed`](crate::error::MemoryError::NotSealed) for a file that could
    /// shrink; otherwise as [`SharedPinned::new`].
    pub fn adopt(context: &Arc<Context>, descriptor: OwnedFd) -> Result<Self, Error> {
        Self::pin(context, Segment::adopt(descriptor, 0)?)
    }

    fn pin(context: &Arc<Context>, file: Segment) -> Result<Self, Error> {
        let mapped = Arc::new(PeerMapping::new(&[Some(&file)])?);
        Ok(SharedPinned { memory: pin(context, &mapped, 0)?, file })
    }

    /// The memory, as this process and its devices see it.
    pub fn memory(&self) -> &PinnedMemory {
        &self.memory
    }
}

/// The descriptor that another process adopts, passed to it over a socket.
impl AsFd for SharedPinned {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
