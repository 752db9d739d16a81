//! The functions of `libcuda.so`, by their names there, and some of `libcupti.so` and
//! `libcublas.so`.
//!
//! Every function that host code may look up exists: those that the fake lacks return
//! `CUDA_ERROR_NOT_SUPPORTED`.

mod context;
mod copy;
mod cublas;
mod cupti;
mod device;
mod event;
mod graph;
mod kernel;
mod lookup;
mod memory;
mod own;
mod pointer;
mod pointers;
mod stream;
mod stream_memory;
mod unsupported;
mod virt;

use std::ffi::c_int;

use crate::code::Result;
use crate::{host_call, lock};

pub use own::MAGIC;

/// Runs a call of the driver and gives its code. It may have to wait for one of another thread.
fn call(f: impl FnOnce() -> Result<()>) -> c_int {
    local(|| {
        lock::pass();
        f()
    })
}

/// The same for a call that looks at its own thread alone, or at what never changes.
fn local(f: impl FnOnce() -> Result<()>) -> c_int {
    match host_call::outside().and_then(|()| f()) {
        Ok(()) => 0,
        Err(code) => code.0,
    }
}
