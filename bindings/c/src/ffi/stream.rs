//! Streams of the caller's, and the layers whose calls go on them.

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
/// The caller guarantees: `cuda_stream` is NULL or a stream, which is not destroyed before the handle,
/// every layer that uses it and every dispatch of these are closed or finished; `stream` is NULL or
/// valid.
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
        // SAFETY: as the caller promised: whoever closes a layer and this handle has let go of it.
        give(unsafe { Borrowed::borrow(&context, cuda_stream) }?, out)
    })
}

/// Lets go of what the stream used, if it is idle now: memory of layers that were closed among it.
/// A stream that is captured must not be asked.
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

/// Exact sizes and fixed slots on a device: enqueues the next calls on another stream of the device.
/// With exact sizes they come behind all that the stream before was given; in fixed slots the caller
/// orders the streams by events. Local. Other layers refuse it by name.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_ep_set_stream(ep: *mut Ep, stream: *mut Stream) -> Status {
    border(|| {
        let (layer, stream) = (get(ep)?, get(stream)?);
        layer.seat.lend(|ep| Ok(ep.set_stream(&stream)?))
    })
}

/// Waits until everything in the layer's stream is done, and says how it went: SIDELANE_OK, the
/// reason of the world's failure, or what a kernel has found. If a live rank is silent for longer
/// than the world's deadline, the world ends. On the host there is nothing to wait for.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_ep_synchronize(ep: *mut Ep) -> Status {
    border(|| get(ep)?.seat.lend(|ep| Ok(ep.synchronize()?)))
}

/// What is known to be wrong, without waiting: SIDELANE_OK, the reason of the world's failure, or
/// what a kernel has found. Local.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_ep_check(ep: *mut Ep) -> Status {
    border(|| get(ep)?.seat.lend(|ep| Ok(ep.check()?)))
}
