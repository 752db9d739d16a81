//! Blocks: registered memory of one connection each.
//!
//! A peer's NIC writes to a block, and this NIC reads it or writes to it without a copy. The blocks
//! of many peers are one registration. None is used twice, because a late write of a former peer
//! could land in it.
//!
//! ```text
//!   granted: written by the peer | the peer's grant | old value of an addition | lines | receives of 64 bytes |
//! ```
//!
//! *Lines* take words and records of signals. They are the connection's own, so a signal never
//! waits for memory that a put to another peer holds.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::staging::Staged;
use super::{Access, Pinned, ProtectionDomain, Remote, Sge};
use crate::error::{Error, VerbsError};
use crate::lane::FlagLine;

/// Lines of a block: the signals that a NIC may have yet to read. As many requests as a doorbell
/// has.
pub const LINES: u64 = 16;
const LINE: u64 = 64;
/// Bytes of a receive: a record's header.
const RECEIVE_BYTES: u64 = 64;
const GRANTED: u64 = 0;
const GRANT: u64 = 64;
const OLD: u64 = 128;
const FIRST_LINE: u64 = 192;
const RECEIVES: u64 = FIRST_LINE + LINES * LINE;
/// Blocks of one registration.
const SLAB: u64 = 64;

/// The blocks of a NIC's connections.
#[derive(Debug)]
pub struct Blocks {
    domain: Arc<ProtectionDomain>,
    receives: u64,
    /// Blocks of one registration.
    slab: u64,
    /// The newest registration, and how many of its blocks are used.
    newest: Mutex<Option<(Arc<Pinned>, u64)>>,
}

impl Blocks {
    /// Blocks with so many receives, for at most so many connections.
    pub fn new(domain: &Arc<ProtectionDomain>, receives: u64, connections: u64) -> Self {
        let slab = connections.clamp(1, SLAB);
        Blocks { domain: Arc::clone(domain), receives, slab, newest: Mutex::default() }
    }

    /// A block that no connection has had.
    ///
    /// # Errors
    /// [`MemoryError`](crate::error::MemoryError), [`VerbsError::Register`].
    pub fn take(&self) -> Result<Block, Error> {
        let len = RECEIVES + self.receives * RECEIVE_BYTES;
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let (memory, used) = match &mut *newest {
            Some((memory, used)) if *used < self.slab => (memory, used),
            full => {
                let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
                let memory = Pinned::new(&self.domain, "sidelane-blocks", self.slab * len, access)?;
                let (memory, used) = full.insert((Arc::new(memory), 0));
                (memory, used)
            }
        };
        *used += 1;
        Ok(Block { memory: Arc::clone(memory), start: (*used - 1) * len, receives: self.receives })
    }
}

/// The block of one connection.
#[derive(Debug)]
pub struct Block {
    memory: Arc<Pinned>,
    /// Its first byte.
    start: u64,
    receives: u64,
}

impl Block {
    /// Where the peer writes how many signals it has taken.
    pub fn granted_at(&self) -> Remote {
        let Pinned { region, .. } = &*self.memory;
        Remote { addr: region.base() + self.start + GRANTED, rkey: region.rkey() }
    }

    /// How many signals the peer has taken.
    pub fn granted(&self) -> u64 {
        self.flag(GRANTED).value()
    }

    /// The grant to the peer: so many of its signals were taken.
    pub fn grant(&self, taken: u64) -> Result<Sge, VerbsError> {
        self.flag(GRANT).raise(taken, None);
        self.piece(GRANT, 8)
    }

    /// Where an addition leaves the old value.
    pub fn old(&self) -> Result<Sge, VerbsError> {
        self.piece(OLD, 8)
    }

    /// A line for `len` bytes.
    pub fn line(&self, number: u64, len: u32) -> Result<Staged, VerbsError> {
        let offset = FIRST_LINE + number % LINES * LINE;
        Ok(Staged { at: self.at(offset).as_ptr(), piece: self.piece(offset, len)?, until: number + 1 })
    }

    /// The memory of a receive.
    pub fn receive(&self, number: u64) -> Result<Sge, VerbsError> {
        self.piece(self.receive_at(number), RECEIVE_BYTES as u32)
    }

    /// Contents of a receive. Its completion must have been seen.
    pub fn received(&self, number: u64) -> [u64; 8] {
        let at = self.at(self.receive_at(number));
        // SAFETY: inside the block, aligned to 8; the NIC writes it before the completion and not
        // again before it is posted.
        unsafe { at.cast::<[u64; 8]>().read_volatile() }
    }

    fn receive_at(&self, number: u64) -> u64 {
        RECEIVES + number % self.receives * RECEIVE_BYTES
    }

    fn piece(&self, offset: u64, len: u32) -> Result<Sge, VerbsError> {
        self.memory.region.sge(self.start + offset, len)
    }

    fn flag(&self, offset: u64) -> FlagLine<'_> {
        // SAFETY: one of the first lines of the block, aligned, used as an atomic word.
        unsafe { FlagLine::new(self.at(offset)) }
    }

    fn at(&self, offset: u64) -> NonNull<u8> {
        // SAFETY: a line of the block, or a receive.
        unsafe { self.memory.at.add((self.start + offset) as usize) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::lane::net::verbs::Settings;
    use crate::lane::net::verbs::fake::Fabric;

    #[test]
    fn blocks_overlap_nowhere_and_are_used_once() {
        let fabric = Fabric::new(&["a"]);
        let nic = fabric.nic("a", &Settings::default());
        let domain = ProtectionDomain::create(&nic.context).unwrap();
        let blocks = Blocks::new(&domain, 2, 1000);
        let mut starts = HashSet::new();
        for _ in 0..2 * SLAB + 1 {
            let block = blocks.take().unwrap();
            let granted = block.granted_at();
            assert!(starts.insert((granted.addr, granted.rkey)), "a former block is used again");
            assert_eq!(block.granted(), 0);
        }
        // Those of the first two registrations are gone.
        assert_eq!(fabric.inventory("a").regions, 1);
        let mut starts: Vec<_> = starts.into_iter().collect();
        starts.sort_unstable_by_key(|&(addr, key)| (key, addr));
        let apart =
            |pair: &[(u64, u32)]| pair[0].1 != pair[1].1 || pair[1].0 - pair[0].0 == RECEIVES + 2 * 64;
        assert!(starts.windows(2).all(apart));
    }
}
