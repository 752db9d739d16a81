//! The driver, loaded and started: it opens devices.
//!
//! ```text
//!   Driver::open --> probe: Probe, DeviceProperties     `sidelane doctor` explains each of them
//!                --> context(device): Context           all other types are made from one
//! ```

use std::ffi::c_int;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call;
use super::context::Context;
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
    /// Never panics, whatever it finds.
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
    pub fn is_stand_in(&self) -> bool {
        self.library.stand_in
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
