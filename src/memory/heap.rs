//! The heap of a rank and those of its local peers.

use std::sync::Arc;
use std::time::Duration;

use super::{PageReport, PeerMapping, Pool, Segment, SymmetricAllocator, shared_huge_bytes};
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
