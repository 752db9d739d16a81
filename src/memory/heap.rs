//! The heap of a rank and those of its local peers: segments of memory, mapped into one reservation
//! of address space.
//!
//! ```text
//!   heap   | symmetric: control windows, callers' windows | pool |
//!          SymmetricAllocator: same calls in the same order, so same offsets at all ranks
//!
//!   Segment: a sealed memfd, which no process can shrink while others map it
//!   PeerMapping   | segment of 0 | segment of 1 | segment of 2 |     base + index * stride + offset
//!       `-- pin: GPUs see it, too
//! ```
//!
//! Requests for huge pages are advice: only the pages that the kernel granted count
//! ([`PageReport`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::{Extents, Pool, access};
use crate::bootstrap::Health;
use crate::device::{Context, PinnedMemory};
use crate::error::{Error, MemoryError};

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

/// One mapped region per member, at equal distances. Members out of reach have length 0.
#[derive(Debug)]
pub struct PeerMapping {
    base: NonNull<u8>,
    stride: usize,
    lens: Vec<u64>,
}

// SAFETY: the mapping is plain shared memory owned by this value; nothing in it depends on the
// thread, and every access to its bytes goes through raw pointers whose users guarantee their
// order.
unsafe impl Send for PeerMapping {}
// SAFETY: as above: `&PeerMapping` only hands out raw pointers.
unsafe impl Sync for PeerMapping {}

impl PeerMapping {
    /// Maps the segments that are present, in order.
    ///
    /// # Errors
    /// [`MemoryError::System`] if address space or a mapping is refused.
    pub fn new(segments: &[Option<&Segment>]) -> Result<Self, MemoryError> {
        let lens: Vec<u64> = segments.iter().map(|s| s.map_or(0, Segment::len)).collect();
        // Huge pages need addresses at multiples of their size.
        let stride = lens.iter().max().map_or(0, |&len| len as usize).next_multiple_of(2 << 20);
        let total = (stride * segments.len()).max(1);
        let failed = |call, bytes| {
            move |e: rustix::io::Errno| MemoryError::System { call, bytes, errno: e.raw_os_error() }
        };
        // SAFETY: a fresh anonymous reservation without access rights; it replaces nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                total,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(failed("mmap", total as u64))?;
        let mapped =
            PeerMapping { base: NonNull::new(base.cast()).unwrap_or(NonNull::dangling()), stride, lens };
        for (index, segment) in segments.iter().enumerate() {
            let Some(segment) = segment.filter(|s| !s.is_empty()) else { continue };
            let len = segment.len() as usize;
            // SAFETY: the target range lies inside our own reservation, `len <= stride`, and no
            // code uses it yet. The segment is sealed against shrinking, so no access behind the
            // mapping can fault later.
            unsafe {
                rustix::mm::mmap(
                    mapped.base.as_ptr().add(index * stride).cast(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::FIXED,
                    segment,
                    0,
                )
            }
            .map_err(failed("mmap(MAP_FIXED)", len as u64))?;
            // SAFETY: advice on the range just mapped; it changes no contents. Refusal is not an
            // error.
            let _ = unsafe {
                rustix::mm::madvise(
                    mapped.base.as_ptr().add(index * stride).cast(),
                    len,
                    Advice::LinuxHugepage,
                )
            };
        }
        Ok(mapped)
    }

    /// Number of members, those out of reach among them.
    pub fn members(&self) -> u32 {
        self.lens.len() as u32
    }

    /// Bytes mapped of a member; 0 where it is out of reach.
    #[inline]
    pub fn len_of(&self, member: u32) -> u64 {
        self.lens.get(member as usize).copied().unwrap_or(0)
    }

    /// Address of `len` bytes at `offset` of a member's segment.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`] if any of them lies outside.
    #[inline]
    pub fn at(&self, member: u32, offset: u64, len: u64) -> Result<NonNull<u8>, MemoryError> {
        let size = self.len_of(member);
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(MemoryError::OutOfBounds { peer: member, offset, len, size });
        }
        // SAFETY: inside the reservation: member < members and offset <= size <= stride.
        Ok(unsafe { self.base.add(member as usize * self.stride + offset as usize) })
    }

    /// Copies `out.len()` elements from a member's bytes at `offset`.
    ///
    /// The caller guarantees the order: the writer of the bytes must have signaled before.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn read<T: bytemuck::Pod>(&self, member: u32, offset: u64, out: &mut [T]) -> Result<(), MemoryError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(out);
        let from = self.at(member, offset, bytes.len() as u64)?;
        access::read(from.as_ptr(), bytes.len() as u64);
        // SAFETY: `at` checked the source; the destination is an exclusive slice of the same
        // length. The writer's signal, which the caller has seen, came behind these bytes, and the
        // writer touches them again only after this rank has released them.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies elements to a member's bytes at `offset`. The caller must have the grant to write
    /// there.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn write<T: bytemuck::Pod>(&self, member: u32, offset: u64, from: &[T]) -> Result<(), MemoryError> {
        let bytes: &[u8] = bytemuck::cast_slice(from);
        let to = self.at(member, offset, bytes.len() as u64)?;
        access::write(to.as_ptr(), bytes.len() as u64);
        // SAFETY: `at` checked the destination; the source is a slice of the same length, and a
        // caller's slice cannot overlap the mapping except through extents it owns exclusively.
        unsafe { std::ptr::copy(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Touches a range so that no later access pays for its first page fault.
    ///
    /// The kernel is asked to read: a shared page that is read is mapped for writing, too, and for
    /// reads it maps 16 pages that exist in one fault. A peer's 16 MiB took 1.3 ms that way, and
    /// 9 ms by writing. Where the kernel cannot do it in one call (before 5.14), each page is
    /// touched by reading and writing back a byte.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`]; [`MemoryError::System`] if memory has run out.
    pub fn populate(&self, member: u32, offset: u64, len: u64) -> Result<(), MemoryError> {
        let page = rustix::param::page_size() as u64;
        let (start, end) = (offset / page * page, offset + len);
        let at = self.at(member, start, end - start)?;
        // SAFETY: advice on a range of our own mapping; contents stay as they are.
        match unsafe {
            rustix::mm::madvise(at.as_ptr().cast(), (end - start) as usize, Advice::LinuxPopulateRead)
        } {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::INVAL) => {
                for step in (0..end - start).step_by(page as usize) {
                    // SAFETY: inside the range checked above. A peer may write this byte meanwhile:
                    // a load and a store would undo that, an atomic add of 0 does not. It needs no
                    // order: no thread takes it as a signal.
                    unsafe { std::sync::atomic::AtomicU8::from_ptr(at.as_ptr().add(step as usize)) }
                        .fetch_add(0, std::sync::atomic::Ordering::Relaxed);
                }
                Ok(())
            }
            Err(e) => Err(MemoryError::System {
                call: "madvise(MADV_POPULATE_READ)",
                bytes: len,
                errno: e.raw_os_error(),
            }),
        }
    }

    /// Gives the whole pages of a range back to the system, for all that map them. The bytes are
    /// zeros from then on. An access takes memory again. Where the system has none, its process
    /// gets SIGBUS under strict overcommit, and in a full control group the OOM killer chooses one.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`]; [`MemoryError::System`] if the kernel refuses.
    pub fn give_back(&self, member: u32, offset: u64, len: u64) -> Result<(), MemoryError> {
        let page = rustix::param::page_size() as u64;
        let (start, end) = (offset.next_multiple_of(page), (offset + len) / page * page);
        let Some(len) = end.checked_sub(start).filter(|&len| len > 0) else { return Ok(()) };
        let at = self.at(member, start, len)?;
        // SAFETY: whole pages of a segment, checked by `at`. They stay mapped and writable, so an
        // access of any process finds zeros or what was written since, in memory of no one else.
        // One for which the system has no memory does not return.
        unsafe { rustix::mm::madvise(at.as_ptr().cast(), len as usize, Advice::LinuxRemove) }.map_err(|e| {
            MemoryError::System { call: "madvise(MADV_REMOVE)", bytes: len, errno: e.raw_os_error() }
        })
    }
}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        let total = (self.stride * self.lens.len()).max(1);
        // SAFETY: the reservation made in `new`; every user of pointers into it holds this value
        // alive.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), total) };
    }
}

/// A sealed memfd of fixed size.
#[derive(Debug)]
pub struct Segment {
    fd: OwnedFd,
    len: u64,
}

impl Segment {
    /// Creates `len` bytes of zeroed shared memory, sealed against resizing. No page is touched
    /// yet.
    ///
    /// # Errors
    /// [`MemoryError::System`] with the call that failed.
    pub fn create(name: &str, len: u64) -> Result<Self, MemoryError> {
        let failed = |call| {
            move |e: rustix::io::Errno| MemoryError::System { call, bytes: len, errno: e.raw_os_error() }
        };
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&fd, len).map_err(failed("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("fcntl(F_ADD_SEALS)"))?;
        Ok(Segment { fd, len })
    }

    /// Takes a descriptor that came from `rank`, or from a caller: it must be sealed against
    /// shrinking, or a later access could fault.
    ///
    /// # Errors
    /// [`MemoryError::NotSealed`], [`MemoryError::System`] if it is no memfd.
    pub fn adopt(fd: OwnedFd, rank: u32) -> Result<Self, MemoryError> {
        let failed = |call| {
            move |e: rustix::io::Errno| MemoryError::System { call, bytes: 0, errno: e.raw_os_error() }
        };
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(failed("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(MemoryError::NotSealed { rank, missing: "shrinking (F_SEAL_SHRINK)" });
        }
        let len = rustix::fs::fstat(&fd).map_err(failed("fstat"))?.st_size as u64;
        Ok(Segment { fd, len })
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Bytes of shared huge pages behind the mappings of this process, from `/proc/self/smaps_rollup`;
/// `None` where the kernel does not report them.
fn shared_huge_bytes() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?)
}

fn parse(smaps: &str) -> Option<u64> {
    let line = smaps.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Requests a small heap on huge pages and checks whether it got them. `None` where the kernel does
/// not report it.
pub fn huge_pages_granted() -> Option<bool> {
    let segment = Segment::create("sidelane-probe", 4 << 20).ok()?;
    let before = shared_huge_bytes()?;
    let mapped = PeerMapping::new(&[Some(&segment)]).ok()?;
    mapped.populate(0, 0, segment.len()).ok()?;
    Some(shared_huge_bytes()? > before)
}

/// Pages that a heap got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageReport {
    /// Bytes of the heap.
    pub bytes: u64,
    /// Of them (and of other shared mappings of this process) on huge pages; `None` if unknown.
    pub huge: Option<u64>,
}

/// Pins the whole segment of a member, and holds the mapping as long as there are claims on it. All
/// processes that map the segment access it by atomics alone or, as a port does, between two
/// signals: the device has written, and may write again.
///
/// # Errors
/// [`DeviceError`](crate::error::DeviceError) if it cannot be pinned.
pub fn pin(context: &Arc<Context>, mapped: &Arc<PeerMapping>, member: u32) -> Result<PinnedMemory, Error> {
    let len = mapped.len_of(member);
    let at: NonNull<u8> = mapped.at(member, 0, len)?;
    // SAFETY: checked by `at`, and mapped as long as the value that is kept; ports refer to bytes
    // of it only while, by signals and write grants, no device writes them.
    Ok(unsafe { PinnedMemory::register(context, at, len as usize, mapped.clone()) }?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Cause;

    /// A part of a heap: whole huge pages.
    const PART: u64 = 2 << 20;

    #[test]
    fn a_segment_cannot_be_resized() {
        let segment = Segment::create("sidelane-test", 8192).unwrap();
        assert!(rustix::fs::ftruncate(&segment, 4096).is_err());
        assert!(rustix::fs::ftruncate(&segment, 16384).is_err());
    }

    #[test]
    fn failed_world_keeps_control_and_live_extents_alone() {
        let sizes = HeapSizes { symmetric: PART, total: 8 * PART };
        let segments = [Some(Segment::create("sidelane-test", sizes.total).unwrap())];
        let taken = || {
            let segment = segments[0].as_ref().unwrap();
            rustix::fs::fstat(segment).unwrap().st_blocks as u64 * 512
        };
        let health = Arc::new(Health::new());
        let heap = Heap::new(0, sizes, &segments, &health, Duration::ZERO).unwrap();
        assert_eq!(taken(), sizes.total);
        let pool = heap.pool();
        let mut rows = pool.alloc(PART).unwrap();
        rows.slice_mut::<u8>(0, PART as usize).unwrap().fill(7);
        let offered = pool.alloc(PART).unwrap();
        let announced = pool.announce(2 * PART);
        let live = pool.announce(PART);
        let along_handle = pool.alloc(PART).unwrap().announced();
        health.fail(Cause::Cancelled { by: 0 });
        // Peers may still read the first one, and only write the others.
        drop((offered, announced, along_handle));
        pool.give_back().unwrap();
        assert_eq!(taken(), 4 * PART, "control, rows, what was offered, what a call still announces");
        assert!(rows.slice::<u8>(0, PART as usize).unwrap().iter().all(|&byte| byte == 7));
        // A late write takes memory, and finds it.
        let (at, mut seen) = (heap.boundary() + 2 * PART, [1_u8; 2]);
        heap.mapped().write(0, at, &[9_u8]).unwrap();
        heap.mapped().read(0, at, &mut seen).unwrap();
        assert_eq!(seen, [9, 0]);
        drop(live);
    }

    #[test]
    fn pool_allocates_nothing_once_memory_went_back() {
        let segments = [Some(Segment::create("sidelane-test", 2 * PART).unwrap())];
        let (health, sizes) = (Arc::new(Health::new()), HeapSizes { symmetric: PART, total: 2 * PART });
        let heap = Heap::new(0, sizes, &segments, &health, Duration::ZERO).unwrap();
        let pool = heap.pool();
        let seen = || (pool.alloc(64).map(|extent| extent.len()), pool.announce(64).len());
        pool.give_back().unwrap();
        assert_eq!(seen(), (Ok(64), 64), "a living world keeps its memory");
        health.fail(Cause::Cancelled { by: 3 });
        pool.give_back().unwrap();
        assert_eq!(seen(), (Err(Cause::Cancelled { by: 3 }.into()), 0));
    }

    #[test]
    fn an_unsealed_descriptor_is_refused() {
        let fd = rustix::fs::memfd_create("sidelane-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .unwrap();
        assert!(matches!(Segment::adopt(fd, 3), Err(MemoryError::NotSealed { rank: 3, .. })));
    }

    #[test]
    fn the_grant_is_read_not_the_request() {
        assert_eq!(parse("Rss: 12 kB\nShmemPmdMapped:     4096 kB\n"), Some(4096 * 1024));
        assert_eq!(parse("Rss: 12 kB\n"), None);
    }
}
