//! CUPTI, NVIDIA's library for tools: a list of the device's work, including the driver's own
//! kernels.
//!
//! ```text
//!   Cupti::open ---- from here on CUPTI writes records -----------------------------> dropped
//!                        |  buffers, by callbacks (buffers)
//!   recorded() ----------+-- flushed, walked, read (records) --> Vec<Activity>
//! ```
//!
//! Loaded at run time, like the driver, and only by `sidelane gpu-check`. It is the old interface,
//! without subscribers, that all versions for CUDA 12 and 13 have.

mod buffers;
mod ffi;
mod records;

use std::error::Error;
use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

pub use records::{Activity, ActivityKind, Channel};

use crate::device::driver::Driver;
use crate::device::version::Version;
use crate::error::DeviceError;
use buffers::Filled;
use records::Cut;

/// Names for the loader, by the driver's version: a newer CUPTI does not work with an older driver.
const NAMES: [&str; 2] = ["libcupti.so.12", "libcupti.so.13"];

/// The variable with a path.
const VARIABLE: &str = "SIDELANE_CUPTI_LIBRARY";

/// The records that are asked for.
const KINDS: [u32; 3] = [ffi::CONCURRENT_KERNEL, ffi::MEMCPY, ffi::MEMCPY2];

/// CUPTI, writing records until it is dropped. One at a time in a process: its buffers are the
/// process's.
pub struct Cupti {
    functions: ffi::Functions,
    name: String,
    version: u32,
    /// Never unloaded: it has hooks in the driver.
    _loaded: ManuallyDrop<libloading::Library>,
}

impl Cupti {
    /// Names for the loader.
    pub const NAMES: [&str; 2] = NAMES;

    /// Loads the library that `SIDELANE_CUPTI_LIBRARY` names, or `libcupti.so.12` or `.13`. From
    /// now on it writes records of kernels and copies; call this before there is a context. With
    /// the fake driver of the tests only the variable counts.
    ///
    /// # Errors
    /// [`DeviceError::NoCupti`], [`DeviceError::MissingSymbol`], [`DeviceError::OldCupti`],
    /// [`DeviceError::Call`] with CUPTI's code.
    pub fn open(driver: &Driver) -> Result<Self, DeviceError> {
        Self::open_with(driver, &[])
    }

    /// The same, and where the loader finds none, the first of these files that is for the driver's
    /// version.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(driver: &Driver, files: &[PathBuf]) -> Result<Self, DeviceError> {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
        if let Some(path) = &path {
            return Self::load(Path::new(path));
        }
        let old = driver.version() < Version(13000);
        // A newer CUPTI does not work with an older driver.
        let fits = |name: &str| !old || name == NAMES[0];
        let named = |file: &&PathBuf| file.file_name().and_then(|name| name.to_str()).is_some_and(fits);
        let file = files.iter().find(named);
        if driver.is_stand_in() {
            if let Some(file) = file {
                return Self::load(file);
            }
            let reason = format!("with the fake driver only {VARIABLE} counts");
            return Err(DeviceError::NoCupti { library: "libcupti".to_owned(), reason });
        }
        let [older, newer] = NAMES.map(Path::new);
        let (first, second) = if old { (older, newer) } else { (newer, older) };
        let loaded = Self::load(first).or_else(|error| match error {
            DeviceError::NoCupti { .. } => Self::load(second),
            error => Err(error),
        });
        match (loaded, file) {
            (Err(DeviceError::NoCupti { .. }), Some(file)) => Self::load(file),
            (loaded, _) => loaded,
        }
    }

    fn load(path: &Path) -> Result<Self, DeviceError> {
        let name = path.display().to_string();
        // SAFETY: this runs the library's initialisers. A user who names a path is responsible for
        // that library; CUPTI's may run at any time.
        let loaded = unsafe { libloading::Library::new(path) }.map_err(|error| {
            let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            DeviceError::NoCupti { library: name.clone(), reason }
        })?;
        let loaded = ManuallyDrop::new(loaded);
        // SAFETY: the types are those of the header; the library stays loaded.
        let functions = unsafe { ffi::Functions::from(&loaded) }
            .map_err(|symbol| DeviceError::MissingSymbol { library: name.clone(), symbol })?;
        let mut cupti = Cupti { functions, name, version: 0, _loaded: loaded };
        let mut version = 0;
        // SAFETY: fills the number.
        cupti.check("cuptiGetVersion", unsafe { (cupti.functions.cuptiGetVersion)(&raw mut version) })?;
        if version < ffi::OLDEST {
            let (library, needed) = (cupti.name.clone(), ffi::OLDEST);
            return Err(DeviceError::OldCupti { library, version, needed });
        }
        cupti.version = version;
        // SAFETY: functions of these types, which live as long as the process.
        let code =
            unsafe { (cupti.functions.cuptiActivityRegisterCallbacks)(buffers::request, buffers::complete) };
        cupti.check("cuptiActivityRegisterCallbacks", code)?;
        for kind in KINDS {
            // SAFETY: takes any number.
            let code = unsafe { (cupti.functions.cuptiActivityEnable)(kind) };
            cupti.check("cuptiActivityEnable", code)?;
        }
        Ok(cupti)
    }

    /// The loaded library: a path, or a name for the loader.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// CUPTI's own count of its versions.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The device's work since the last call, in order of begin. It includes all work that was done
    /// at the call; unfinished work may have records without times.
    ///
    /// # Errors
    /// [`DeviceError::LostRecords`], [`DeviceError::Call`] with CUPTI's code.
    pub fn recorded(&self) -> Result<Vec<Activity>, DeviceError> {
        // Complete buffers first, then incomplete ones.
        for flag in [0, ffi::FLUSH_FORCED] {
            // SAFETY: takes any number; buffers come by the callbacks.
            let code = unsafe { (self.functions.cuptiActivityFlushAll)(flag) };
            self.check("cuptiActivityFlushAll", code)?;
        }
        let mut lost = 0;
        // SAFETY: fills the number; no context stands for all of them.
        let code = unsafe {
            (self.functions.cuptiActivityGetNumDroppedRecords)(std::ptr::null_mut(), 0, &raw mut lost)
        };
        self.check("cuptiActivityGetNumDroppedRecords", code)?;
        let mut activities = Vec::new();
        for filled in buffers::take() {
            lost += self.read(filled, &mut activities)?;
        }
        if lost > 0 {
            return Err(DeviceError::LostRecords { lost: lost as u64 });
        }
        activities.sort_by_key(|activity| activity.start);
        Ok(activities)
    }

    /// Reads the records of a buffer, and gives how many could not be read.
    fn read(&self, mut filled: Filled, activities: &mut Vec<Activity>) -> Result<usize, DeviceError> {
        let (mut record, mut cut) = (std::ptr::null_mut::<c_void>(), 0);
        loop {
            let buffer = filled.words.as_mut_ptr().cast::<u8>();
            // SAFETY: a buffer that CUPTI filled, with this many bytes; it reads the previous
            // record, if there is one.
            let code =
                unsafe { (self.functions.cuptiActivityGetNextRecord)(buffer, filled.valid, &raw mut record) };
            if code == ffi::MAX_LIMIT_REACHED {
                return Ok(cut);
            }
            self.check("cuptiActivityGetNextRecord", code)?;
            let bytes = &bytemuck::cast_slice::<u64, u8>(&filled.words)[..filled.valid];
            let at = (record as usize).wrapping_sub(buffer as usize);
            // SAFETY: CUPTI says that a record begins there; names live as long as CUPTI.
            match bytes.get(at..).map_or(Err(Cut), |bytes| unsafe { records::read(bytes) }) {
                Ok(activity) => activities.extend(activity),
                Err(Cut) => cut += 1,
            }
        }
    }

    fn check(&self, call: &'static str, code: u32) -> Result<(), DeviceError> {
        if code == ffi::SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: fills the pointer with a string that lives as long as the library, or leaves it.
        let answer = unsafe { (self.functions.cuptiGetResultString)(code, &raw mut text) };
        let known = answer == ffi::SUCCESS && !text.is_null();
        // SAFETY: as above: a string with a zero byte at its end.
        let name = known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        let name = name.unwrap_or_else(|| "unknown to this CUPTI".to_owned());
        Err(DeviceError::Call { call, device: None, code, name })
    }
}

impl Drop for Cupti {
    fn drop(&mut self) {
        for kind in KINDS {
            // SAFETY: takes any number; enabled or not.
            let _ = unsafe { (self.functions.cuptiActivityDisable)(kind) };
        }
    }
}

impl std::fmt::Debug for Cupti {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cupti")
            .field("name", &self.name)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}
