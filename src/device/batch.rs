//! Batched copies: newer than the header that the other types come from, and with two forms.

use std::ffi::c_uint;

use cudarc::driver::sys;

use super::functions::Code;

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
    /// on ([`Version::OVERLAP_HINT`](super::version::Version::OVERLAP_HINT)) the hint decides
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
