//! Memory of a device as most programs allocate it: not mapped, not exported, and given back by a
//! call that waits.

use std::sync::Arc;

use cudarc::driver::sys;

use crate::device::call;
use crate::device::context::Context;
use crate::error::DeviceError;

/// Memory by `cuMemAlloc`. Dropping it calls `cuMemFree`, which waits for all work of the device:
/// its purpose here.
#[derive(Debug)]
pub struct PlainMemory {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
}

impl PlainMemory {
    /// Allocates so many bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Call`].
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, DeviceError> {
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: fills the address; given back when the value is dropped.
        let code = unsafe { (context.library().functions.cuMemAlloc_v2)(&raw mut address, bytes as usize) };
        context.library().check_memory("cuMemAlloc", context.device(), bytes, code)?;
        Ok(PlainMemory { context: context.clone(), address })
    }

    /// Gives it back, and says how that went.
    ///
    /// # Errors
    /// [`DeviceError::Call`], also for the failure of something that was enqueued.
    pub fn free(mut self) -> Result<(), DeviceError> {
        let address = std::mem::take(&mut self.address);
        let _entered = self.context.enter()?;
        // SAFETY: allocated once, and forgotten by the value: no one else has the address.
        unsafe { call!(self.context.library(), Some(self.context.device()), cuMemFree_v2(address)) }
    }
}

impl Drop for PlainMemory {
    fn drop(&mut self) {
        if self.address != 0 {
            let _entered = self.context.enter();
            // SAFETY: allocated once; no one else has the address.
            let _ = unsafe { (self.context.library().functions.cuMemFree_v2)(self.address) };
        }
    }
}
