//! libcublas, loaded at run time: a table of its functions.
//!
//! It is loaded here and not by cudarc, for the reasons of [`crate::device::libcuda`]: cudarc's
//! loader takes no path and panics where a library or a symbol is missing. Its declarations would
//! also cost each clean build ten seconds and more. The types are those of NVIDIA's header.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use crate::device::driver::Driver;
use crate::device::libcuda::{FAKE_DRIVER, symbol};
use crate::device::wheels;
use crate::error::DeviceError;

/// Names for the loader, the newest first.
const NAMES: [&str; 3] = ["libcublas.so.13", "libcublas.so.12", "libcublas.so.11"];

/// Libraries that cuBLAS itself loads, from the same release. Wheels have it in the same folder,
/// where the loader does not look.
const BESIDE: (&str, &str) = ("libcublas.so", "libcublasLt.so");

/// The variable with a path.
const VARIABLE: &str = "SIDELANE_CUBLAS_LIBRARY";

/// `cublasHandle_t`.
pub type Handle = *mut c_void;

/// `cublasGemmGroupedBatchedEx`, of cuBLAS 12.5 and later: handle; of each group the operations on
/// a and b, m, n and k, and alpha; addresses of a in memory of the device, their type, pitches of
/// each group; the same of b; beta; the same of c; groups, and members of each; type of the sums.
pub type Grouped = unsafe extern "C" fn(
    Handle,
    *const c_int,
    *const c_int,
    *const c_int,
    *const c_int,
    *const c_int,
    *const f32,
    u64,
    c_int,
    *const c_int,
    u64,
    c_int,
    *const c_int,
    *const f32,
    u64,
    c_int,
    *const c_int,
    c_int,
    *const c_int,
    c_int,
) -> Status;

/// Result of a function; 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Status(pub u32);

/// Declares the table, and how it is filled.
macro_rules! functions {
    ($(#[$about:meta])* $( $name:ident($($arg:ty),*) $(-> $result:ty)?; )*) => {
        $(#[$about])*
        #[allow(non_snake_case, reason = "the names of C, so that its manual applies")]
        #[derive(Clone, Copy, Debug)]
        pub struct Functions {
            $( pub $name: functions!(@type ($($arg),*) $(-> $result)?), )*
        }

        impl Functions {
            /// # Safety
            /// The library is libcublas, or something with the same symbols of the same types, and
            /// is never unloaded.
            unsafe fn from(library: &libloading::Library, name: &str) -> Result<Self, DeviceError> {
                Ok(Functions {
                    // SAFETY: by the contract above each symbol is a function of its type.
                    $( $name: unsafe { symbol(library, name, stringify!($name)) }?, )*
                })
            }
        }
    };
    (@type ($($arg:ty),*)) => { unsafe extern "C" fn($($arg),*) -> Status };
    (@type ($($arg:ty),*) -> $result:ty) => { unsafe extern "C" fn($($arg),*) -> $result };
}

functions! {
    /// The functions that every supported version has.
    cublasCreate_v2(*mut Handle);
    cublasDestroy_v2(Handle);
    cublasGetVersion_v2(Handle, *mut c_int);
    cublasGetStatusName(Status) -> *const c_char;
    cublasSetStream_v2(Handle, *mut c_void);
    cublasSetWorkspace_v2(Handle, u64, usize);
    cublasSetMathMode(Handle, c_int);
    cublasSetAtomicsMode(Handle, c_int);
    cublasSetPointerMode_v2(Handle, c_int);
    cublasGemmEx(
        Handle, c_int, c_int, c_int, c_int, c_int, *const f32, u64, c_int, c_int, u64, c_int, c_int,
        *const f32, u64, c_int, c_int, c_int, c_int
    );
}

/// The library.
#[derive(Debug)]
pub struct BlasLibrary {
    pub functions: Functions,
    /// The loaded library: a path, or a name for the loader.
    pub name: String,
    /// Never unloaded: its handles outlive nothing that way.
    loaded: ManuallyDrop<libloading::Library>,
}

impl BlasLibrary {
    /// Loads the library that `SIDELANE_CUBLAS_LIBRARY` names, else the one that the loader finds,
    /// else the first that loads of the wheels in these folders. With the fake driver it is a fake,
    /// too, and with a real one it is none.
    pub fn load(driver: &Driver, folders: &[PathBuf]) -> Result<Self, DeviceError> {
        let named = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        let candidates: Vec<PathBuf> = match named {
            Some(path) => vec![path],
            None => NAMES.into_iter().map(PathBuf::from).chain(wheels::among(folders, &NAMES)).collect(),
        };
        let mut tried = Vec::new();
        for path in &candidates {
            match open(path) {
                Ok(loaded) => {
                    // SAFETY: only looks whether the symbol is there.
                    let fake_driver = unsafe { loaded.get::<*const c_void>(FAKE_DRIVER) }.is_ok();
                    if fake_driver == driver.is_fake() {
                        return Self::of(loaded, path);
                    }
                    std::mem::forget(loaded);
                    tried.push(format!("{}: it is not for this driver", path.display()));
                }
                Err(reason) => tried.push(reason),
            }
        }
        Err(DeviceError::NoCublas { tried })
    }

    fn of(loaded: libloading::Library, path: &Path) -> Result<Self, DeviceError> {
        let (loaded, name) = (ManuallyDrop::new(loaded), path.display().to_string());
        // SAFETY: a library of this name, or one that the user vouches for; it stays loaded.
        let functions = unsafe { Functions::from(&loaded, &name) }?;
        Ok(BlasLibrary { functions, name, loaded })
    }

    /// The function for products of several shapes.
    pub fn grouped(&self) -> Result<Grouped, DeviceError> {
        // SAFETY: the type is that of the header; the library stays loaded.
        unsafe { symbol(&self.loaded, &self.name, "cublasGemmGroupedBatchedEx") }
    }

    /// Success, or the error of this call.
    pub fn check(&self, call: &'static str, device: u32, status: Status) -> Result<(), DeviceError> {
        if status == Status(0) {
            return Ok(());
        }
        // SAFETY: takes any number. The text lives as long as the library.
        let text = unsafe { (self.functions.cublasGetStatusName)(status) };
        let name = match text.is_null() {
            true => "a status of cuBLAS".to_owned(),
            // SAFETY: as above: a string with a zero byte at its end.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(DeviceError::Call { call, device: Some(device), code: status.0, name })
    }
}

/// Loads a file and, before it, its dependencies in the same folder.
fn open(path: &Path) -> Result<libloading::Library, String> {
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let beside = folder.map(|folder| folder.join(file.replace(BESIDE.0, BESIDE.1)));
    // SAFETY: the library's initializers may run at any time.
    let first = beside.and_then(|beside| unsafe { libloading::Library::new(beside) }.ok());
    // Never unloaded: the loader returns it for its name from now on.
    std::mem::forget(first);
    // SAFETY: as above. A user who names another path is responsible for that library.
    unsafe { libloading::Library::new(path) }.map_err(|error| {
        let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        // The loader's words begin with the name, unless the file is a broken one.
        if reason.contains(file) { reason } else { format!("{}: {reason}", path.display()) }
    })
}
