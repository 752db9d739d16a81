//! libcuda, loaded at run time, and checked before any other call: a table of its functions.
//!
//! It is loaded here and not by cudarc, whose loader tries seventeen names in an order that hides a
//! `libcuda.so.1` behind any `libcuda.so`, takes no path, and panics when there is none.
//!
//! ```text
//!   libcuda.so.1 --cuInit, version--> Library { Functions } --call!(..)--> Code --> DeviceError with its name
//! ```
//!
//! The types are those of `cudarc::driver::sys`, which bindgen made from NVIDIA's header: the
//! compiler compares each line of the table with the binding of the same name. Two things are ours.
//! A function that is missing is an error with its name, where cudarc's panics at the first call.
//! And a result is a plain number ([`Code`]): cudarc reads it into an enum of the codes that its
//! header knows, so that a code of a newer driver would be undefined behavior. Batched copies are
//! newer than that header, and have two forms ([`BatchCopy`]).

#![allow(non_snake_case, reason = "the names of C, so that its manual applies")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;

use cudarc::driver::sys;
use serde::{Serialize, Serializer};

use crate::error::{DeviceError, of_loader};

/// Default name for the dynamic loader.
const USUAL: &str = "libcuda.so.1";

/// A symbol that only the driver made for tests has.
pub const FAKE_DRIVER: &str = "sidelane_fake_cuda";

type Initialize = unsafe extern "C" fn(c_uint) -> Code;
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
    pub fake_driver: bool,
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
        // SAFETY: this runs the library's initializers. A user who names another path is
        // responsible for that library, as with LD_LIBRARY_PATH; the driver's own may run at any
        // time.
        let loaded = unsafe { libloading::Library::new(path) }.map_err(|error| {
            let reason = of_loader(&name, &error);
            DeviceError::NoLibrary { library: name.clone(), reason }
        })?;
        let loaded = ManuallyDrop::new(loaded);
        // SAFETY: the types are those of the header; the library stays loaded.
        let initialize: Initialize = unsafe { symbol(&loaded, &name, "cuInit") }?;
        // SAFETY: as above.
        let driver_version: DriverVersion = unsafe { symbol(&loaded, &name, "cuDriverGetVersion") }?;
        // SAFETY: as above; an enum of the header is four bytes.
        let error_name: ErrorName = unsafe { symbol(&loaded, &name, "cuGetErrorName") }?;

        // SAFETY: may be called at any time, and again.
        let code = unsafe { initialize(0) };
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
        let fake_driver = unsafe { loaded.get::<*const c_void>(FAKE_DRIVER) }.is_ok();
        let mut library =
            Library { functions, version, name, fake_driver, batch: None, error_name, _loaded: loaded };
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
            return Some(BatchCopy::Second(unsafe { std::mem::transmute::<*mut c_void, Second>(found) }));
        }
        if self.version >= Version::BATCHED_COPIES {
            let found = self.address(NAME, Version::BATCHED_COPIES)?;
            // SAFETY: the driver was asked for the form of CUDA 12.8, which has this type.
            return Some(BatchCopy::First(unsafe { std::mem::transmute::<*mut c_void, First>(found) }));
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
    const { assert!(size_of::<T>() == size_of::<Address>()) };
    let found = address(library, name, symbol)?;
    // SAFETY: by the contract; both are pointers.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}

type Address = unsafe extern "C" fn();

/// Finds a symbol. Not generic: each table would compile it for each of its functions.
fn address(library: &libloading::Library, name: &str, symbol: &'static str) -> Result<Address, DeviceError> {
    // SAFETY: nothing is called here, and callers cast the pointer to its type.
    let found = unsafe { library.get::<Address>(symbol) };
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

/// Result of a driver function; 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Code(pub u32);

impl Code {
    pub const SUCCESS: Code = Code(0);
    pub const INVALID_VALUE: Code = Code(1);
    const OUT_OF_MEMORY: Code = Code(2);
    pub const NOT_FOUND: Code = Code(500);
    pub const NOT_READY: Code = Code(600);
}

// The same four bytes that the header's enum has.
const _: () = assert!(size_of::<Code>() == size_of::<sys::CUresult>());

/// Declares the table, how it is filled, and that its types are those of the header.
macro_rules! functions {
    ($(#[$about:meta])* $( $name:ident($($arg:ty),*); )*) => {
        $(#[$about])*
        pub struct Functions {
            $( pub $name: unsafe extern "C" fn($($arg),*) -> Code, )*
        }

        impl Functions {
            /// # Safety
            /// The library is libcuda, or something with the same symbols of the same types.
            unsafe fn from(library: &libloading::Library, name: &str) -> Result<Self, DeviceError> {
                Ok(Functions {
                    // SAFETY: by the contract above each symbol is a function of its type.
                    $( $name: unsafe { symbol(library, name, stringify!($name)) }?, )*
                })
            }
        }

        const _: () = { $( let _: unsafe fn($($arg),*) -> sys::CUresult = sys::$name; )* };
    };
}

functions! {
    /// The functions that this module calls, all of them in every driver for CUDA 12.
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut sys::CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, sys::CUdevice);
    cuDeviceGetUuid_v2(*mut sys::CUuuid, sys::CUdevice);
    cuDeviceTotalMem_v2(*mut usize, sys::CUdevice);
    cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, sys::CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, sys::CUdevice, sys::CUdevice);
    cuModuleGetLoadingMode(*mut sys::CUmoduleLoadingMode);
    cuGetProcAddress_v2(*const c_char, *mut *mut c_void, c_int, u64, *mut sys::CUdriverProcAddressQueryResult);

    cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice);
    cuDevicePrimaryCtxRelease_v2(sys::CUdevice);
    cuCtxGetCurrent(*mut sys::CUcontext);
    cuCtxSetCurrent(sys::CUcontext);
    cuCtxGetDevice(*mut sys::CUdevice);
    cuCtxGetId(sys::CUcontext, *mut c_ulonglong);
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuMemGetInfo_v2(*mut usize, *mut usize);

    cuStreamCreateWithPriority(*mut sys::CUstream, c_uint, c_int);
    cuStreamDestroy_v2(sys::CUstream);
    cuStreamGetCtx(sys::CUstream, *mut sys::CUcontext);
    cuStreamIsCapturing(sys::CUstream, *mut sys::CUstreamCaptureStatus);
    cuStreamQuery(sys::CUstream);
    cuStreamSynchronize(sys::CUstream);
    cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint);
    cuEventCreate(*mut sys::CUevent, c_uint);
    cuEventDestroy_v2(sys::CUevent);
    cuEventRecord(sys::CUevent, sys::CUstream);
    cuEventQuery(sys::CUevent);
    cuEventSynchronize(sys::CUevent);
    cuEventElapsedTime(*mut f32, sys::CUevent, sys::CUevent);

    cuStreamWriteValue32_v2(sys::CUstream, sys::CUdeviceptr, u32, c_uint);
    cuStreamWriteValue64_v2(sys::CUstream, sys::CUdeviceptr, u64, c_uint);
    cuStreamWaitValue32_v2(sys::CUstream, sys::CUdeviceptr, u32, c_uint);
    cuStreamWaitValue64_v2(sys::CUstream, sys::CUdeviceptr, u64, c_uint);
    cuStreamBatchMemOp_v2(sys::CUstream, c_uint, *mut sys::CUstreamBatchMemOpParams, c_uint);
    cuMemcpyAsync(sys::CUdeviceptr, sys::CUdeviceptr, usize, sys::CUstream);

    cuThreadExchangeStreamCaptureMode(*mut sys::CUstreamCaptureMode);
    cuStreamBeginCapture_v2(sys::CUstream, sys::CUstreamCaptureMode);
    cuStreamEndCapture(sys::CUstream, *mut sys::CUgraph);
    cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, c_ulonglong);
    cuGraphLaunch(sys::CUgraphExec, sys::CUstream);
    cuGraphDestroy(sys::CUgraph);
    cuGraphExecDestroy(sys::CUgraphExec);

    cuMemGetAllocationGranularity(
        *mut usize, *const sys::CUmemAllocationProp, sys::CUmemAllocationGranularity_flags
    );
    cuMemCreate(*mut sys::CUmemGenericAllocationHandle, usize, *const sys::CUmemAllocationProp, c_ulonglong);
    cuMemRelease(sys::CUmemGenericAllocationHandle);
    cuMemAddressReserve(*mut sys::CUdeviceptr, usize, usize, sys::CUdeviceptr, c_ulonglong);
    cuMemAddressFree(sys::CUdeviceptr, usize);
    cuMemMap(sys::CUdeviceptr, usize, usize, sys::CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap(sys::CUdeviceptr, usize);
    cuMemSetAccess(sys::CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
    cuMemExportToShareableHandle(
        *mut c_void, sys::CUmemGenericAllocationHandle, sys::CUmemAllocationHandleType, c_ulonglong
    );
    cuMemImportFromShareableHandle(
        *mut sys::CUmemGenericAllocationHandle, *mut c_void, sys::CUmemAllocationHandleType
    );
    cuMemGetHandleForAddressRange(
        *mut c_void, sys::CUdeviceptr, usize, sys::CUmemRangeHandleType, c_ulonglong
    );

    cuPointerGetAttributes(
        c_uint, *mut sys::CUpointer_attribute, *mut *mut c_void, sys::CUdeviceptr
    );

    cuMemAlloc_v2(*mut sys::CUdeviceptr, usize);
    cuMemFree_v2(sys::CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut sys::CUdeviceptr, *mut c_void, c_uint);

    cuModuleLoadDataEx(*mut sys::CUmodule, *const c_void, c_uint, *mut sys::CUjit_option, *mut *mut c_void);
    cuModuleUnload(sys::CUmodule);
    cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
    cuFuncGetAttribute(*mut c_int, sys::CUfunction_attribute, sys::CUfunction);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, sys::CUfunction, c_int, usize);
    cuLaunchKernel(
        sys::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, sys::CUstream,
        *mut *mut c_void, *mut *mut c_void
    );
}

/// A version of CUDA: 12080 is 12.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32);

impl Version {
    /// The oldest supported driver: from here on every function of the module's table exists.
    pub const OLDEST: Version = Version(12000);
    /// Kernels can be loaded before their first launch, and tell the sizes of their parameters.
    pub const FUNCTIONS: Version = Version(12040);
    /// Memory operations on virtually mapped memory are safe, and PTX of ISA 8.5 is understood.
    pub const MAPPED_FLAGS: Version = Version(12050);
    /// Copies can be handed over in batches.
    pub const BATCHED_COPIES: Version = Version(12080);
    /// The same with a shorter list of arguments.
    pub const BATCHED_COPIES_V2: Version = Version(13000);
    /// The overlap hint of a batch counts: copies within one device are made by copy engines. Older
    /// drivers take the hint and ignore it, so SMs make these copies.
    pub const OVERLAP_HINT: Version = Version(13010);
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// `CUmemcpyAttributes` of CUDA 12.8 and later.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyAttributes {
    source_order: c_uint,
    source_hint: sys::CUmemLocation,
    target_hint: sys::CUmemLocation,
    flags: c_uint,
}

const _: () = assert!(size_of::<CopyAttributes>() == 24);

impl CopyAttributes {
    /// Sources are read in the order of the stream (`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`), and
    /// engines are preferred to SMs (`CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`). From CUDA 13.1
    /// on ([`Version::OVERLAP_HINT`]) the hint decides
    /// whether engines or SMs copy within one device. Older drivers ignore it: SMs make those
    /// copies.
    pub const BESIDE_COMPUTE: CopyAttributes =
        CopyAttributes { source_order: 1, source_hint: NO_HINT, target_hint: NO_HINT, flags: 1 };
}

/// Of addresses that the driver knows anyway.
const NO_HINT: sys::CUmemLocation =
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };

type Addresses = *mut sys::CUdeviceptr;

/// `cuMemcpyBatchAsync` as CUDA 12.8 defines it: targets, sources, sizes, count, attributes, first
/// copy of each attribute, number of attributes, the copy that failed, stream.
pub type First = unsafe extern "C" fn(
    Addresses,
    Addresses,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> Code;

/// As CUDA 13.0 defines it: no longer says which copy failed.
pub type Second = unsafe extern "C" fn(
    Addresses,
    Addresses,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    sys::CUstream,
) -> Code;

/// The form that a driver has.
#[derive(Clone, Copy, Debug)]
pub enum BatchCopy {
    First(First),
    Second(Second),
}
