//! A NIC that a rank uses, and the memory that is registered with it.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use super::ffi::ibv_sge;
use super::keys::LocalRegion;
use super::nic::Nic as CardRail;
use super::{Access, MemoryRegion, ProtectionDomain, Sge};
use crate::error::{Error, VerbsError};
use crate::lane::net::Region;
use crate::memory::{PeerMapping, Segment};

/// Zeros that are sent as one piece.
pub const ZEROS: u64 = 64 << 10;

/// One NIC of a rank.
#[derive(Debug)]
pub struct Device {
    /// The NIC, its port and its address.
    pub card: CardRail,
    /// Limits of its queue pairs.
    pub domain: Arc<ProtectionDomain>,
    /// Registered regions by number.
    regions: RwLock<HashMap<u32, Registered>>,
    zeros: MemoryRegion,
    _zeros: Arc<PeerMapping>,
}

/// A region: this rank's part, which peers may write to, and what else of it is mapped here, which
/// may be sent.
#[derive(Debug)]
pub struct Registered {
    rank: u32,
    own: LocalRegion,
    neighbours: Vec<(u32, MemoryRegion)>,
    _memory: Arc<dyn Any + Send + Sync>,
}

impl Registered {
    /// `rank`'s own part, and those of local peers; the memory stays as long as this.
    pub fn new(
        rank: u32,
        own: LocalRegion,
        neighbours: Vec<(u32, MemoryRegion)>,
        memory: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Registered { rank, own, neighbours, _memory: memory }
    }
}

/// Registered bytes of this process.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    address: u64,
    len: usize,
    lkey: u32,
}

impl Source {
    /// A piece of them.
    pub fn piece(&self, offset: usize, len: usize) -> Sge {
        debug_assert!(offset + len <= self.len);
        // The NIC refuses addresses outside the region.
        Sge(ibv_sge { addr: self.address + offset as u64, length: len as u32, lkey: self.lkey })
    }
}

/// How peers may use a region: the first bytes are strictly ordered, the others may be relaxed.
#[derive(Clone, Copy, Debug)]
pub struct Rights {
    /// Bytes at the start that hold flags and their tags.
    pub strict: u64,
    /// Whether additions are allowed there.
    pub atomics: bool,
    /// Whether the rest is relaxed.
    pub relaxed: bool,
}

impl Device {
    /// Makes a NIC ready for registering.
    ///
    /// # Errors
    /// [`VerbsError`], [`MemoryError`](crate::error::MemoryError).
    pub fn new(card: CardRail) -> Result<Self, Error> {
        let domain = ProtectionDomain::create(&card.context)?;
        let segment = Segment::create("sidelane-zeros", ZEROS)?;
        let mapped = Arc::new(PeerMapping::new(&[Some(&segment)])?);
        mapped.populate(0, 0, ZEROS)?;
        // SAFETY: no one ever writes these bytes; the mapping is dropped after the region.
        let zeros = unsafe {
            MemoryRegion::register(&domain, mapped.at(0, 0, ZEROS)?, ZEROS as usize, Access::empty())
        }?;
        Ok(Device { card, domain, regions: RwLock::default(), zeros, _zeros: mapped })
    }

    /// Registers a region under its number. Returns this rank's part, for
    /// [`say`](super::keys::say).
    ///
    /// # Errors
    /// [`VerbsError::Register`].
    pub fn register(
        &self,
        number: u32,
        region: &Region,
        rights: Rights,
    ) -> Result<Vec<(u64, u64, u32)>, Error> {
        let Region { mapped, member } = region;
        let piece = |member: u32, offset: u64, len: u64, access| -> Result<MemoryRegion, Error> {
            let at = mapped.at(member, offset, len)?;
            // SAFETY: the region keeps the mapping; its bytes are shared memory that is only ever
            // reached by pointers, under the schedule's write grants.
            Ok(unsafe { MemoryRegion::register(&self.domain, at, len as usize, access) }?)
        };
        let (len, theirs) = (mapped.len_of(*member), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let strict = rights.strict.min(len);
        let flags = if rights.atomics { theirs | Access::REMOTE_ATOMIC } else { theirs };
        let rows = if rights.relaxed { theirs | Access::RELAXED } else { theirs };
        let mut own = LocalRegion::default();
        for (offset, len, access) in [(0, strict, flags), (strict, len - strict, rows)] {
            if len > 0 {
                own.pieces.push(piece(*member, offset, len, access)?);
            }
        }
        let others = (0..mapped.members()).filter(|other| other != member && mapped.len_of(*other) > 0);
        let neighbours = others
            .map(|other| Ok((other, piece(other, 0, mapped.len_of(other), Access::empty())?)))
            .collect::<Result<_, Error>>()?;
        let said = own.said();
        self.keep(number, Registered::new(*member, own, neighbours, Arc::new(region.clone())));
        Ok(said)
    }

    /// Peers may write there from now on.
    pub(super) fn keep(&self, number: u32, registered: Registered) {
        self.regions.write().unwrap_or_else(PoisonError::into_inner).insert(number, registered);
    }

    /// Bytes of a member of a region as this NIC may read them, if they are registered as one
    /// piece.
    pub(super) fn piece_of(&self, number: u32, member: u32, offset: u64, len: u64) -> Option<Source> {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let region = regions.get(&number)?;
        let mut start = 0;
        let mut inside = |piece: &MemoryRegion| {
            let from = offset.checked_sub(start)?;
            start += piece.len();
            let fits = from.checked_add(len)? <= piece.len();
            fits.then(|| Source { address: piece.base() + from, len: len as usize, lkey: piece.lkey() })
        };
        if member == region.rank {
            return region.own.pieces.iter().find_map(inside);
        }
        region.neighbours.iter().find(|(rank, _)| *rank == member).and_then(|(_, piece)| inside(piece))
    }

    /// Peers that still write there meet a dead key.
    pub fn deregister(&self, number: u32) {
        let gone = self.regions.write().unwrap_or_else(PoisonError::into_inner).remove(&number);
        // A system call: not while others look their sources up.
        drop(gone);
    }

    /// Bytes as this NIC may read them, if they are registered.
    pub fn source(&self, bytes: &[u8]) -> Option<Source> {
        let (address, len) = (bytes.as_ptr().addr() as u64, bytes.len());
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let pieces = regions.values().flat_map(|region| {
            region.own.pieces.iter().chain(region.neighbours.iter().map(|(_, piece)| piece))
        });
        let holds = |piece: &&MemoryRegion| {
            address >= piece.base() && address + len as u64 <= piece.base() + piece.len()
        };
        let piece = pieces.into_iter().find(holds)?;
        Some(Source { address, len, lkey: piece.lkey() })
    }

    /// Zeros: `len` of them, or what so many pieces hold.
    pub fn zeros(&self, len: u64, pieces: usize) -> impl Iterator<Item = Sge> + Clone + '_ {
        let whole = len.div_ceil(ZEROS).min(pieces as u64);
        (0..whole).filter_map(move |nth| self.zeros.sge(0, (len - nth * ZEROS).min(ZEROS) as u32).ok())
    }

    /// Whether the NIC works.
    ///
    /// # Errors
    /// [`VerbsError::CardLost`] and its like.
    pub fn check(&self) -> Result<(), VerbsError> {
        self.card.context.check()
    }
}
