//! The driver's functions: one table of plain function pointers, filled at run time.
//!
//! The types are those of `cudarc::driver::sys`, which bindgen made from NVIDIA's header: the
//! compiler compares each line of the table with the binding of the same name. Two things are ours.
//! A function that is missing is an error with its name, where cudarc's panics at the first call.
//! And a result is a plain number ([`Code`]): cudarc reads it into an enum of the codes that its
//! header knows, so that a code of a newer driver would be undefined behaviour.

#![allow(non_snake_case, reason = "the names of C, so that its manual applies")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys;

use crate::error::DeviceError;

/// Result of a driver function; 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Code(pub u32);

impl Code {
    pub const SUCCESS: Code = Code(0);
    pub const INVALID_VALUE: Code = Code(1);
    pub const OUT_OF_MEMORY: Code = Code(2);
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
            pub unsafe fn from(library: &libloading::Library, name: &str) -> Result<Self, DeviceError> {
                let missing = |symbol| DeviceError::MissingSymbol { library: name.to_owned(), symbol };
                Ok(Functions {
                    $( $name: {
                        const SYMBOL: &str = stringify!($name);
                        // SAFETY: by the contract above the symbol is a function of this type.
                        *unsafe { library.get(SYMBOL) }.map_err(|_| missing(SYMBOL))?
                    }, )*
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
    cuFuncSetAttribute(sys::CUfunction, sys::CUfunction_attribute, c_int);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, sys::CUfunction, c_int, usize);
    cuLaunchKernel(
        sys::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, sys::CUstream,
        *mut *mut c_void, *mut *mut c_void
    );
}
