//! Streams of the caller's.

use std::ffi::c_void;

use sidelane::device::{Driver, Stream as Borrowed};

use super::memory::Out;
use super::objects::Stream;
use super::{border, close, give};
use crate::Status;

/// Names a stream of the caller's, on a device by its number: a `cudaStream_t` or `CUstream`, NULL for the legacy default stream. Loads the driver,
/// and uses the device's primary context, as the CUDA runtime does. Local.
///
/// The caller's word: `cuda_stream` is NULL or a stream, which is not destroyed before the handle, every exchange that was built
/// with it and every dispatch of these are closed or finished; `stream` is NULL or valid.
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
        // SAFETY: as the caller promised: whoever closes an exchange and this handle has let go of it.
        give(unsafe { Borrowed::borrow(&context, cuda_stream) }?, out)
    })
}

/// Lets go of what the stream used, if it is idle now: memory of exchanges that were closed among it. A stream that is captured must
/// not be asked.
pub(super) fn let_go(stream: &Borrowed) {
    if stream.is_capturing() == Ok(false) {
        let _ = stream.is_done();
    }
}

/// Closes the handle; the stream stays the caller's. Exchanges that were built with it keep it until they are closed. NULL is
/// nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_stream_close(stream: *mut Stream) -> Status {
    close(stream)
}
