//! Physical memory of a device that other processes and NICs reach, and one range of addresses for
//! that of all members, so that the address of a peer's memory is arithmetic.
//!
//! ```text
//!   Allocation --descriptor--> Allocation of another process, which maps it into its Reservation
//!   DeviceRange --DmaBuf--> a NIC
//!
//!   base              base + stride      base + 2 * stride
//!   | member 0        | member 1         | member 2        |      mapped one by one, as descriptors come
//!   | first | + | +   |                  |                 |      a member's memory may grow at its end
//! ```
//!
//! Addresses are reserved for the largest size, and memory is mapped to them piece by piece. So
//! what lies in a piece stays where it is when the memory grows.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use cudarc::driver::sys::CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
use sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
use sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
use sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
use sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;

use super::call;
use super::driver::Context;
use super::libcuda::{Code, Version, too_old};
use super::range::{Claim, DeviceRange, Reach};
use crate::error::DeviceError;

const POSIX: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Physical memory of a device: made here, or imported by its descriptor. It has no address until
/// it is mapped into a [`Reservation`](super::Reservation).
#[derive(Debug)]
pub struct Allocation {
    context: Arc<Context>,
    pub(super) handle: sys::CUmemGenericAllocationHandle,
    bytes: u64,
}

impl Allocation {
    /// Granularity of sizes and addresses of mapped memory, for allocations of this device.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`], [`DeviceError::Call`].
    pub fn granularity(context: &Context) -> Result<u64, DeviceError> {
        context.require(context.facts().virtual_memory, "virtual memory management")?;
        let properties = properties(context);
        let _entered = context.enter()?;
        let mut bytes = 0;
        // SAFETY: fills the number.
        unsafe {
            let (library, device) = (context.library(), Some(context.device()));
            let kind = CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
            call!(library, device, cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, kind))
        }?;
        // Anything but a granularity counts as the smallest one.
        Ok((bytes as u64).max(1))
    }

    /// Bytes that an allocation of `bytes` takes, in whole granules. None if they exceed a `u64`.
    pub(crate) fn whole(bytes: u64, granularity: u64) -> Option<u64> {
        bytes.max(1).checked_next_multiple_of(granularity)
    }

    /// Memory of the context's device: at least `bytes`, rounded up to its granularity. It can be
    /// exported, and NICs can reach it where the device supports that.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Unsupported`], [`DeviceError::Call`].
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Arc<Self>, DeviceError> {
        context.require(context.facts().descriptors, "memory that can be exported as a descriptor")?;
        let granularity = Self::granularity(context)?;
        const CALL: &str = "cuMemCreate";
        let too_much = DeviceError::OutOfMemory { device: context.device(), call: CALL, bytes };
        let bytes = Self::whole(bytes, granularity).ok_or(too_much)?;
        let properties = properties(context);
        let _entered = context.enter()?;
        let mut handle = 0;
        // SAFETY: fills the handle; released when the value is dropped.
        let code = unsafe {
            (context.library().functions.cuMemCreate)(
                &raw mut handle,
                bytes as usize,
                &raw const properties,
                0,
            )
        };
        context.library().check_memory(CALL, context.device(), bytes, code)?;
        Ok(Arc::new(Allocation { context: context.clone(), handle, bytes }))
    }

    /// Memory that another process exported, of any device; its owner gives its number
    /// of bytes.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`], [`DeviceError::Call`].
    pub fn import(
        context: &Arc<Context>,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Arc<Self>, DeviceError> {
        context.require(context.facts().descriptors, "memory that can be imported by a descriptor")?;
        let (library, device) = (context.library(), Some(context.device()));
        let _entered = context.enter()?;
        let mut handle = 0;
        // The driver wants the number itself in the place of a pointer.
        let number = std::ptr::without_provenance_mut::<c_void>(descriptor.as_raw_fd() as usize);
        let kind = POSIX;
        // SAFETY: fills the handle; the descriptor stays ours. Released when the value is dropped.
        unsafe { call!(library, device, cuMemImportFromShareableHandle(&raw mut handle, number, kind)) }?;
        Ok(Arc::new(Allocation { context: context.clone(), handle, bytes }))
    }

    /// A descriptor that another process can import, passed to it over a socket.
    ///
    /// # Errors
    /// [`DeviceError::Descriptor`], [`DeviceError::Call`].
    pub fn export(&self) -> Result<OwnedFd, DeviceError> {
        const CALL: &str = "cuMemExportToShareableHandle";
        let (library, device) = (self.context.library(), Some(self.context.device()));
        let _entered = self.context.enter()?;
        let mut descriptor: c_int = -1;
        let kind = POSIX;
        // SAFETY: fills the number of a descriptor that becomes ours.
        unsafe {
            let out = (&raw mut descriptor).cast();
            call!(library, device, cuMemExportToShareableHandle(out, self.handle, kind, 0))
        }?;
        owned(CALL, descriptor)
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made or imported once; mappings hold this value.
        let _ = unsafe { (self.context.library().functions.cuMemRelease)(self.handle) };
    }
}

/// Takes over a descriptor that the driver has opened for us.
fn owned(call: &'static str, descriptor: c_int) -> Result<OwnedFd, DeviceError> {
    if descriptor < 0 {
        return Err(DeviceError::Descriptor { call, descriptor });
    }
    // SAFETY: opened for this call of the driver; no one else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn properties(context: &Context) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX,
        location: location(context.device()),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(context.facts().direct_rdma_mapped),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

pub(super) fn location(device: u32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: device as c_int }
}

/// A descriptor of whole pages around a range.
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor, to register with a NIC.
    pub descriptor: OwnedFd,
    /// Where in it the range begins.
    pub offset: u64,
    /// Bytes of the pages.
    pub len: u64,
}

impl DeviceRange {
    /// The pages around this range as a dma-buf.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`], [`DeviceError::NoAccess`], [`DeviceError::Descriptor`],
    /// [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn dma_buf(&self, context: &Context) -> Result<DmaBuf, DeviceError> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        context.require(
            context.facts().dma_buf,
            "dma-bufs: its driver is older than 11.7, or the proprietary module",
        )?;
        self.check_reach(context.device())?;
        let page = rustix::param::page_size() as u64;
        let offset = self.address() % page;
        // The driver hands out memory in larger pieces than pages.
        let (address, len) = (self.address() - offset, (offset + self.len()).next_multiple_of(page));
        let _entered = context.enter()?;
        let mut descriptor: c_int = -1;
        let kind = CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: addresses of existing memory; fills the number of a descriptor that becomes ours.
        unsafe {
            let (library, device) = (context.library(), Some(context.device()));
            let out = (&raw mut descriptor).cast();
            call!(library, device, cuMemGetHandleForAddressRange(out, address, len as usize, kind, 0))
        }?;
        Ok(DmaBuf { descriptor: owned(CALL, descriptor)?, offset, len })
    }
}

/// Reserved addresses, the same distance for each member.
#[derive(Debug)]
pub struct Reservation {
    context: Arc<Context>,
    base: u64,
    stride: u64,
    /// Per member: pieces that are mapped at its place.
    pieces: Mutex<Vec<u32>>,
}

impl Reservation {
    /// Reserves `members * stride` bytes of addresses. A stride is a multiple of
    /// [`Allocation::granularity`].
    ///
    /// # Errors
    /// [`DeviceError::Misaligned`], [`DeviceError::TooOld`], [`DeviceError::Unsupported`],
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Call`].
    pub fn new(context: &Arc<Context>, members: usize, stride: u64) -> Result<Arc<Self>, DeviceError> {
        const CALL: &str = "cuMemAddressReserve";
        let library = context.library();
        // Mapped memory holds flags.
        if library.version < Version::MAPPED_FLAGS {
            let feature = "stream memory operations on mapped memory";
            return Err(too_old(feature, library.version, Version::MAPPED_FLAGS));
        }
        let align = Allocation::granularity(context)?;
        if stride == 0 || !stride.is_multiple_of(align) {
            return Err(DeviceError::Misaligned { what: "a stride of", value: stride, align });
        }
        let device = context.device();
        let bytes = stride.checked_mul(members as u64);
        let bytes = bytes.ok_or(DeviceError::OutOfMemory { device, call: CALL, bytes: u64::MAX })?;
        let _entered = context.enter()?;
        let mut base = 0;
        // SAFETY: fills the address; freed when the value is dropped.
        let code = unsafe {
            let (size, align) = (bytes as usize, align as usize);
            (library.functions.cuMemAddressReserve)(&raw mut base, size, align, 0, 0)
        };
        library.check_memory(CALL, device, bytes, code)?;
        let pieces = Mutex::new(vec![0; members]);
        Ok(Arc::new(Reservation { context: context.clone(), base, stride, pieces }))
    }

    /// Where the memory of a member begins, mapped or not.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchMember`].
    pub fn address(&self, member: usize) -> Result<u64, DeviceError> {
        let members = self.members();
        if member < members {
            Ok(self.base + member as u64 * self.stride)
        } else {
            Err(DeviceError::NoSuchMember { member, members })
        }
    }

    /// How many members it was made for.
    pub fn members(&self) -> usize {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Maps a member's memory to its place, for `devices` of this process to read and write. It is
    /// unmapped, and its place free again, when the last claim on the range is gone.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchMember`], [`DeviceError::Taken`], [`DeviceError::OutOfRange`] for
    /// memory larger than the stride, [`DeviceError::Call`].
    pub fn map(
        self: &Arc<Self>,
        member: usize,
        allocation: &Arc<Allocation>,
        devices: &[u32],
    ) -> Result<DeviceRange, DeviceError> {
        let len = allocation.bytes();
        self.map_growing(member, allocation, devices, len)?.range.part(0, len)
    }

    /// The same for memory that may grow, of which the first `len` bytes are in the range.
    ///
    /// # Errors
    /// As [`Reservation::map`].
    pub fn map_growing(
        self: &Arc<Self>,
        member: usize,
        allocation: &Arc<Allocation>,
        devices: &[u32],
        len: u64,
    ) -> Result<GrowingRange, DeviceError> {
        let address = self.address(member)?;
        let piece = Piece::map(self, (member, address), allocation, devices, Place::Free)?;
        if len > piece.len {
            return Err(DeviceError::OutOfRange { offset: 0, len, size: piece.len });
        }
        let mapping = Arc::new(Mapping { member, pieces: Mutex::new(vec![piece]) });
        let (keep, len): (Claim, _) = (mapping.clone(), Arc::new(AtomicU64::new(len)));
        let range = DeviceRange::growing(keep, Reach::Devices(devices.into()), address, Arc::clone(&len));
        Ok(GrowingRange { reservation: Arc::clone(self), mapping, devices: devices.into(), range, len })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let size = self.members() as u64 * self.stride;
        let _entered = self.context.enter();
        // SAFETY: reserved with this size; every piece holds this value, so nothing is mapped.
        let _ = unsafe { (self.context.library().functions.cuMemAddressFree)(self.base, size as usize) };
    }
}

/// A member's memory: pieces, each behind the one before.
#[derive(Debug)]
struct Mapping {
    member: usize,
    pieces: Mutex<Vec<Piece>>,
}

/// Memory of a member that grows at its end.
#[derive(Debug)]
pub struct GrowingRange {
    reservation: Arc<Reservation>,
    mapping: Arc<Mapping>,
    devices: Arc<[u32]>,
    range: DeviceRange,
    len: Arc<AtomicU64>,
}

impl GrowingRange {
    /// The memory, as long as it is at each time. Each of its parts keeps all of it mapped.
    pub fn range(&self) -> &DeviceRange {
        &self.range
    }

    /// Maps more memory behind the last piece. It is unmapped again unless it is
    /// [kept](MappedBehind::keep).
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] for memory that the stride has no addresses for,
    /// [`DeviceError::Call`].
    pub fn map_behind(&self, allocation: &Arc<Allocation>) -> Result<MappedBehind, DeviceError> {
        let at = (self.mapping.member, self.end());
        let piece = Piece::map(&self.reservation, at, allocation, &self.devices, Place::Taken)?;
        Ok(MappedBehind { mapping: Arc::clone(&self.mapping), piece })
    }

    /// The range has the first `len` bytes from now on, of those that are mapped: no more.
    pub fn lengthen(&self, len: u64) {
        let mapped = self.end() - self.range.address();
        // Release: the memory is mapped, and its claim is kept, before a thread sees the length.
        self.len.store(len.min(mapped), Ordering::Release);
    }

    /// The address behind the last piece.
    fn end(&self) -> u64 {
        let pieces = self.mapping.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        pieces.last().map_or(self.range.address(), |last| last.address + last.len)
    }
}

/// Memory that is mapped behind a range.
#[derive(Debug)]
pub struct MappedBehind {
    mapping: Arc<Mapping>,
    piece: Piece,
}

impl MappedBehind {
    /// Keeps it mapped as long as the range: as the last piece of that.
    pub fn keep(self) {
        self.mapping.pieces.lock().unwrap_or_else(PoisonError::into_inner).push(self.piece);
    }
}

/// Whether a member has memory already where a piece is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Free,
    Taken,
}

/// Memory at its addresses. Dropped in this order: unmapped, then its claims on the memory and on
/// the addresses.
#[derive(Debug)]
struct Piece {
    _allocation: Arc<Allocation>,
    reservation: Arc<Reservation>,
    member: usize,
    address: u64,
    len: u64,
}

impl Piece {
    fn map(
        reservation: &Arc<Reservation>,
        (member, address): (usize, u64),
        allocation: &Arc<Allocation>,
        devices: &[u32],
        place: Place,
    ) -> Result<Piece, DeviceError> {
        let (len, size) = (allocation.bytes(), reservation.stride);
        let offset = address - reservation.address(member)?;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(DeviceError::OutOfRange { offset, len, size });
        }
        let context = &reservation.context;
        let (library, device) = (context.library(), Some(context.device()));
        let _entered = context.enter()?;
        let piece = {
            // Over the driver's call: `Piece::drop` unmaps under the same lock, so a place is free
            // only once nothing is mapped there.
            let mut pieces = reservation.pieces.lock().unwrap_or_else(PoisonError::into_inner);
            if place == Place::Free && pieces[member] > 0 {
                return Err(DeviceError::Taken { member });
            }
            // SAFETY: reserved addresses, and memory of this size; the driver refuses addresses
            // where memory is mapped.
            unsafe { call!(library, device, cuMemMap(address, len as usize, 0, allocation.handle, 0)) }?;
            pieces[member] += 1;
            let (reservation, _allocation) = (Arc::clone(reservation), Arc::clone(allocation));
            Piece { _allocation, reservation, member, address, len }
        };
        let describe = |&device: &u32| sys::CUmemAccessDesc {
            location: location(device),
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let access: Vec<_> = devices.iter().map(describe).collect();
        // SAFETY: the new mapping, and a list of this many entries.
        unsafe {
            call!(library, device, cuMemSetAccess(address, len as usize, access.as_ptr(), access.len()))
        }?;
        Ok(piece)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let Reservation { context, pieces, .. } = &*self.reservation;
        let mut pieces = pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let _entered = context.enter();
        // SAFETY: mapped with this size; streams that use it hold its mapping until a check finds
        // them done.
        let code = unsafe { (context.library().functions.cuMemUnmap)(self.address, self.len as usize) };
        // A place that is still mapped stays taken.
        pieces[self.member] -= u32::from(code == Code::SUCCESS);
    }
}
