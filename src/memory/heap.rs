//! The heap of a rank and those of its local peers, and the allocator of its symmetric part.
//!
//! ```text
//!   heap   | symmetric: control windows, callers' windows | pool |
//!          SymmetricAllocator: same calls in the same order, so same offsets at all ranks
//! ```

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Extents, PageReport, PeerMapping, Pool, Segment, shared_huge_bytes};
use crate::bootstrap::Health;
use crate::error::MemoryError;

/// How a heap is divided. Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapSizes {
    /// Symmetric part: control windows and callers' windows (`SIDELANE_SYMMETRIC`).
    pub symmetric: u64,
    /// The whole heap; the part that is not symmetric is the pool (`SIDELANE_HEAP`).
    pub total: u64,
}

/// One rank's heap, with the heaps of its node mapped next to it.
#[derive(Debug)]
pub struct Heap {
    rank: u32,
    mapped: Arc<PeerMapping>,
    boundary: u64,
    symmetric: Arc<SymmetricAllocator>,
    pool: Arc<Pool>,
}

impl Heap {
    /// Maps the heaps of all ranks that are present (`segments`, by rank) and touches this rank's
    /// own, so that no call pays for first page faults.
    ///
    /// # Errors
    /// [`MemoryError::System`], [`MemoryError::WrongSize`] if a local peer's segment is not
    /// `sizes.total` long.
    pub(crate) fn new(
        rank: u32,
        sizes: HeapSizes,
        segments: &[Option<Segment>],
        health: &Arc<Health>,
        deadline: Duration,
    ) -> Result<Self, MemoryError> {
        for (peer, segment) in segments.iter().enumerate() {
            if let Some(seen) = segment.as_ref().map(Segment::len).filter(|&len| len != sizes.total) {
                return Err(MemoryError::WrongSize { rank: peer as u32, seen, expected: sizes.total });
            }
        }
        let present: Vec<Option<&Segment>> = segments.iter().map(Option::as_ref).collect();
        let mapped = Arc::new(PeerMapping::new(&present)?);
        mapped.populate(rank, 0, sizes.total)?;
        let boundary = sizes.symmetric.next_multiple_of(4096).min(sizes.total);
        let pool = Pool::new(rank, Arc::clone(&mapped), boundary, Arc::clone(health), deadline);
        let symmetric = SymmetricAllocator::new(rank, Arc::clone(&mapped), boundary);
        Ok(Heap { rank, mapped, boundary, symmetric, pool })
    }

    /// Touches the beginning of a local peer's pool, `bytes` of it or the whole, where extents are
    /// allocated first. Its owner has touched the memory, so the pages lie near the owner, and this
    /// call only maps them. No-op for ranks of other nodes.
    ///
    /// # Errors
    /// [`MemoryError::System`].
    pub(crate) fn touch(&self, rank: u32, bytes: u64) -> Result<(), MemoryError> {
        let there = self.mapped.len_of(rank).saturating_sub(self.boundary);
        match there.min(bytes) {
            0 => Ok(()),
            bytes => self.mapped.populate(rank, self.boundary, bytes),
        }
    }

    /// The mapping of all reachable heaps, by rank.
    pub fn mapped(&self) -> &Arc<PeerMapping> {
        &self.mapped
    }

    /// Bytes of the symmetric part; the pool begins behind it.
    pub fn boundary(&self) -> u64 {
        self.boundary
    }

    /// This rank's receive pool.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// This rank's symmetric part.
    pub fn symmetric(&self) -> &Arc<SymmetricAllocator> {
        &self.symmetric
    }

    /// The pages that the kernel granted for this process's shared memory.
    pub fn pages(&self) -> PageReport {
        PageReport { bytes: self.mapped.len_of(self.rank), huge: shared_huge_bytes() }
    }
}

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
    fn new(rank: u32, mapped: Arc<PeerMapping>, len: u64) -> Arc<Self> {
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
        // SAFETY: our own bytes, checked by `at`, held exclusively. Peers map them, too: they have
        // finished with the old array and do not know the new one, as the contract above says.
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
