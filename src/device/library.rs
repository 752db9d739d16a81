//! libcuda, loaded at run time, and checked before any other call.
//!
//! It is loaded here and not by cudarc, whose loader tries seventeen names in an order that hides a
//! `libcuda.so.1` behind any `libcuda.so`, takes no path, and panics when there is none.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;

use super::batch::BatchCopy;
use super::functions::{Code, Functions};
use super::version::Version;
use crate::error::DeviceError;

/// Default name for the dynamic loader.
const USUAL: &str = "libcuda.so.1";

/// A symbol that only the driver made for tests has.
const STAND_IN: &str = "sidelane_stand_in";

type Initialise = unsafe extern "C" fn(c_uint) -> Code;
type DriverVersion = unsafe extern "C" fn(*mut c_int) -> Code;
/// Declared with a number where the header has an enum: any code may be asked about.
type ErrorName = unsafe extern "C" fn(u32, *mut *const c_char) -> Code;

/// The driver's library, started.
pub struct Library {
    pub functions: Functions,
    pub version: Version,
    /// The loaded library: a path, or a name for the loader.
    pub name: String,
    /// Whether this is the driver made for tests.
    pub stand_in: bool,
    /// `None` if the driver is too old.
    pub batch: Option<BatchCopy>,
    error_name: ErrorName,
    /// Never unloaded: the driver runs threads and exit handlers of its own.
    _loaded: ManuallyDrop<libloading::Library>,
}

impl Library {
    /// Loads the library that `path` names, or the one that the loader finds, and initializes it.
    ///
    /// # Errors
    /// [`DeviceError::NoLibrary`], [`DeviceError::MissingSymbol`], [`DeviceError::Init`],
    /// [`DeviceError::TooOld`].
    pub fn load(path: Option<&Path>) -> Result<Self, DeviceError> {
        let path = path.unwrap_or(Path::new(USUAL));
        let name = path.display().to_string();
        // SAFETY: this runs the library's initialisers. A user who names another path is
        // responsible for that library, as with LD_LIBRARY_PATH; the driver's own may run at any
        // time.
        let loaded = unsafe { libloading::Library::new(path) }.map_err(|error| {
            // The loader's own words are in the source.
            let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            DeviceError::NoLibrary { library: name.clone(), reason }
        })?;
        let loaded = ManuallyDrop::new(loaded);
        // SAFETY: the types are those of the header; the library stays loaded.
        let initialise: Initialise = unsafe { symbol(&loaded, &name, "cuInit") }?;
        // SAFETY: as above.
        let driver_version: DriverVersion = unsafe { symbol(&loaded, &name, "cuDriverGetVersion") }?;
        // SAFETY: as above; an enum of the header is four bytes.
        let error_name: ErrorName = unsafe { symbol(&loaded, &name, "cuGetErrorName") }?;

        // SAFETY: may be called at any time, and again.
        let code = unsafe { initialise(0) };
        if code != Code::SUCCESS {
            let text = text(error_name, code);
            return Err(DeviceError::Init { library: name, code: code.0, name: text });
        }
        let mut version = 0;
        // SAFETY: fills the number.
        let answer = unsafe { driver_version(&raw mut version) };
        let version = Version(if answer == Code::SUCCESS { version } else { 0 });
        if version < Version::OLDEST {
            return Err(too_old("Sidelane", version, Version::OLDEST));
        }
        // SAFETY: as for the first symbols.
        let functions = unsafe { Functions::from(&loaded, &name) }?;
        // SAFETY: only looks whether the symbol is there.
        let stand_in = unsafe { loaded.get::<*const c_void>(STAND_IN) }.is_ok();
        let mut library =
            Library { functions, version, name, stand_in, batch: None, error_name, _loaded: loaded };
        library.batch = library.find_batch();
        Ok(library)
    }

    /// Success, or the error of this call.
    pub fn check(&self, call: &'static str, device: Option<u32>, code: Code) -> Result<(), DeviceError> {
        if code == Code::SUCCESS {
            return Ok(());
        }
        Err(DeviceError::Call { call, device, code: code.0, name: self.name_of(code) })
    }

    /// As [`check`](Self::check), for a call that asks for memory.
    pub fn check_memory(
        &self,
        call: &'static str,
        device: u32,
        bytes: u64,
        code: Code,
    ) -> Result<(), DeviceError> {
        match code {
            Code::OUT_OF_MEMORY => Err(DeviceError::OutOfMemory { device, call, bytes }),
            code => self.check(call, Some(device), code),
        }
    }

    /// The driver's name of a code.
    pub fn name_of(&self, code: Code) -> String {
        text(self.error_name, code)
    }

    /// A function by its name and the version that its form is of.
    pub fn address(&self, name: &CStr, version: Version) -> Option<*mut c_void> {
        let (mut found, mut status) = (std::ptr::null_mut(), u32::MAX);
        // SAFETY: the name ends with a zero byte; the rest is filled. The status is an enum of the
        // header, which is read as a number here since a newer driver may know more of them.
        let code = unsafe {
            let status = (&raw mut status).cast();
            (self.functions.cuGetProcAddress_v2)(name.as_ptr(), &raw mut found, version.0, 0, status)
        };
        (code == Code::SUCCESS && status == 0 && !found.is_null()).then_some(found)
    }

    fn find_batch(&self) -> Option<BatchCopy> {
        const NAME: &CStr = c"cuMemcpyBatchAsync";
        if self.version >= Version::BATCHED_COPIES_V2 {
            let found = self.address(NAME, Version::BATCHED_COPIES_V2)?;
            // SAFETY: the driver was asked for the form of CUDA 13, which has this type.
            return Some(BatchCopy::Second(unsafe {
                std::mem::transmute::<*mut c_void, super::batch::Second>(found)
            }));
        }
        if self.version >= Version::BATCHED_COPIES {
            let found = self.address(NAME, Version::BATCHED_COPIES)?;
            // SAFETY: the driver was asked for the form of CUDA 12.8, which has this type.
            return Some(BatchCopy::First(unsafe {
                std::mem::transmute::<*mut c_void, super::batch::First>(found)
            }));
        }
        None
    }
}

/// The error of a driver that is too old for a feature.
pub fn too_old(feature: &'static str, version: Version, needed: Version) -> DeviceError {
    DeviceError::TooOld { feature, version: version.to_string(), needed: needed.to_string() }
}

/// # Safety
/// The symbol, if it exists, is of type `T`, which is a function pointer, and the library is never
/// unloaded.
pub unsafe fn symbol<T: Copy>(
    library: &libloading::Library,
    name: &str,
    symbol: &'static str,
) -> Result<T, DeviceError> {
    // SAFETY: by the contract.
    let found = unsafe { library.get::<T>(symbol) };
    found.map(|found| *found).map_err(|_| DeviceError::MissingSymbol { library: name.to_owned(), symbol })
}

fn text(error_name: ErrorName, code: Code) -> String {
    let mut text = std::ptr::null();
    // SAFETY: fills the pointer with a string that lives as long as the library, or leaves it, or
    // sets it to null.
    let known = unsafe { error_name(code.0, &raw mut text) } == Code::SUCCESS && !text.is_null();
    if !known {
        return "unknown to this driver".to_owned();
    }
    // SAFETY: as above: a string with a zero byte at its end.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library")
            .field("name", &self.name)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}
