//! Physical memory of a device that other processes and NICs reach.
//!
//! ```text
//!   Allocation --descriptor--> Allocation of another process, which maps it into its Reservation
//!   DeviceRange --DmaBuf--> a NIC
//! ```

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys;
use cudarc::driver::sys::CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
use sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
use sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
use sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;

use super::call;
use super::context::Context;
use super::range::DeviceRange;
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

    /// Memory that another process exported, on whatever device it lies; its owner gives its number
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
