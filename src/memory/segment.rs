//! Sealed shared memory: a memfd that no process can shrink while others map it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::error::MemoryError;

/// A sealed memfd of fixed size.
#[derive(Debug)]
pub struct Segment {
    fd: OwnedFd,
    len: u64,
}

impl Segment {
    /// Creates `len` bytes of zeroed shared memory, sealed against resizing. No page is touched
    /// yet.
    ///
    /// # Errors
    /// [`MemoryError::System`] with the call that failed.
    pub fn create(name: &str, len: u64) -> Result<Self, MemoryError> {
        let failed = |call| {
            move |e: rustix::io::Errno| MemoryError::System { call, bytes: len, errno: e.raw_os_error() }
        };
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&fd, len).map_err(failed("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("fcntl(F_ADD_SEALS)"))?;
        Ok(Segment { fd, len })
    }

    /// Takes a descriptor that came from `rank`, or from a caller: it must be sealed against
    /// shrinking, or a later access could fault.
    ///
    /// # Errors
    /// [`MemoryError::NotSealed`], [`MemoryError::System`] if it is no memfd.
    pub fn adopt(fd: OwnedFd, rank: u32) -> Result<Self, MemoryError> {
        let failed = |call| {
            move |e: rustix::io::Errno| MemoryError::System { call, bytes: 0, errno: e.raw_os_error() }
        };
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(failed("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(MemoryError::NotSealed { rank, missing: "shrinking (F_SEAL_SHRINK)" });
        }
        let len = rustix::fs::fstat(&fd).map_err(failed("fstat"))?.st_size as u64;
        Ok(Segment { fd, len })
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_cannot_be_resized() {
        let segment = Segment::create("sidelane-test", 8192).unwrap();
        assert!(rustix::fs::ftruncate(&segment, 4096).is_err());
        assert!(rustix::fs::ftruncate(&segment, 16384).is_err());
    }

    #[test]
    fn an_unsealed_descriptor_is_refused() {
        let fd = rustix::fs::memfd_create("sidelane-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .unwrap();
        assert!(matches!(Segment::adopt(fd, 3), Err(MemoryError::NotSealed { rank: 3, .. })));
    }
}
