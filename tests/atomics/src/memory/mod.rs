//! The library's pool of memory that others read.

#![allow(unsafe_code, reason = "the pool views memory as slices; no model does")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crate::bootstrap::Health;
use crate::error::MemoryError;

#[path = "../../../../src/memory/pool.rs"]
#[allow(dead_code, reason = "models use a part of the pool")]
mod pool;

pub use pool::{Extent, Pool, ReleaseCheck};

/// A mapping whose bytes nobody touches.
struct PeerMapping {
    len: u64,
}

impl PeerMapping {
    fn len_of(&self, _: u32) -> u64 {
        self.len
    }

    fn at(&self, peer: u32, offset: u64, len: u64) -> Result<NonNull<u8>, MemoryError> {
        Err(MemoryError::OutOfBounds { peer, offset, len, size: 0 })
    }

    fn give_back(&self, _: u32, _: u64, _: u64) -> Result<(), MemoryError> {
        Ok(())
    }
}

mod access {
    pub(super) fn read(_: *const u8, _: u64) {}

    pub(super) fn write(_: *const u8, _: u64) {}
}

/// A pool of so many bytes.
pub fn pool_of(len: u64) -> Arc<Pool> {
    Pool::new(0, Arc::new(PeerMapping { len }), 0, Arc::new(Health), Duration::MAX)
}

/// Gives an extent back once `release` says that its readers have finished.
pub fn retire(pool: &Pool, extent: Extent, release: &Arc<dyn ReleaseCheck>, value: u64) {
    pool.retire(extent, release, value);
}
