//! Addresses of local peers' windows: one look-up from (window, rank) to an address.
//!
//! A put of a few bytes takes less time than a cache line from core to core, so its path has only
//! this table, made once, in place of those of the group, the window and its mapping.

use std::ptr::NonNull;

use super::{Lanes, MappedWindow, PeerLane};
use crate::schedule::WindowId;

/// The parts of windows that this rank reads and writes by loads and stores: its own, and its local
/// peers'.
#[derive(Debug)]
pub(super) struct LocalWindows {
    ranks: u32,
    /// Per window and rank: its part, unless that is out of reach.
    parts: Vec<Option<Reached>>,
}

/// Bytes that are mapped here.
#[derive(Clone, Copy, Debug)]
struct Reached {
    first: NonNull<u8>,
    len: u64,
}

// SAFETY: addresses of plain shared memory, which belongs to no thread; its readers and writers
// guarantee the order.
unsafe impl Send for LocalWindows {}
// SAFETY: as above: a shared reference only hands out addresses.
unsafe impl Sync for LocalWindows {}

impl LocalWindows {
    /// Addresses in the mappings of these windows, good for as long as those live.
    pub fn new(lanes: &Lanes, windows: &[MappedWindow]) -> Self {
        let mut parts = Vec::new();
        for window in windows {
            parts.extend((0..).zip(&lanes.reach).map(|(rank, reach)| match reach {
                PeerLane::Own | PeerLane::Load => {
                    let len = window.parts.get(rank as usize)?.len;
                    Some(Reached { first: window.at(rank, 0, len).ok()?, len })
                }
                PeerLane::Rail(_) | PeerLane::Relayed => None,
            }));
        }
        LocalWindows { ranks: lanes.ranks(), parts }
    }

    /// Number of ranks.
    #[inline(always)]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Address of bytes in a rank's part of a window, if they lie inside it and it is reached by
    /// loads and stores.
    #[inline(always)]
    pub fn at(&self, window: WindowId, rank: u32, offset: u64, len: u64) -> Option<NonNull<u8>> {
        let nth = window.0 as usize * self.ranks as usize + rank as usize;
        let part = (*self.parts.get(nth)?).filter(|_| rank < self.ranks)?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= part.len);
        // SAFETY: within the part, whose bytes the mapping has.
        inside.then(|| unsafe { part.first.add(offset as usize) })
    }

    /// Owner, window and offset of bytes at an address, if they lie in a part that is reached by
    /// loads and stores.
    #[cfg(test)]
    pub fn locate(&self, at: usize, len: u64) -> Option<(u32, WindowId, u64)> {
        self.parts.iter().enumerate().find_map(|(nth, part)| {
            let offset = at.checked_sub((*part)?.first.as_ptr() as usize)? as u64;
            let (window, owner) = (nth as u32 / self.ranks, nth as u32 % self.ranks);
            (offset + len <= (*part)?.len).then_some((owner, WindowId(window), offset))
        })
    }
}
