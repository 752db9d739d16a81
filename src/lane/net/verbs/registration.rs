//! Memory that is registered with a NIC of a rank: its own, that of its device, and keys to its
//! peers'.
//!
//! A region may be registered in pieces: flags and their tags strictly ordered, rows relaxed.
//! Memory of a GPU is registered by a descriptor where there is one, else by its address.
//!
//! ```text
//!   region (mapping, or memory of a device) --NicMemory--> pieces --describe_region--> bytes --> peers
//!   bytes of a peer --RemoteRegions::import--> (region, offset) --> address and key
//!
//!   description   | pieces: u8 | start, len, address: u64 each, per piece | NICs: u8 | rkey: u32 per piece and NIC |
//! ```
//!
//! **Sources** are the registered memory of this process, as puts find it: by address, or as memory
//! of a device. They own nothing: a piece that is deregistered meanwhile has a key that the NIC
//! refuses.
//!
//! ```text
//!   by_address   | start, end, lkey | ...    ascending: the piece of an address is found by bisection
//!   members      region, member --> pieces, one behind the other
//! ```
//!
//! **Published** values are read by every put and change seldom: sources, and the keys of peers. A
//! value is never changed in place, so a reader may keep using its copy while the next is made.
//!
//! ```text
//!   Published   latest, version  <-- change: a new value, then a new version
//!       | version as in the reader: its copy is the latest, and no lock is taken
//!       '-> another version: the lock, for as long as it takes to share the latest
//!   Reader      copy, version
//! ```

use std::any::Any;
use std::collections::HashMap;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ffi::ibv_sge;
use super::nic::Nic;
use super::{Access, MemoryRegion, ProtectionDomain, Remote, Sge};
use crate::bootstrap::count_lock;
use crate::device::{Context, DeviceRange, DmaBuf};
use crate::error::{Error, LaneError, VerbsError};
use crate::lane::net::{
    DeviceAddress, DeviceMemory, NoDmaBuf, NoGpuDirect, Region, Registration, RemoteAddress,
};
use crate::memory::{PeerMapping, Segment};

/// Zeros that are sent as one piece.
pub const ZEROS: u64 = 64 << 10;

/// A NIC of a rank, and the memory that is registered with it.
#[derive(Debug)]
pub struct NicMemory {
    /// The NIC, its port and its address.
    pub nic: Nic,
    /// Limits of its queue pairs.
    pub domain: Arc<ProtectionDomain>,
    /// Registered regions by number.
    regions: Mutex<HashMap<u32, Registered>>,
    /// The same as puts of this rank find it.
    pub sources: Published<Sources>,
    zeros: MemoryRegion,
    _zeros: Arc<PeerMapping>,
}

/// A region: this rank's part, which peers may write to, and what else of it is mapped here, which
/// may be sent.
#[derive(Debug)]
struct Registered {
    rank: u32,
    own: LocalRegion,
    local_peers: Vec<(u32, MemoryRegion)>,
    /// Kept mapped as long as it is registered.
    _memory: Arc<dyn Any + Send + Sync>,
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

impl NicMemory {
    /// Makes a NIC ready for registering.
    ///
    /// # Errors
    /// [`VerbsError`], [`MemoryError`](crate::error::MemoryError).
    pub fn new(nic: Nic) -> Result<Self, Error> {
        let domain = ProtectionDomain::create(&nic.context)?;
        let segment = Segment::create("sidelane-zeros", ZEROS)?;
        let mapped = Arc::new(PeerMapping::new(&[Some(&segment)])?);
        mapped.populate(0, 0, ZEROS)?;
        // SAFETY: no one ever writes these bytes; the mapping is dropped after the region.
        let zeros = unsafe {
            MemoryRegion::register(&domain, mapped.at(0, 0, ZEROS)?, ZEROS as usize, Access::empty())
        }?;
        Ok(NicMemory {
            nic,
            domain,
            regions: Mutex::default(),
            sources: Published::default(),
            zeros,
            _zeros: mapped,
        })
    }

    /// Registers a region under its number. Returns this rank's part, for
    /// [`describe_region`].
    ///
    /// # Errors
    /// [`VerbsError::Register`].
    pub fn register(&self, number: u32, region: &Region, rights: Rights) -> Result<RegionKeys, Error> {
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
        let local_peers = others
            .map(|other| Ok((other, piece(other, 0, mapped.len_of(other), sources(rights.relaxed))?)))
            .collect::<Result<_, Error>>()?;
        let keys = own.keys();
        let memory = Arc::new(region.clone());
        self.keep(number, Registered { rank: *member, own, local_peers, _memory: memory });
        Ok(keys)
    }

    /// Peers may write there from now on, and puts of this rank read from there.
    fn keep(&self, number: u32, registered: Registered) {
        let Registered { rank, own, local_peers, .. } = &registered;
        let own = (*rank, own.pieces.iter().map(SourceRange::of).collect());
        let others = local_peers.iter().map(|(member, piece)| (*member, vec![SourceRange::of(piece)]));
        let members: Vec<_> = std::iter::once(own).chain(others).collect();
        self.regions().insert(number, registered);
        self.sources.change(|sources| sources.add(number, members));
    }

    /// Peers that still write there meet a dead key.
    pub fn deregister(&self, number: u32) {
        self.sources.change(|sources| sources.remove(number));
        let gone = self.regions().remove(&number);
        // A system call: not while others register.
        drop(gone);
    }

    fn regions(&self) -> MutexGuard<'_, HashMap<u32, Registered>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Zeros: `len` of them, or what so many pieces hold.
    pub fn zeros(&self, len: u64, pieces: usize) -> impl Iterator<Item = Sge> + Clone + '_ {
        let whole = len.div_ceil(ZEROS).min(pieces as u64);
        (0..whole).filter_map(move |nth| self.zeros.sge(0, (len - nth * ZEROS).min(ZEROS) as u32).ok())
    }

    /// Registers memory of devices under a number. Returns this rank's part, for
    /// [`describe_region`].
    ///
    /// # Errors
    /// [`NoGpuDirect::Nic`].
    pub fn register_device(
        &self,
        number: u32,
        memory: &DeviceMemory,
        relaxed: bool,
    ) -> Result<(RegionKeys, Registration), NoGpuDirect> {
        let DeviceMemory { context, own, local_peers, rank, strict } = memory;
        let (len, flags) = (own.len(), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let rows = if relaxed { flags | Access::RELAXED } else { flags };
        let (mut pieces, mut how) = (Vec::new(), Registration::DmaBuf);
        for (offset, len, access) in [(0, *strict, flags), (*strict, len.saturating_sub(*strict), rows)] {
            if len > 0 {
                let (piece, registered) = self.register_range(context, own, (offset, len), access)?;
                pieces.push(piece);
                how = registered;
            }
        }
        let mut others = Vec::new();
        for (member, range) in local_peers {
            let whole = (0, range.len());
            let (piece, registered) = self.register_range(context, range, whole, sources(relaxed))?;
            others.push((*member, piece));
            // All are reported with the weakest registration of one.
            how = if registered == Registration::DmaBuf { how } else { registered };
        }
        let own_pieces = LocalRegion { pieces };
        let keys = own_pieces.keys();
        let keep: Vec<DeviceRange> =
            std::iter::once(own).chain(local_peers.iter().map(|(_, range)| range)).cloned().collect();
        let memory = Arc::new(keep);
        self.keep(number, Registered { rank: *rank, own: own_pieces, local_peers: others, _memory: memory });
        Ok((keys, how))
    }

    fn register_range(
        &self,
        context: &Context,
        range: &DeviceRange,
        (offset, len): (u64, u64),
        access: Access,
    ) -> Result<(MemoryRegion, Registration), NoGpuDirect> {
        let address = range.address() + offset;
        let dma_buf = match range.dma_buf(context) {
            Err(_) => NoDmaBuf::Driver,
            Ok(DmaBuf { descriptor, offset: first, .. }) => {
                let (fd, at) = (descriptor.as_fd(), first + offset);
                // SAFETY: the range is kept with the registration; no processor reads or writes it,
                // and its device does under the schedule's write grants.
                let region = unsafe {
                    MemoryRegion::register_dmabuf(&self.domain, fd, at, len as usize, address, access)
                };
                match region {
                    Ok(region) => return Ok((region, Registration::DmaBuf)),
                    Err(VerbsError::Register { errno, .. }) => NoDmaBuf::Nic { errno },
                    Err(_) => NoDmaBuf::Library,
                }
            }
        };
        let at = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        let refused = |errno| NoGpuDirect::Nic { dma_buf, errno };
        let at = NonNull::new(at).ok_or(refused(rustix::io::Errno::FAULT.raw_os_error()))?;
        // SAFETY: as above; the kernel refuses an address that it does not know.
        match unsafe { MemoryRegion::register(&self.domain, at, len as usize, access) } {
            Ok(region) => Ok((region, Registration::Address(dma_buf))),
            Err(VerbsError::Register { errno, .. }) => Err(refused(errno)),
            Err(_) => Err(refused(rustix::io::Errno::NOSYS.raw_os_error())),
        }
    }
}

/// Access to memory of local peers: the NIC reads it, and data may pass data there too.
fn sources(relaxed: bool) -> Access {
    if relaxed { Access::RELAXED } else { Access::empty() }
}

/// Length, address and key of each piece of a region, as one NIC knows them.
type RegionKeys = Vec<(u64, u64, u32)>;

/// A region of this rank, as one NIC knows it.
#[derive(Debug, Default)]
struct LocalRegion {
    /// In order, one behind the other.
    pieces: Vec<MemoryRegion>,
}

impl LocalRegion {
    /// Length, address and key of each piece.
    fn keys(&self) -> RegionKeys {
        self.pieces.iter().map(|piece| (piece.len(), piece.base(), piece.rkey())).collect()
    }
}

/// Description of a region for peers: one entry per NIC, all with the same pieces.
pub fn describe_region(nics: &[RegionKeys]) -> Vec<u8> {
    let pieces = nics.first().map_or(&[][..], Vec::as_slice);
    let mut description = vec![pieces.len() as u8];
    let mut start = 0;
    for &(len, base, _) in pieces {
        for word in [start, len, base] {
            description.extend(word.to_le_bytes());
        }
        start += len;
    }
    description.push(nics.len() as u8);
    description.extend(nics.iter().flatten().flat_map(|&(_, _, key)| key.to_le_bytes()));
    description
}

/// Regions of a peer, as registered with the NIC that this rank is connected to.
#[derive(Clone, Debug, Default)]
pub struct RemoteRegions {
    /// Number of the peer's NIC.
    nic: u8,
    /// By number. A change copies the map, and shares the pieces.
    regions: HashMap<u32, Arc<[Piece]>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    start: u64,
    len: u64,
    to: Remote,
}

impl RemoteRegions {
    /// Of a peer's NIC of this number.
    pub fn of_nic(nic: u8) -> Self {
        RemoteRegions { nic, regions: HashMap::new() }
    }

    /// Records the peer's description of a region.
    ///
    /// # Errors
    /// [`VerbsError::Keys`] if it makes no sense.
    pub fn import(&mut self, peer: u32, region: u32, description: &[u8]) -> Result<(), LaneError> {
        let pieces = parse(description, self.nic).ok_or(VerbsError::Keys { peer, region })?;
        self.regions.insert(region, pieces.into());
        Ok(())
    }

    /// Nothing more is sent to a region.
    pub fn forget(&mut self, region: u32) {
        self.regions.remove(&region);
    }

    /// Where bytes of a region begin, and how many lie together from there on.
    pub fn find(&self, to: RemoteAddress) -> Option<(Remote, u64)> {
        let pieces = self.regions.get(&to.region)?;
        let piece =
            pieces.iter().find(|piece| (piece.start..piece.start + piece.len).contains(&to.offset))?;
        let inside = to.offset - piece.start;
        Some((Remote { addr: piece.to.addr + inside, rkey: piece.to.rkey }, piece.len - inside))
    }
}

fn parse(description: &[u8], nic: u8) -> Option<Vec<Piece>> {
    let (&count, mut rest) = description.split_first()?;
    let mut word = || {
        let (head, tail) = rest.split_first_chunk::<8>()?;
        rest = tail;
        Some(u64::from_le_bytes(*head))
    };
    let mut pieces = Vec::new();
    for _ in 0..count {
        let (start, len, addr) = (word()?, word()?, word()?);
        start.checked_add(len)?;
        addr.checked_add(len)?;
        pieces.push(Piece { start, len, to: Remote { addr, rkey: 0 } });
    }
    let (&nics, keys) = rest.split_first()?;
    if nic >= nics || keys.len() != usize::from(nics) * pieces.len() * 4 {
        return None;
    }
    let keys = keys.chunks_exact(4).skip(usize::from(nic) * pieces.len());
    for (piece, key) in pieces.iter_mut().zip(keys) {
        piece.to.rkey = u32::from_le_bytes(key.try_into().ok()?);
    }
    Some(pieces)
}

/// Registered bytes of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// A piece of memory, registered by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRange {
    start: u64,
    end: u64,
    lkey: u32,
}

impl SourceRange {
    /// Of this region of the NIC.
    pub fn of(region: &MemoryRegion) -> Self {
        SourceRange { start: region.base(), end: region.base() + region.len(), lkey: region.lkey() }
    }

    fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Its place among all pieces, of which no two have one key.
    fn place(&self) -> (u64, u64, u32) {
        (self.start, self.end, self.lkey)
    }

    /// Its bytes from an address on, if all of them are inside.
    fn source(&self, address: u64, len: u64) -> Option<Source> {
        let inside = self.start <= address && address.checked_add(len)? <= self.end;
        inside.then_some(Source { address, len: len as usize, lkey: self.lkey })
    }
}

/// All of it that is registered with one NIC.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Pieces of each member of a region, by their numbers.
    members: HashMap<u32, HashMap<u32, Vec<SourceRange>>>,
    /// Each with the largest end of it and all before it: those may reach beyond it.
    by_address: Vec<(SourceRange, u64)>,
}

impl Sources {
    /// Adds what is registered of a region: pieces of each member.
    pub fn add(&mut self, region: u32, members: impl IntoIterator<Item = (u32, Vec<SourceRange>)>) {
        for (member, pieces) in members {
            for &piece in &pieces {
                let at = self.by_address.partition_point(|(other, _)| other.place() < piece.place());
                self.by_address.insert(at, (piece, 0));
                self.reach_from(at);
            }
            self.members.entry(region).or_default().insert(member, pieces);
        }
    }

    /// Takes a region out.
    pub fn remove(&mut self, region: u32) {
        for piece in self.members.remove(&region).iter().flat_map(HashMap::values).flatten() {
            if let Ok(at) = self.by_address.binary_search_by_key(&piece.place(), |(other, _)| other.place()) {
                self.by_address.remove(at);
                self.reach_from(at);
            }
        }
    }

    /// Computes how far pieces reach, from one on, until it is as before.
    fn reach_from(&mut self, first: usize) {
        let mut reach = first.checked_sub(1).map_or(0, |before| self.by_address[before].1);
        for (piece, known) in &mut self.by_address[first..] {
            reach = piece.end.max(reach);
            if std::mem::replace(known, reach) == reach {
                return;
            }
        }
    }

    /// Bytes of this process as the NIC may read them, if one piece holds them all.
    pub fn find(&self, bytes: &[u8]) -> Option<Source> {
        self.at(bytes.as_ptr().addr() as u64, bytes.len() as u64)
    }

    fn at(&self, address: u64, len: u64) -> Option<Source> {
        let before = self.by_address.partition_point(|(piece, _)| piece.start <= address);
        let reaching = self.by_address[..before].iter().rev().take_while(|(_, reach)| *reach > address);
        reaching.filter_map(|(piece, _)| piece.source(address, len)).next()
    }

    /// `len` bytes of a device's memory as the NIC may read them, if one piece holds them all.
    pub fn find_device(&self, from: DeviceAddress, len: u64) -> Option<Source> {
        let DeviceAddress { region, member, offset } = from;
        let mut start = 0;
        self.members.get(&region)?.get(&member)?.iter().find_map(|piece| {
            let inside = offset.checked_sub(start)?;
            start += piece.len();
            piece.source(piece.start.checked_add(inside)?, len)
        })
    }
}

/// A value that is replaced as a whole.
#[derive(Debug, Default)]
pub struct Published<T> {
    /// Grows with each value.
    version: AtomicU64,
    latest: Mutex<Arc<T>>,
}

/// A copy of it, as of the last [`refresh`](Reader::refresh).
#[derive(Debug)]
pub struct Reader<T> {
    version: u64,
    copy: Arc<T>,
}

impl<T: Clone> Published<T> {
    /// With this value.
    pub fn new(value: T) -> Self {
        Published { version: AtomicU64::new(0), latest: Mutex::new(Arc::new(value)) }
    }

    /// Replaces the value by a changed copy.
    pub fn change<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        let mut latest = self.lock();
        let mut next = T::clone(&latest);
        let answer = act(&mut next);
        *latest = Arc::new(next);
        // Release, under the lock: a reader that sees the version takes the lock and finds this
        // value there, or a later one.
        self.version.fetch_add(1, Ordering::Release);
        answer
    }

    /// A reader of it.
    pub fn reader(&self) -> Reader<T> {
        let latest = self.lock();
        // Relaxed: the version changes under the lock that is held here.
        Reader { version: self.version.load(Ordering::Relaxed), copy: Arc::clone(&latest) }
    }
}

impl<T> Published<T> {
    fn lock(&self) -> MutexGuard<'_, Arc<T>> {
        count_lock();
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Reader<T> {
    /// Takes the latest value, if it is another than the copy.
    pub fn refresh(&mut self, published: &Published<T>) {
        // Acquire: all that was done before a change is seen with its version.
        if published.version.load(Ordering::Acquire) != self.version {
            let latest = published.lock();
            // Under the lock, the version is that of the value.
            self.version = published.version.load(Ordering::Relaxed);
            self.copy = Arc::clone(&latest);
        }
    }
}

impl<T> Deref for Reader<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.copy
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bootstrap::locks;

    fn description() -> Vec<u8> {
        let mut description = vec![2];
        for word in [0u64, 100, 4096, 100, 50, 9000] {
            description.extend(word.to_le_bytes());
        }
        description.push(2);
        description.extend([7u32, 8, 17, 18].into_iter().flat_map(u32::to_le_bytes));
        description
    }

    #[test]
    fn remote_bytes_are_found_in_their_piece_with_key_of_nic() {
        let mut theirs = RemoteRegions::of_nic(1);
        theirs.import(3, 5, &description()).unwrap();
        let known = theirs.clone();
        let at = |offset| known.find(RemoteAddress { region: 5, offset });
        assert_eq!(at(0), Some((Remote { addr: 4096, rkey: 17 }, 100)));
        assert_eq!(at(99), Some((Remote { addr: 4195, rkey: 17 }, 1)));
        assert_eq!(at(100), Some((Remote { addr: 9000, rkey: 18 }, 50)));
        assert_eq!(at(150), None);
        assert_eq!(theirs.find(RemoteAddress { region: 4, offset: 0 }), None);
        theirs.forget(5);
        assert_eq!(theirs.find(RemoteAddress { region: 5, offset: 0 }), None);
    }

    #[test]
    fn malformed_description_names_its_rank() {
        let error =
            |description: &[u8], nic| RemoteRegions::of_nic(nic).import(3, 5, description).unwrap_err();
        let expected = LaneError::Verbs(VerbsError::Keys { peer: 3, region: 5 });
        assert_eq!(error(&description(), 2), expected, "no such NIC");
        for len in 0..description().len() {
            assert_eq!(error(&description()[..len], 0), expected, "{len} bytes");
        }
    }

    fn piece(start: u64, len: u64, lkey: u32) -> SourceRange {
        SourceRange { start, end: start + len, lkey }
    }

    /// Two members of region 1, and one of region 2.
    fn sources() -> Sources {
        let mut sources = Sources::default();
        sources.add(1, [(0, vec![piece(1000, 64, 1), piece(1064, 936, 2)]), (1, vec![piece(5000, 100, 3)])]);
        sources.add(2, [(0, vec![piece(3000, 10, 4)])]);
        sources
    }

    #[test]
    fn bytes_are_found_in_the_one_piece_that_holds_them() {
        let sources = sources();
        let key = |address, len| sources.at(address, len).map(|source| source.lkey);
        assert_eq!([key(1000, 64), key(1064, 1), key(1999, 1), key(5099, 1)], [1, 2, 2, 3].map(Some));
        assert_eq!(sources.at(3002, 8), Some(Source { address: 3002, len: 8, lkey: 4 }));
        for (address, len) in [(999, 1), (1063, 2), (1999, 2), (3002, 9), (5100, 1), (0, 9000), (u64::MAX, 8)]
        {
            assert_eq!(key(address, len), None, "{address}, {len}");
        }
    }

    #[test]
    fn memory_of_a_device_is_found_by_its_place_in_the_region() {
        let sources = sources();
        let at = |region, member, offset, len| {
            sources.find_device(DeviceAddress { region, member, offset }, len).map(|source| source.address)
        };
        assert_eq!([at(1, 0, 8, 8), at(1, 0, 64, 936), at(1, 1, 99, 1)], [1008, 1064, 5099].map(Some));
        for (region, member, offset, len) in
            [(1, 0, 60, 8), (1, 0, 1000, 1), (1, 2, 0, 1), (3, 0, 0, 1), (2, 0, u64::MAX, 1)]
        {
            assert_eq!(at(region, member, offset, len), None, "{region} {member} {offset} {len}");
        }
    }

    #[test]
    fn a_region_that_was_taken_out_is_found_no_more() {
        let mut sources = sources();
        sources.remove(1);
        assert_eq!((sources.at(1000, 1), sources.at(3000, 1).map(|source| source.lkey)), (None, Some(4)));
    }

    proptest! {
        #[test]
        fn lookup_in_overlapping_pieces_finds_all_that_scan_finds(
            regions in prop::collection::vec(prop::collection::vec((0..200u64, 1..80u64), 0..6), 1..5),
            gone in prop::collection::vec(any::<bool>(), 5),
            asked in prop::collection::vec((0..300u64, 1..40u64), 20),
        ) {
            let (mut sources, mut keys) = (Sources::default(), 0..);
            let mut left = Vec::new();
            for (number, places) in (0..).zip(&regions) {
                let pieces = places.iter().map(|&(start, len)| piece(start, len, keys.next().unwrap()));
                let pieces: Vec<_> = pieces.collect();
                sources.add(number, [(0, pieces.clone())]);
                left.push((number, pieces));
            }
            for (number, _) in left.extract_if(.., |(number, _)| gone[*number as usize]) {
                sources.remove(number);
            }
            let mut fresh = Sources::default();
            left.iter().for_each(|(number, pieces)| fresh.add(*number, [(0, pieces.clone())]));
            prop_assert_eq!(&sources.by_address, &fresh.by_address);
            let left: Vec<SourceRange> = left.into_iter().flat_map(|(_, pieces)| pieces).collect();
            for (address, len) in asked {
                let scanned = left.iter().any(|piece| piece.source(address, len).is_some());
                prop_assert_eq!(sources.at(address, len).is_some(), scanned, "{}, {}", address, len);
            }
        }
    }

    #[test]
    fn a_reader_takes_a_lock_once_for_each_change() {
        let published = Published::new(1);
        let mut reader = published.reader();
        let refresh = |reader: &mut Reader<i32>| {
            let before = locks::taken();
            reader.refresh(&published);
            (locks::taken() - before, **reader)
        };
        assert_eq!([refresh(&mut reader), refresh(&mut reader)], [(0, 1), (0, 1)]);
        published.change(|value| *value = 2);
        published.change(|value| *value += 1);
        assert_eq!([refresh(&mut reader), refresh(&mut reader)], [(1, 3), (0, 3)]);
    }

    #[test]
    fn reader_in_other_thread_sees_values_in_order_and_last_one() {
        const LAST: usize = 1000;
        let published = Published::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| (0..LAST).for_each(|_| published.change(|value| *value += 1)));
            let mut reader = published.reader();
            while *reader < LAST {
                let before = *reader;
                reader.refresh(&published);
                assert!(*reader >= before);
                std::thread::yield_now();
            }
        });
        assert_eq!(*published.reader(), LAST);
    }
}
