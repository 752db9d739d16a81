//! The symmetric part of a heap: control windows and callers' windows.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Extents, PeerMapping};
use crate::error::MemoryError;

/// The allocator of one rank's symmetric bytes. Collective callers take the same sizes in the same
/// order.
#[derive(Debug)]
pub struct SymmetricAllocator {
    rank: u32,
    mapped: Arc<PeerMapping>,
    extents: Mutex<Extents>,
}

impl SymmetricAllocator {
    /// The first `len` bytes of `rank`'s heap.
    pub(super) fn new(rank: u32, mapped: Arc<PeerMapping>, len: u64) -> Arc<Self> {
        Arc::new(SymmetricAllocator { rank, mapped, extents: Mutex::new(Extents::new(len)) })
    }

    /// Allocates `len` bytes with their old contents: a slow peer may still read the previous array
    /// there.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`].
    pub fn take(self: &Arc<Self>, len: u64) -> Result<SymmetricExtent, MemoryError> {
        let mut extents = self.extents.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = extents.alloc(len).map_err(|free| MemoryError::OutOfSpace {
            rank: self.rank,
            asked: len,
            free,
            total: extents.total(),
            space: "symmetric heap",
            setting: "SIDELANE_SYMMETRIC",
        })?;
        drop(extents);
        Ok(SymmetricExtent { space: Arc::clone(self), offset, len })
    }
}

/// Symmetric bytes, given back when dropped.
#[derive(Debug)]
pub struct SymmetricExtent {
    space: Arc<SymmetricAllocator>,
    offset: u64,
    len: u64,
}

impl SymmetricExtent {
    /// First byte, counted from the start of the heap.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Clears the bytes. Every peer must have finished with the previous array here, and no peer
    /// knows the new one yet.
    ///
    /// # Errors
    /// None in practice: the extent lies inside its heap.
    pub fn clear(&mut self) -> Result<(), MemoryError> {
        let at = self.space.mapped.at(self.space.rank, self.offset, self.len)?;
        // SAFETY: our own bytes, checked by `at`, held exclusively.
        unsafe { std::ptr::write_bytes(at.as_ptr(), 0, self.len as usize) };
        Ok(())
    }

    /// The mapping of the heaps.
    pub fn mapped(&self) -> &Arc<PeerMapping> {
        &self.space.mapped
    }
}

impl Drop for SymmetricExtent {
    fn drop(&mut self) {
        self.space.extents.lock().unwrap_or_else(PoisonError::into_inner).free(self.offset, self.len);
    }
}
