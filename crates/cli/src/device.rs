//! Common parts of ranks and checks on a device: its streams, its memory, and waits that end.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sidelane::device::{Allocation, ByteSpan, Context, DeviceRange, Driver, Priority, Reservation, Stream};
use sidelane::error::DeviceError;

use crate::error::{CliError, failed};

/// Variables that ranks and checks need unless they are set: queues enough that ranks of one GPU do
/// not wait behind each other.
pub const VARIABLES: [(&str, &str); 1] = [("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// Those of some variables that are not set.
pub fn missing<'v>(variables: impl IntoIterator<Item = (&'v str, &'v str)>) -> Vec<(String, OsString)> {
    let missing = variables.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    missing.map(|(name, value)| (name.to_owned(), value.into())).collect()
}

/// Why no other process can use the device, if that is so.
pub fn one_process(driver: &Driver, device: u32) -> Result<Option<&'static str>, DeviceError> {
    const REASON: &str = "the GPU's compute mode allows one process at a time (nvidia-smi -c DEFAULT)";
    Ok((!driver.device(device)?.several_processes).then_some(REASON))
}

/// A stream of its own.
pub fn stream(context: &Arc<Context>) -> Result<Stream, DeviceError> {
    Stream::new(context, Priority::Normal)
}

/// New memory of the device.
pub fn allocate(context: &Arc<Context>, bytes: u64) -> Result<DeviceRange, DeviceError> {
    let allocation = Allocation::new(context, bytes)?;
    let reservation = Reservation::new(context, 1, allocation.bytes())?;
    reservation.map(0, &allocation, &[context.device()])?.part(0, bytes)
}

/// All of a range.
pub fn whole(range: &DeviceRange) -> Result<ByteSpan<'_>, DeviceError> {
    range.span(0, range.len())
}

/// Waits until the stream is done, but not for ever.
pub fn finish(stream: &Stream, what: &str, patience: Duration) -> Result<(), CliError> {
    until(what, patience, || stream.is_done())
}

/// Waits for something, but not for ever.
pub fn until(
    what: &str,
    patience: Duration,
    mut done: impl FnMut() -> Result<bool, DeviceError>,
) -> Result<(), CliError> {
    let start = Instant::now();
    while !done()? {
        let waited = start.elapsed();
        if waited > patience {
            return Err(failed!("{what} did not end within {waited:?}"));
        }
        std::thread::yield_now();
    }
    Ok(())
}
