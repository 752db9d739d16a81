//! The driver, loaded and started: it opens devices. Each has a primary context, which a thread is
//! in while it calls the driver.
//!
//! ```text
//!   Driver::open --> probe: Probe, DeviceProperties     `sidelane doctor` explains each of them
//!                --> context(device): Context           all other types are made from one
//!                       `-- enter --> Entered: the thread's current context, until it is dropped
//! ```

use std::ffi::c_int;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call;
use super::libcuda::{Library, Version};
use super::probe::{DeviceProperties, ModuleLoading, Probe};
use crate::error::DeviceError;

/// The CUDA driver, loaded and started. Clones are the same driver.
#[derive(Clone, Debug)]
pub struct Driver {
    pub(super) library: Arc<Library>,
}

impl Driver {
    /// Loads `libcuda.so.1`, or the library that `SIDELANE_CUDA_LIBRARY` names, and initializes it.
    /// Never panics.
    ///
    /// # Errors
    /// [`DeviceError::NoLibrary`], [`DeviceError::MissingSymbol`], [`DeviceError::Init`],
    /// [`DeviceError::TooOld`].
    pub fn open() -> Result<Self, DeviceError> {
        let path = std::env::var_os("SIDELANE_CUDA_LIBRARY").filter(|path| !path.is_empty());
        Self::load(path.as_deref().map(Path::new))
    }

    /// As [`open`](Self::open), with a path in place of the variable.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn load(path: Option<&Path>) -> Result<Self, DeviceError> {
        Ok(Driver { library: Arc::new(Library::load(path)?) })
    }

    /// The newest CUDA version that the driver can do.
    #[doc(hidden)]
    pub fn version(&self) -> Version {
        self.library.version
    }

    /// Whether this is the fake that tests load in place of a driver.
    pub fn is_fake(&self) -> bool {
        self.library.fake_driver
    }

    /// How many devices the driver shows.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn device_count(&self) -> Result<u32, DeviceError> {
        let mut count = 0;
        // SAFETY: fills the number.
        unsafe { call!(self.library, None, cuDeviceGetCount(&raw mut count)) }?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Properties and abilities of one device.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchDevice`], [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn device(&self, device: u32) -> Result<DeviceProperties, DeviceError> {
        DeviceProperties::ask(&self.library, device, self.handle(device)?)
    }

    /// The primary context of a device: the one that the CUDA runtime, and so torch, uses too.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchDevice`], [`DeviceError::Call`].
    pub fn context(&self, device: u32) -> Result<Arc<Context>, DeviceError> {
        Context::retain(self.clone(), device, self.handle(device)?)
    }

    /// When kernels are loaded.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn module_loading(&self) -> Result<ModuleLoading, DeviceError> {
        let mut mode = 0_u32;
        // SAFETY: fills the number; it is an enum in the header, and read as a number here.
        unsafe { call!(self.library, None, cuModuleGetLoadingMode((&raw mut mode).cast())) }?;
        Ok(match mode {
            1 => ModuleLoading::Eager,
            2 => ModuleLoading::Lazy,
            other => ModuleLoading::Unknown(other),
        })
    }

    /// Hardware queues that streams of a device are folded on, from the environment
    /// (`CUDA_DEVICE_MAX_CONNECTIONS`; 8 if not set).
    pub fn hardware_queues(&self) -> u32 {
        queues(std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().as_deref())
    }

    /// Runs driver calls that neither invalidate other threads' captures nor are refused because of
    /// them. They must not change what those capture. Afterwards this thread's mode is restored.
    pub fn beside_captures<T>(&self, run: impl FnOnce() -> T) -> T {
        let mut mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: takes the mode, and puts the one before in its place.
        let mut exchange =
            || unsafe { call!(self.library, None, cuThreadExchangeStreamCaptureMode(&raw mut mode)) };
        let exchanged = exchange();
        let result = run();
        if exchanged.is_ok() {
            let _ = exchange();
        }
        result
    }

    /// Whether a device can reach the memory of another.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchDevice`], [`DeviceError::Call`].
    pub fn reaches(&self, device: u32, peer: u32) -> Result<bool, DeviceError> {
        let (from, to) = (self.handle(device)?, self.handle(peer)?);
        let mut yes = 0;
        // SAFETY: fills the number.
        unsafe { call!(self.library, Some(device), cuDeviceCanAccessPeer(&raw mut yes, from, to)) }?;
        Ok(yes != 0)
    }

    /// All findings about the driver and its devices.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn probe(&self) -> Result<Probe, DeviceError> {
        Probe::ask(self)
    }

    fn handle(&self, device: u32) -> Result<sys::CUdevice, DeviceError> {
        let count = self.device_count()?;
        let ordinal = c_int::try_from(device).ok().filter(|_| device < count);
        let ordinal = ordinal.ok_or(DeviceError::NoSuchDevice { device, count })?;
        let mut handle = 0;
        // SAFETY: fills the number.
        unsafe { call!(self.library, Some(device), cuDeviceGet(&raw mut handle, ordinal)) }?;
        Ok(handle)
    }
}

/// Hardware queues that the driver makes of `CUDA_DEVICE_MAX_CONNECTIONS`: 1 to 32, and 8 by
/// default.
fn queues(value: Option<&str>) -> u32 {
    value.and_then(|text| text.trim().parse().ok()).filter(|n| (1..=32).contains(n)).unwrap_or(8)
}

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

#[cfg(test)]
mod tests {
    use super::queues;

    #[test]
    fn queues_are_read_as_the_driver_reads_them() {
        for (value, expected) in
            [(None, 8), (Some("1"), 1), (Some(" 32 "), 32), (Some("0"), 8), (Some("many"), 8)]
        {
            assert_eq!(queues(value), expected, "{value:?}");
        }
    }
}
