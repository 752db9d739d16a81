//! Windows: one range of bytes at each rank of a group.

use std::ptr::NonNull;
use std::sync::Arc;

use super::net::RemoteAddress;
use crate::error::MemoryError;
use crate::memory::PeerMapping;

/// A window: one range of bytes at each rank of the group.
#[derive(Clone, Debug)]
pub struct MappedWindow {
    /// The mapping of this node's windows; an empty one for memory of devices.
    pub mapped: Arc<PeerMapping>,
    /// Per rank of the group: where its part is.
    pub parts: Vec<WindowPart>,
    /// It is device memory: NICs access it, the processor does not.
    pub of_devices: bool,
}

/// One rank's part of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPart {
    /// Its member of the mapping.
    pub member: u32,
    /// Number of the region at its owner, for peers that have it not mapped.
    pub region: u32,
    /// First byte in the member or region.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl MappedWindow {
    /// Address of bytes in the part of a rank whose memory is mapped here.
    pub(super) fn at(&self, rank: u32, offset: u64, len: u64) -> Result<NonNull<u8>, MemoryError> {
        let part = self.part(rank, offset, len)?;
        self.mapped.at(part.member, part.offset + offset, len)
    }

    /// All bytes of the part of a rank of this node.
    pub(super) fn bytes(&self, rank: u32) -> Result<&[u8], MemoryError> {
        let len = self.part(rank, 0, 0)?.len;
        let at = self.at(rank, 0, len)?;
        // SAFETY: mapped and checked; as of `Port::source`.
        Ok(unsafe { std::slice::from_raw_parts(at.as_ptr(), len as usize) })
    }

    /// Facts that a connection needs to reach bytes in the part of a rank.
    pub(super) fn target(&self, rank: u32, offset: u64, len: u64) -> Result<RemoteAddress, MemoryError> {
        let part = self.part(rank, offset, len)?;
        Ok(RemoteAddress { region: part.region, offset: part.offset + offset })
    }

    /// The part of a rank, if the bytes lie inside it.
    #[inline]
    pub(super) fn part(&self, rank: u32, offset: u64, len: u64) -> Result<&WindowPart, MemoryError> {
        let part = self.parts.get(rank as usize);
        let size = part.map_or(0, |p| p.len);
        match part {
            Some(part) if offset.checked_add(len).is_some_and(|end| end <= size) => Ok(part),
            _ => Err(MemoryError::OutOfBounds { peer: rank, offset, len, size }),
        }
    }
}
