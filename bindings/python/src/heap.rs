//! Allocators over device heaps, and the functions by which torch calls them.
//!
//! ```text
//!   torch.cuda.MemPool --dlsym--> sidelane_heap_alloc, sidelane_heap_free --> the allocator of a device
//!           '------- keeps ----> HeapAllocator ------------ serves ----------------'
//! ```
//!
//! torch calls the functions from any thread, with or without the interpreter's lock, and until
//! its pool is gone: they use neither the interpreter nor an object of Python's.

#![allow(unsafe_code, reason = "functions that torch finds by their names")]

use std::ffi::{c_int, c_void};
use std::panic::catch_unwind;
use std::sync::Arc;

use pyo3::prelude::*;
use sidelane::device::{Driver, Stream};
use sidelane::ep::HeapAllocator as Serving;

use crate::calls::Instance;
use crate::errors::raise;
use crate::lending::LendingCell;

/// Serves a device from the device heap of an instance, until it is gone or its world is closed.
#[pyclass(frozen, module = "sidelane")]
pub struct HeapAllocator {
    cell: Arc<LendingCell<Serving>>,
    /// Number of the device.
    #[pyo3(get)]
    device: u32,
}

impl HeapAllocator {
    /// Over the heap of this instance.
    ///
    /// # Errors
    /// As [`sidelane::ExpertParallel::heap_allocator`].
    pub fn of(instance: &Instance) -> PyResult<Self> {
        let made = instance.cell.lend(|ep| ep.heap_allocator().map_err(raise))?;
        let device = made.device();
        let cell = Arc::new(LendingCell::new("heap allocator", made));
        let child = Arc::downgrade(&cell);
        instance.open_world.adopt(child);
        Ok(HeapAllocator { cell, device })
    }
}

#[pymethods]
impl HeapAllocator {
    /// Why it refused an allocation last, if it did.
    #[getter]
    fn refused(&self) -> PyResult<Option<String>> {
        self.cell.lend(|serving| Ok(serving.refused().map(|error| error.to_string())))
    }
}

/// Allocates memory of the heap that serves a device; null if it cannot.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_heap_alloc(bytes: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    // No device has a negative number, and no heap as many bytes.
    let (device, bytes) = (device as u32, bytes as usize as u64);
    let allocated = catch_unwind(|| Serving::alloc_on(device, bytes));
    let address = allocated.ok().and_then(Result::ok).map_or(0, |memory| memory.address());
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Frees it behind all that a stream was given so far. If that cannot be marked, it stays taken.
///
/// # Safety
/// `stream` is null or a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_heap_free(
    address: *mut c_void,
    _bytes: isize,
    device: c_int,
    stream: *mut c_void,
) {
    let free = || -> Result<(), sidelane::Error> {
        let context = Driver::open()?.context(device as u32)?;
        // SAFETY: as the caller promised: it is used during this call alone.
        let stream = unsafe { Stream::borrow(&context, stream) }?;
        Serving::free(address.addr() as u64, &stream)
    };
    let _ = catch_unwind(free);
}
