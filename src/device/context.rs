//! Primary contexts, and being in one.

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call;
use super::driver::Driver;
use super::libcuda::Library;
use super::probe::DeviceProperties;
use crate::error::DeviceError;

/// The primary context of a device, retained: the one that the CUDA runtime, and so torch, uses
/// too.
#[derive(Debug)]
pub struct Context {
    driver: Driver,
    facts: DeviceProperties,
    handle: sys::CUdevice,
    raw: sys::CUcontext,
    /// No other context of the process ever has it, unlike the address: a reset of the device may
    /// put its next context in the place of this one.
    id: u64,
}

// SAFETY: a context may be used from any thread, by several at once; the driver locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn retain(
        driver: Driver,
        device: u32,
        handle: sys::CUdevice,
    ) -> Result<Arc<Self>, DeviceError> {
        let facts = driver.device(device)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: fills the handle; released when the value is dropped.
        unsafe { call!(driver.library, Some(device), cuDevicePrimaryCtxRetain(&raw mut raw, handle)) }?;
        let context =
            Arc::new(Context { id: id_of(&driver.library, device, raw)?, driver, facts, handle, raw });
        Ok(context)
    }

    /// The number of its device.
    pub fn device(&self) -> u32 {
        self.facts.device
    }

    /// Properties and abilities of its device.
    #[doc(hidden)]
    pub fn facts(&self) -> &DeviceProperties {
        &self.facts
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(super) fn library(&self) -> &Library {
        &self.driver.library
    }

    /// The driver's number of it, which no other context of the process ever has.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Whether both are one context of the driver. A reset of the device makes another primary
    /// context.
    pub(super) fn is_same(&self, other: &Context) -> bool {
        self.id == other.id
    }

    /// Refuses a feature that the device lacks.
    pub(super) fn require(&self, has: bool, feature: &'static str) -> Result<(), DeviceError> {
        if has { Ok(()) } else { Err(DeviceError::Unsupported { device: self.device(), feature }) }
    }

    /// Makes this context the thread's current one until the guard is dropped. The caller's thread
    /// gets its own context back; a thread that works in this context alone pays one query.
    pub(super) fn enter(&self) -> Result<Entered<'_>, DeviceError> {
        enter(self.library(), self.device(), self.raw)
    }

    /// The device and whether the context of a stream is this one.
    pub(super) fn owner_of(&self, stream: sys::CUstream) -> Result<Owner, DeviceError> {
        let (library, device) = (self.library(), Some(self.device()));
        let _entered = self.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: fills the handle; the caller guarantees that the stream is valid.
        unsafe { call!(library, device, cuStreamGetCtx(stream, &raw mut raw)) }?;
        if raw == self.raw {
            return Ok(Owner::This);
        }
        let _there = enter(library, self.device(), raw)?;
        let mut found: sys::CUdevice = 0;
        // SAFETY: fills the number.
        unsafe { call!(library, device, cuCtxGetDevice(&raw mut found)) }?;
        Ok(if found == self.handle {
            Owner::SameDevice
        } else {
            Owner::Device(u32::try_from(found).unwrap_or(u32::MAX))
        })
    }

    /// Free bytes of the device's memory.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn free_memory(&self) -> Result<u64, DeviceError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: fills the numbers.
        unsafe {
            call!(self.library(), Some(self.device()), cuMemGetInfo_v2(&raw mut free, &raw mut total))
        }?;
        Ok(free as u64)
    }

    /// The most urgent priority that its streams can have; lower numbers are more urgent.
    pub(super) fn highest_priority(&self) -> Result<c_int, DeviceError> {
        let _entered = self.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: fills the numbers.
        unsafe {
            call!(
                self.library(),
                Some(self.device()),
                cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)
            )
        }?;
        Ok(greatest)
    }
}

fn id_of(library: &Library, device: u32, raw: sys::CUcontext) -> Result<u64, DeviceError> {
    let mut id = 0;
    // SAFETY: a context that was just retained; fills the number.
    unsafe { call!(library, Some(device), cuCtxGetId(raw, &raw mut id)) }?;
    Ok(id)
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the retained context; all objects made in it hold this value.
        let _ = unsafe { (self.driver.library.functions.cuDevicePrimaryCtxRelease_v2)(self.handle) };
    }
}

/// Where a stream belongs.
pub(super) enum Owner {
    This,
    SameDevice,
    Device(u32),
}

/// Ends the stay in a context.
pub(super) struct Entered<'a> {
    library: &'a Library,
    /// The context before; `None` if it was the same.
    before: Option<sys::CUcontext>,
}

fn enter(library: &Library, device: u32, raw: sys::CUcontext) -> Result<Entered<'_>, DeviceError> {
    let mut before = std::ptr::null_mut();
    // SAFETY: fills the handle.
    unsafe { call!(library, Some(device), cuCtxGetCurrent(&raw mut before)) }?;
    if before == raw {
        return Ok(Entered { library, before: None });
    }
    // SAFETY: a context that is retained, or that a living stream belongs to.
    unsafe { call!(library, Some(device), cuCtxSetCurrent(raw)) }?;
    Ok(Entered { library, before: Some(before) })
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: the previously current context, or none.
            let _ = unsafe { (self.library.functions.cuCtxSetCurrent)(before) };
        }
    }
}
