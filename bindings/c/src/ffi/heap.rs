//! Memory of a device heap for libraries that take the functions of an allocator.

use std::ffi::{c_int, c_void};

use sidelane::device::{Driver, Stream as Borrowed};
use sidelane::ep::HeapAllocator as Serving;
use sidelane::error::MemoryError;

use super::memory::Out;
use super::objects::{Ep, HeapAllocator};
use super::{border, close, get, give};
use crate::Status;

/// Exact sizes and budgets on a device: serves sidelane_heap_alloc() on the layer's device from its
/// device heap, until the handle is closed. One at a time serves a device in a process. Tokens in
/// such memory are sent as they lie where those of sidelane_ep_tokens() would; outputs of experts
/// there are copied once, as from elsewhere. Local.
///
/// The caller guarantees: `allocator` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_heap_allocator(
    ep: *mut Ep,
    allocator: *mut *mut HeapAllocator,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("allocator", allocator) }?;
        let made = get(ep)?.cell.lend(|ep| Ok(ep.heap_allocator()?))?;
        give(made, out)
    })
}

/// Closes the handle: nothing more is allocated. Allocated memory stays until it is freed, also
/// behind the end of its layer and its world. NULL is a no-op.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_heap_allocator_close(allocator: *mut HeapAllocator) -> Status {
    close(allocator)
}

/// Allocates bytes of the device heap that serves a device, at a multiple of 512, for any stream.
/// NULL if it cannot: sidelane_last_message() of this thread says why, and which setting to raise.
/// Where only memory that streams have yet to leave is large enough, waits for these. Its type is
/// that of a pluggable allocator of torch: createCustomAllocator(sidelane_heap_alloc,
/// sidelane_heap_free).
#[unsafe(no_mangle)]
#[expect(unused_variables, reason = "torch gives the stream")]
pub extern "C" fn sidelane_heap_alloc(bytes: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let mut address = 0;
    border(|| {
        // No device has a negative number, and no heap as many bytes.
        let (device, bytes) = (device as u32, bytes as usize as u64);
        address = Serving::alloc_on(device, bytes)?.address();
        Ok(())
    });
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Frees what sidelane_heap_alloc() gave. The memory is used again once the stream, a cudaStream_t
/// or CUstream of the device, has done all that it was given so far. Work of other streams must be
/// done, or the stream must wait for it. If that cannot be marked, the memory stays taken, and
/// sidelane_last_message() of this thread says why. NULL is a no-op.
///
/// The caller guarantees: `stream` is NULL or a stream.
#[unsafe(no_mangle)]
#[expect(unused_variables, reason = "torch gives the size")]
pub unsafe extern "C" fn sidelane_heap_free(
    address: *mut c_void,
    bytes: isize,
    device: c_int,
    stream: *mut c_void,
) {
    border(|| {
        if address.is_null() {
            return Ok(());
        }
        let device = u32::try_from(device)
            .map_err(|_| MemoryError::NotAllocated { address: address.addr() as u64 })?;
        let context = Driver::open()?.context(device)?;
        // SAFETY: as the caller promised: it is used during this call alone.
        let stream = unsafe { Borrowed::borrow(&context, stream) }?;
        Ok(Serving::free(address.addr() as u64, &stream)?)
    });
}
