//! One range of addresses for the memory of all members, so that the address of a peer's memory is
//! arithmetic.
//!
//! ```text
//!   base              base + stride      base + 2 * stride
//!   | member 0        | member 1         | member 2        |      mapped one by one, as descriptors come
//!   | first | + | +   |                  |                 |      a member's memory may grow at its end
//! ```
//!
//! Addresses are reserved for the largest size, and memory is mapped to them piece by piece. So
//! what lies in a piece stays where it is when the memory grows.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

use super::allocation::{Allocation, location};
use super::call;
use super::context::Context;
use super::libcuda::{Code, Version, too_old};
use super::range::{Claim, DeviceRange, Reach};
use crate::error::DeviceError;

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
