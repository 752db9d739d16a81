//! What this room asks of the kernel everywhere: to wait, and to say what went wrong.

use std::{
    io,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, Timespec, poll},
    io::Errno,
};

use crate::error::BootstrapError;

/// Waits until a descriptor is ready or the time has come. Being interrupted counts as ready.
pub(super) fn wait(fds: &mut [PollFd<'_>], until: Instant) -> Result<(), BootstrapError> {
    // Rounded up to a millisecond, so that a wait does not end just before its time, again and
    // again.
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
    let left = Duration::from_millis(left.as_millis().try_into().unwrap_or(u64::MAX));
    let left = Timespec::try_from(left).ok();
    match poll(fds, left.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(system("poll", errno)),
    }
}

/// The error of a system call.
pub(super) fn system(call: &'static str, errno: Errno) -> BootstrapError {
    BootstrapError::System { call, errno: errno.raw_os_error() }
}

/// The error of a call of the standard library.
pub(super) fn failed(call: &'static str, error: &io::Error) -> BootstrapError {
    BootstrapError::System { call, errno: error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()) }
}
