//! One range of addresses for the memory of many: a peer's address is arithmetic.
//!
//! ```text
//!   base              base + stride      base + 2 * stride
//!   | member 0        | member 1         | member 2        |      mapped one by one, as descriptors come
//! ```

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

use super::allocation::{Allocation, location};
use super::call;
use super::context::Context;
use super::library::too_old;
use super::range::{DeviceRange, Reach};
use super::version::Version;
use crate::error::DeviceError;

/// Reserved addresses, the same distance for each member.
#[derive(Debug)]
pub struct Reservation {
    context: Arc<Context>,
    base: u64,
    stride: u64,
    taken: Mutex<Vec<bool>>,
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
        let taken = Mutex::new(vec![false; members]);
        Ok(Arc::new(Reservation { context: context.clone(), base, stride, taken }))
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
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).len()
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
        let (address, len) = (self.address(member)?, allocation.bytes());
        if len > self.stride {
            return Err(DeviceError::OutOfRange { offset: 0, len, size: self.stride });
        }
        let (library, device) = (self.context.library(), Some(self.context.device()));
        let _entered = self.context.enter()?;
        let mapping = {
            let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
            if taken[member] {
                return Err(DeviceError::Taken { member });
            }
            // SAFETY: reserved addresses with nothing behind them, and memory of this size.
            unsafe { call!(library, device, cuMemMap(address, len as usize, 0, allocation.handle, 0)) }?;
            taken[member] = true;
            let (reservation, allocation) = (self.clone(), allocation.clone());
            Arc::new(Mapping { reservation, _allocation: allocation, member, address, len })
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
        Ok(DeviceRange::new(mapping, Reach::Devices(devices.into()), address, len))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let size = self.members() as u64 * self.stride;
        let _entered = self.context.enter();
        // SAFETY: reserved with this size; every mapping holds this value, so nothing is mapped.
        let _ = unsafe { (self.context.library().functions.cuMemAddressFree)(self.base, size as usize) };
    }
}

/// Memory at its place. Dropped in this order: unmapped, then its claims on the memory and on the
/// addresses.
#[derive(Debug)]
struct Mapping {
    _allocation: Arc<Allocation>,
    reservation: Arc<Reservation>,
    member: usize,
    address: u64,
    len: u64,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Reservation { context, taken, .. } = &*self.reservation;
        let mut taken = taken.lock().unwrap_or_else(PoisonError::into_inner);
        let _entered = context.enter();
        // SAFETY: mapped with this size; streams that use it hold this value until a check finds
        // them done.
        let code = unsafe { (context.library().functions.cuMemUnmap)(self.address, self.len as usize) };
        // A place that is still mapped stays taken.
        taken[self.member] = code != super::functions::Code::SUCCESS;
    }
}
