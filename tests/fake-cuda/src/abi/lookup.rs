//! `cuGetProcAddress`: functions by their plain names, as far as the driver's version has them.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::pointers::{In, Out};
use super::{
    context, copy, device, event, graph, kernel, local, memory, pointer, stream, stream_memory, virt,
};
use crate::code::Code;
use crate::driver::{self, settings};

/// A function, and the version of CUDA that brought this form of it.
struct Entry {
    name: &'static str,
    since: c_int,
    function: *const c_void,
}

macro_rules! entries {
    ($($name:literal, $since:literal, $function:path;)*) => {
        [$(Entry { name: $name, since: $since, function: $function as *const c_void }),*]
    };
}

/// Of a name with several forms the newest that fits is meant.
fn entries() -> impl IntoIterator<Item = Entry> {
    entries! {
        "cuDevicePrimaryCtxRetain", 10000, context::cuDevicePrimaryCtxRetain;
        "cuDevicePrimaryCtxRelease", 10000, context::cuDevicePrimaryCtxRelease_v2;
        "cuDevicePrimaryCtxGetState", 10000, context::cuDevicePrimaryCtxGetState;
        "cuCtxSetCurrent", 10000, context::cuCtxSetCurrent;
        "cuCtxGetCurrent", 10000, context::cuCtxGetCurrent;
        "cuCtxPushCurrent", 10000, context::cuCtxPushCurrent_v2;
        "cuCtxPopCurrent", 10000, context::cuCtxPopCurrent_v2;
        "cuCtxGetDevice", 10000, context::cuCtxGetDevice;
        "cuCtxGetId", 12000, context::cuCtxGetId;
        "cuCtxGetFlags", 10000, context::cuCtxGetFlags;
        "cuCtxSynchronize", 10000, context::cuCtxSynchronize;
        "cuCtxGetStreamPriorityRange", 10000, context::cuCtxGetStreamPriorityRange;
        "cuCtxEnablePeerAccess", 10000, context::cuCtxEnablePeerAccess;
        "cuCtxDisablePeerAccess", 10000, context::cuCtxDisablePeerAccess;
        "cuMemcpyAsync", 10000, copy::cuMemcpyAsync;
        "cuMemcpyDtoDAsync", 10000, copy::cuMemcpyDtoDAsync_v2;
        "cuMemcpyHtoDAsync", 10000, copy::cuMemcpyHtoDAsync_v2;
        "cuMemcpyDtoHAsync", 10000, copy::cuMemcpyDtoHAsync_v2;
        "cuMemcpyPeerAsync", 10000, copy::cuMemcpyPeerAsync;
        "cuMemcpy", 10000, copy::cuMemcpy;
        "cuMemcpyHtoD", 10000, copy::cuMemcpyHtoD_v2;
        "cuMemcpyDtoH", 10000, copy::cuMemcpyDtoH_v2;
        "cuMemcpyDtoD", 10000, copy::cuMemcpyDtoD_v2;
        "cuMemsetD8Async", 10000, copy::cuMemsetD8Async;
        "cuMemsetD32Async", 10000, copy::cuMemsetD32Async;
        "cuMemsetD8", 10000, copy::cuMemsetD8_v2;
        "cuMemsetD32", 10000, copy::cuMemsetD32_v2;
        "cuInit", 10000, device::cuInit;
        "cuDriverGetVersion", 10000, device::cuDriverGetVersion;
        "cuGetErrorName", 10000, device::cuGetErrorName;
        "cuGetErrorString", 10000, device::cuGetErrorString;
        "cuDeviceGetCount", 10000, device::cuDeviceGetCount;
        "cuDeviceGet", 10000, device::cuDeviceGet;
        "cuDeviceGetName", 10000, device::cuDeviceGetName;
        "cuDeviceGetPCIBusId", 10000, device::cuDeviceGetPCIBusId;
        "cuDeviceGetUuid", 10000, device::cuDeviceGetUuid;
        "cuDeviceGetUuid", 11040, device::cuDeviceGetUuid_v2;
        "cuDeviceTotalMem", 10000, device::cuDeviceTotalMem_v2;
        "cuDeviceGetAttribute", 10000, device::cuDeviceGetAttribute;
        "cuDeviceCanAccessPeer", 10000, device::cuDeviceCanAccessPeer;
        "cuDeviceGetP2PAttribute", 10000, device::cuDeviceGetP2PAttribute;
        "cuEventCreate", 10000, event::cuEventCreate;
        "cuEventDestroy", 10000, event::cuEventDestroy_v2;
        "cuEventRecord", 10000, event::cuEventRecord;
        "cuEventRecordWithFlags", 10000, event::cuEventRecordWithFlags;
        "cuEventQuery", 10000, event::cuEventQuery;
        "cuEventSynchronize", 10000, event::cuEventSynchronize;
        "cuEventElapsedTime", 10000, event::cuEventElapsedTime;
        "cuGraphInstantiateWithFlags", 10000, graph::cuGraphInstantiateWithFlags;
        "cuGraphInstantiateWithParams", 12000, graph::cuGraphInstantiateWithParams;
        "cuGraphUpload", 10000, graph::cuGraphUpload;
        "cuGraphLaunch", 10000, graph::cuGraphLaunch;
        "cuGraphDestroy", 10000, graph::cuGraphDestroy;
        "cuGraphExecDestroy", 10000, graph::cuGraphExecDestroy;
        "cuGraphGetNodes", 10000, graph::cuGraphGetNodes;
        "cuGraphNodeGetType", 10000, graph::cuGraphNodeGetType;
        "cuModuleLoadData", 10000, kernel::cuModuleLoadData;
        "cuModuleLoadDataEx", 10000, kernel::cuModuleLoadDataEx;
        "cuModuleUnload", 10000, kernel::cuModuleUnload;
        "cuModuleGetFunction", 10000, kernel::cuModuleGetFunction;
        "cuModuleGetFunctionCount", 12040, kernel::cuModuleGetFunctionCount;
        "cuModuleGetLoadingMode", 11070, kernel::cuModuleGetLoadingMode;
        "cuFuncLoad", 12040, kernel::cuFuncLoad;
        "cuFuncGetModule", 10000, kernel::cuFuncGetModule;
        "cuFuncGetParamInfo", 12040, kernel::cuFuncGetParamInfo;
        "cuFuncGetAttribute", 10000, kernel::cuFuncGetAttribute;
        "cuFuncSetAttribute", 10000, kernel::cuFuncSetAttribute;
        "cuOccupancyMaxActiveBlocksPerMultiprocessor", 10000, kernel::cuOccupancyMaxActiveBlocksPerMultiprocessor;
        "cuLaunchKernel", 10000, kernel::cuLaunchKernel;
        "cuLaunchKernelEx", 11060, kernel::cuLaunchKernelEx;
        "cuMemAlloc", 10000, memory::cuMemAlloc_v2;
        "cuMemFree", 10000, memory::cuMemFree_v2;
        "cuMemGetInfo", 10000, memory::cuMemGetInfo_v2;
        "cuMemHostAlloc", 10000, memory::cuMemHostAlloc;
        "cuMemAllocHost", 10000, memory::cuMemAllocHost_v2;
        "cuMemFreeHost", 10000, memory::cuMemFreeHost;
        "cuMemHostRegister", 10000, memory::cuMemHostRegister_v2;
        "cuMemHostUnregister", 10000, memory::cuMemHostUnregister;
        "cuMemHostGetDevicePointer", 10000, memory::cuMemHostGetDevicePointer_v2;
        "cuMemHostGetFlags", 10000, memory::cuMemHostGetFlags;
        "cuMemGetAddressRange", 10000, memory::cuMemGetAddressRange_v2;
        "cuFlushGPUDirectRDMAWrites", 11030, memory::cuFlushGPUDirectRDMAWrites;
        "cuPointerGetAttribute", 10000, pointer::cuPointerGetAttribute;
        "cuPointerGetAttributes", 10000, pointer::cuPointerGetAttributes;
        "cuPointerSetAttribute", 10000, pointer::cuPointerSetAttribute;
        "cuStreamCreate", 10000, stream::cuStreamCreate;
        "cuStreamCreateWithPriority", 10000, stream::cuStreamCreateWithPriority;
        "cuStreamDestroy", 10000, stream::cuStreamDestroy_v2;
        "cuStreamQuery", 10000, stream::cuStreamQuery;
        "cuStreamSynchronize", 10000, stream::cuStreamSynchronize;
        "cuStreamWaitEvent", 10000, stream::cuStreamWaitEvent;
        "cuStreamGetCtx", 10000, stream::cuStreamGetCtx;
        "cuStreamGetPriority", 10000, stream::cuStreamGetPriority;
        "cuStreamGetFlags", 10000, stream::cuStreamGetFlags;
        "cuStreamGetId", 12000, stream::cuStreamGetId;
        "cuLaunchHostFunc", 10000, stream::cuLaunchHostFunc;
        "cuStreamBeginCapture", 10000, stream::cuStreamBeginCapture_v2;
        "cuStreamEndCapture", 10000, stream::cuStreamEndCapture;
        "cuStreamIsCapturing", 10000, stream::cuStreamIsCapturing;
        "cuStreamGetCaptureInfo", 10000, stream::cuStreamGetCaptureInfo_v2;
        "cuStreamGetCaptureInfo", 12030, stream::cuStreamGetCaptureInfo_v3;
        "cuThreadExchangeStreamCaptureMode", 10000, stream::cuThreadExchangeStreamCaptureMode;
        "cuStreamWriteValue32", 11070, stream_memory::cuStreamWriteValue32_v2;
        "cuStreamWriteValue64", 11070, stream_memory::cuStreamWriteValue64_v2;
        "cuStreamWaitValue32", 11070, stream_memory::cuStreamWaitValue32_v2;
        "cuStreamWaitValue64", 11070, stream_memory::cuStreamWaitValue64_v2;
        "cuStreamBatchMemOp", 11070, stream_memory::cuStreamBatchMemOp_v2;
        "cuMemGetAllocationGranularity", 10000, virt::cuMemGetAllocationGranularity;
        "cuMemCreate", 10000, virt::cuMemCreate;
        "cuMemRelease", 10000, virt::cuMemRelease;
        "cuMemAddressReserve", 10000, virt::cuMemAddressReserve;
        "cuMemAddressFree", 10000, virt::cuMemAddressFree;
        "cuMemMap", 10000, virt::cuMemMap;
        "cuMemUnmap", 10000, virt::cuMemUnmap;
        "cuMemSetAccess", 10000, virt::cuMemSetAccess;
        "cuMemGetAccess", 10000, virt::cuMemGetAccess;
        "cuMemExportToShareableHandle", 10000, virt::cuMemExportToShareableHandle;
        "cuMemImportFromShareableHandle", 10000, virt::cuMemImportFromShareableHandle;
        "cuMemGetAllocationPropertiesFromHandle", 10000, virt::cuMemGetAllocationPropertiesFromHandle;
        "cuMemRetainAllocationHandle", 10000, virt::cuMemRetainAllocationHandle;
        "cuMemcpyBatchAsync", 12080, copy::batch;
        "cuMemcpyBatchAsync", 13000, copy::batch_v2;
        "cuGetProcAddress", 12000, self::cuGetProcAddress_v2;
    }
}

const FOUND: c_int = 0;
const NO_SUCH_NAME: c_int = 1;
const TOO_OLD: c_int = 2;

#[unsafe(no_mangle)]
pub extern "C" fn cuGetProcAddress_v2(
    name: In<c_char>,
    function: Out<*const c_void>,
    version: c_int,
    _flags: u64,
    status: Out<c_int>,
) -> c_int {
    local(|| {
        // Functions can be looked up before the driver is initialised.
        let _ = driver::start();
        let newest = version.min(settings()?.version);
        if name.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller vouches for a C string.
        let name = unsafe { CStr::from_ptr(name.raw()) }.to_str().map_err(|_| Code::INVALID_VALUE)?;
        let forms: Vec<Entry> = entries().into_iter().filter(|entry| entry.name == name).collect();
        let fits = forms.iter().filter(|entry| entry.since <= newest).max_by_key(|entry| entry.since);
        function.put(fits.map_or(std::ptr::null(), |entry| entry.function))?;
        let answer = match fits {
            Some(_) => FOUND,
            None if forms.is_empty() => NO_SUCH_NAME,
            None => TOO_OLD,
        };
        let asked = !status.is_null();
        status.offer(answer);
        if answer == FOUND || asked { Ok(()) } else { Err(Code::NOT_FOUND) }
    })
}
