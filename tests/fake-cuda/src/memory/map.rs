//! Which addresses mean what: reservations, the regions in them, and which device reaches which.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, RwLock};

use super::backing::Backing;
use crate::code::{Code, Result};

/// The addresses of this process. A copy holds it for reading, so nothing is unmapped under a
/// running copy; a copy that has not run yet finds its memory gone, as on a device.
pub static MAP: RwLock<Map> = RwLock::new(Map { regions: BTreeMap::new(), reserved: BTreeMap::new() });

/// Contents of a region.
#[derive(Clone)]
pub enum Kind {
    /// Mapped by `cuMemMap`, with the devices that were granted access and whether they may write.
    Mapped { backing: Arc<Backing>, access: BTreeMap<usize, bool> },
    /// `cuMemAlloc`: reached by its own device, and by contexts that enabled it as a peer.
    Device(Arc<Backing>),
    /// Pinned by `cuMemHostAlloc`: reached by all devices.
    Pinned,
    /// Registered by `cuMemHostRegister`: reached by all devices.
    Registered,
}

/// Consecutive addresses of one kind.
#[derive(Clone)]
pub struct Region {
    pub bytes: u64,
    pub kind: Kind,
}

pub struct Map {
    pub regions: BTreeMap<u64, Region>,
    /// `cuMemAddressReserve`: start and bytes.
    pub reserved: BTreeMap<u64, u64>,
}

/// How a range can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// All of it, at its addresses.
    Direct,
    /// The driver knows nothing of it: pageable memory of the host, or nothing at all.
    Unknown,
}

/// The accessing device, and the peers that its context enabled.
pub struct Reacher<'a> {
    pub device: usize,
    pub peers: &'a dyn Fn(usize) -> bool,
}

impl Map {
    /// The region that holds an address, with its start.
    pub fn at(&self, address: u64) -> Option<(u64, &Region)> {
        let (&start, region) = self.regions.range(..=address).next_back()?;
        (address - start < region.bytes).then_some((start, region))
    }

    /// Regions that share a byte with the range.
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        let before = self.regions.range(..range.end).next_back();
        !range.is_empty() && before.is_some_and(|(&start, region)| start + region.bytes > range.start)
    }

    /// Starts of the regions that make up the range exactly.
    pub fn exactly(&self, range: &Range<u64>) -> Result<Vec<u64>> {
        let mut found = Vec::new();
        let mut next = range.start;
        while next < range.end {
            let region = self.regions.get(&next).ok_or(Code::INVALID_VALUE)?;
            found.push(next);
            next += region.bytes;
        }
        if next == range.end { Ok(found) } else { Err(Code::INVALID_VALUE) }
    }

    /// Whether the range lies in one reservation.
    pub fn is_reserved(&self, range: &Range<u64>) -> bool {
        let before = self.reserved.range(..=range.start).next_back();
        before.is_some_and(|(&start, &bytes)| range.end <= start + bytes)
    }

    /// Whether a device reaches every byte of the range: one that it does not is an illegal
    /// address.
    pub fn reach(&self, range: Range<u64>, reacher: &Reacher, write: bool) -> Result<Reach> {
        let reserved = self.reserved.range(..range.end).next_back();
        let in_reserved = reserved.is_some_and(|(&start, &bytes)| start + bytes > range.start);
        if !in_reserved && !self.overlaps(&range) {
            return Ok(Reach::Unknown);
        }
        let mut next = range.start;
        while next < range.end {
            let (start, region) = self.at(next).ok_or(Code::ILLEGAL_ADDRESS)?;
            if !region.kind.reached_by(reacher, write) {
                return Err(Code::ILLEGAL_ADDRESS);
            }
            next = start + region.bytes;
        }
        Ok(Reach::Direct)
    }
}

impl Kind {
    fn reached_by(&self, reacher: &Reacher, write: bool) -> bool {
        match self {
            Kind::Mapped { access, .. } => {
                access.get(&reacher.device).is_some_and(|&writes| writes || !write)
            }
            Kind::Device(backing) => backing.device == reacher.device || (reacher.peers)(backing.device),
            Kind::Pinned | Kind::Registered => true,
        }
    }

    /// The allocation that is mapped here.
    pub fn mapped(&self) -> Option<&Arc<Backing>> {
        if let Kind::Mapped { backing, .. } = self { Some(backing) } else { None }
    }

    /// Whether a NIC reaches it: host memory always, device memory on request.
    pub fn is_rdma(&self) -> bool {
        self.backing().is_none_or(|backing| backing.rdma)
    }

    /// The device memory behind it.
    pub fn backing(&self) -> Option<&Arc<Backing>> {
        match self {
            Kind::Mapped { backing, .. } | Kind::Device(backing) => Some(backing),
            Kind::Pinned | Kind::Registered => None,
        }
    }
}

/// The device that owns an address.
pub fn device_of(map: &Map, address: u64) -> Option<usize> {
    map.at(address)?.1.kind.backing().map(|backing| backing.device)
}
