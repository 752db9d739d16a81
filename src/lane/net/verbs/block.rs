//! The registered memory that belongs to one connection.
//!
//! ```text
//!   | granted: written by the peer | the peer's grant | old value of an addition | receives of 64 bytes | staging |
//! ```
//!
//! The grant to the peer only grows, so it needs no staging: a NIC that reads it late reports more.
//!
//! *Staging* is a ring of bytes that were not registered at their source, and of the contents of
//! signals: copied in at the head, free again at the tail when the NIC has read them.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Access, MemoryRegion, ProtectionDomain, Remote, Sge};
use crate::error::{Error, VerbsError};
use crate::lane::FlagLine;
use crate::memory::{PeerMapping, Segment};

/// Bytes of a receive: a record's header.
const RECEIVE: u64 = 64;
const GRANTED: u64 = 0;
const GRANT: u64 = 64;
const OLD: u64 = 128;
const RECEIVES: u64 = 192;
/// Alignment of staged data.
const ALIGN: u64 = 64;

/// The memory of one rail.
pub struct Block {
    region: MemoryRegion,
    receives: u64,
    staging: u64,
    at: NonNull<u8>,
    /// Bytes ever staged, and ever free again.
    head: u64,
    tail: u64,
    _mapped: Arc<PeerMapping>,
}

// SAFETY: the pointer leads into a mapping that the block keeps; it belongs to no thread.
unsafe impl Send for Block {}

impl Block {
    /// Memory for so many receives and staged bytes.
    ///
    /// # Errors
    /// [`MemoryError`](crate::error::MemoryError), [`VerbsError::Register`].
    pub fn new(domain: &Arc<ProtectionDomain>, receives: u64, staging: u64) -> Result<Self, Error> {
        let staging = staging.next_multiple_of(ALIGN);
        let len = RECEIVES + receives * RECEIVE + staging;
        let segment = Segment::create("sidelane-rail", len)?;
        let mapped = Arc::new(PeerMapping::new(&[Some(&segment)])?);
        let at = mapped.at(0, 0, len)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        // SAFETY: `_mapped` is dropped after the region. The peer writes one word, as an atomic.
        // The NIC writes the old value, which is never read, and receives, which are read after
        // their completions only.
        let region = unsafe { MemoryRegion::register(domain, at, len as usize, access) }?;
        Ok(Block { region, receives, staging, at, head: 0, tail: 0, _mapped: mapped })
    }

    /// Where the peer writes how many signals it has taken.
    pub fn granted_at(&self) -> Remote {
        Remote { addr: self.region.base() + GRANTED, rkey: self.region.rkey() }
    }

    /// How many signals the peer has taken.
    pub fn granted(&self) -> u64 {
        // SAFETY: the first line, aligned, used as an atomic word.
        unsafe { FlagLine::new(self.at) }.value()
    }

    /// The grant to the peer: so many of its signals were taken.
    pub fn grant(&self, taken: u64) -> Result<Sge, VerbsError> {
        // SAFETY: the second line of the block, aligned.
        let line = unsafe { FlagLine::new(self.at.add(GRANT as usize)) };
        line.raise(taken, None);
        self.region.sge(GRANT, 8)
    }

    /// Where an addition leaves the old value.
    pub fn old(&self) -> Result<Sge, VerbsError> {
        self.region.sge(OLD, 8)
    }

    /// The memory of a receive.
    pub fn receive(&self, number: u64) -> Result<Sge, VerbsError> {
        self.region.sge(self.receive_at(number), RECEIVE as u32)
    }

    /// Contents of a receive. Its completion must have been seen.
    pub fn received(&self, number: u64) -> [u64; 8] {
        let offset = self.receive_at(number);
        // SAFETY: inside the block, aligned to 8; the NIC writes it before the completion and not
        // again before it is posted.
        unsafe { self.at.as_ptr().add(offset as usize).cast::<[u64; 8]>().read_volatile() }
    }

    fn receive_at(&self, number: u64) -> u64 {
        RECEIVES + number % self.receives * RECEIVE
    }

    /// Room for `len` bytes that lie together: at most half of [`Block::staging`], so that there is
    /// always room once all has been read. `None` if it is not free yet.
    ///
    /// # Errors
    /// [`VerbsError::OutOfRegion`] if it can never be.
    pub fn stage(&mut self, len: u32) -> Result<Option<Staged>, VerbsError> {
        let bytes = Self::staged_bytes(len.into());
        let at = self.head % self.staging;
        let skip = if at + bytes > self.staging { self.staging - at } else { 0 };
        let until = self.head + skip + bytes;
        if until - self.tail > self.staging && bytes <= self.staging {
            return Ok(None);
        }
        let offset = RECEIVES + self.receives * RECEIVE + (self.head + skip) % self.staging;
        let piece = self.region.sge(offset, len)?;
        self.head = until;
        // SAFETY: the piece is inside the block.
        Ok(Some(Staged { at: unsafe { self.at.as_ptr().add(offset as usize) }, piece, until }))
    }

    /// Bytes of the ring that a piece takes.
    pub fn staged_bytes(len: u64) -> u64 {
        len.next_multiple_of(ALIGN)
    }

    /// Bytes of a piece that takes at most `room` bytes of the ring.
    pub fn whole(room: u64) -> u64 {
        room - room % ALIGN
    }

    /// Bytes of the ring.
    pub fn staging(&self) -> u64 {
        self.staging
    }

    /// Bytes up to here have been read by the NIC.
    pub fn staged_until(&mut self, until: u64) {
        self.tail = until;
    }
}

/// Bytes of the ring, to be filled before they are sent.
pub struct Staged {
    /// Where they go.
    pub at: *mut u8,
    /// The piece that is to be sent.
    pub piece: Sge,
    /// Position for [`Block::staged_until`] when they have been read.
    pub until: u64,
}
