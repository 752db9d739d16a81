//! Audits and timings of a GPU: kernels that hold SMs, copy, and compute, concurrently with which
//! rows must move.
//!
//! ```text
//!   hold      | every multiprocessor, until the host says so |      what completes meanwhile needed none of them
//!   copy      what a copy engine does, by multiprocessors           the yardstick for what that costs others
//!   product   a matrix product, ours or cuBLAS's                    the others
//!   plain     memory whose freeing waits for the device             what a stream that waits does to other threads
//!   cupti     what the device did, as NVIDIA's library lists it     it may list launched work only
//! ```
//!
//! A module of its own: only `sidelane gpu-check` loads it. It shows facts about one GPU, once; no
//! part of the library depends on it.

mod blas;
mod copy;
mod cupti;
mod hold;
mod plain;
mod product;

use std::ffi::CStr;
use std::sync::Arc;

pub use blas::Blas;
pub use cupti::{Activity, ActivityKind, Channel, Cupti};
pub use hold::SmHold;
pub use plain::PlainMemory;
pub use product::{Product, TILE};

use super::context::Context;
use super::module::{Function, Module};
use crate::error::DeviceError;

/// Made by `cuda/build.py`.
const PTX: &str = concat!(include_str!("../../../cuda/audit.ptx"), "\0");

/// Threads of a block: `THREADS` in `cuda/shim.h`.
const THREADS: u32 = 256;

/// The kernels, loaded for one device.
#[derive(Clone, Debug)]
pub struct AuditKernels {
    context: Arc<Context>,
    hold: Function,
    touch: Function,
    copy: Function,
    product: Function,
}

impl AuditKernels {
    /// Has the driver compile them. It needs a driver for CUDA 12.5 or later, and a device of
    /// compute capability 8.0 or later.
    ///
    /// # Errors
    /// [`DeviceError::Module`], [`DeviceError::NoFunction`], [`DeviceError::TooOld`],
    /// [`DeviceError::Call`].
    pub fn load(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let text = CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap_or_default();
        let module = Module::load(context, "sidelane-audit", text)?;
        Ok(AuditKernels {
            context: context.clone(),
            hold: module.function(c"hold")?,
            touch: module.function(c"touch")?,
            copy: module.function(c"copy")?,
            product: module.function(c"product")?,
        })
    }
}
