//! Streams of the caller, and the layers that enqueue calls on them.

use std::ffi::c_void;

use sidelane::device::{Driver, Stream as Borrowed};

use super::memory::Out;
use super::objects::{Ep, Stream};
use super::{border, close, get, give};
use crate::Status;

/// Names a stream of the caller's, on a device by its number: a `cudaStream_t` or `CUstream`, NULL
/// for the legacy default stream. Loads the driver, and uses the device's primary context, as the
/// CUDA runtime does. Local.
///
/// The caller guarantees: `cuda_stream` is NULL or a stream, which is not destroyed before the
/// handle, every layer that uses it and every dispatch of these are closed or finished; `stream` is
/// NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_stream_borrow(
    device: u32,
    cuda_stream: *mut c_void,
    stream: *mut *mut Stream,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("stream", stream) }?;
        let context = Driver::open()?.context(device)?;
        // SAFETY: as the caller promised: closing a layer and this handle gives up the stream.
        give(unsafe { Borrowed::borrow(&context, cuda_stream) }?, out)
    })
}

/// Frees the memory that the stream used, if it is idle now, including that of closed layers. A
/// stream that is captured must not be queried.
pub(super) fn let_go(stream: &Borrowed) {
    if stream.is_capturing() == Ok(false) {
        let _ = stream.is_done();
    }
}

/// Closes the handle; the stream stays the caller's. Layers that use it keep it until they are
/// closed. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_stream_close(stream: *mut Stream) -> Status {
    close(stream)
}

/// Exact sizes and fixed slots on a device: enqueues the next calls on another stream of the
/// device. With exact sizes they come behind all operations on the previous stream; in fixed slots
/// the caller orders the streams by events. Local. Other layers refuse it by name.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_ep_set_stream(ep: *mut Ep, stream: *mut Stream) -> Status {
    border(|| {
        let (layer, stream) = (get(ep)?, get(stream)?);
        layer.cell.lend(|ep| Ok(ep.set_stream(&stream)?))
    })
}

/// Waits until all operations in the layer's stream are done, and returns their outcome:
/// SIDELANE_OK, the reason of the world's failure, or an error found by a kernel. If a live rank is
/// silent for longer than the world's deadline, the world ends. On the host there is nothing to
/// wait for.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_ep_synchronize(ep: *mut Ep) -> Status {
    border(|| get(ep)?.cell.lend(|ep| Ok(ep.synchronize()?)))
}

/// Known errors, without waiting: SIDELANE_OK, the reason of the world's failure, or an error found
/// by a kernel. Local.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_ep_check(ep: *mut Ep) -> Status {
    border(|| get(ep)?.cell.lend(|ep| Ok(ep.check()?)))
}
