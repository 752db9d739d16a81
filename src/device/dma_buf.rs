//! Descriptors of device memory that the kernel, and so a NIC, can reach.

use std::ffi::c_int;
use std::os::fd::OwnedFd;

use cudarc::driver::sys::CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;

use super::allocation::owned;
use super::call;
use super::context::Context;
use super::range::DeviceRange;
use crate::error::DeviceError;

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
