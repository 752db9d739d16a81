//! How libibverbs says that a call failed: by errno, or by returning it.

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

use rustix::io::Errno;

/// The errno of this thread's last call.
pub fn last() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(Errno::IO.raw_os_error())
}

/// Calls that return an object, or nothing and set errno.
pub fn object<T>(returned: *mut T) -> Result<NonNull<T>, i32> {
    NonNull::new(returned).ok_or_else(last)
}

/// Calls that return 0, or an errno, or -1 and set errno: the manual pages promise one or the
/// other, drivers do both.
pub fn status(returned: c_int) -> Result<(), i32> {
    match returned {
        0 => Ok(()),
        errno @ 1.. => Err(errno),
        _ => Err(last()),
    }
}
