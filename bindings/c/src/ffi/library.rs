//! The library itself: its version, and its last message.

use std::ffi::c_char;

use crate::{Status, message};

/// The version of the library, as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The name of a status, as "SIDELANE_ERROR_PLAN"; "unknown status" if it is none.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_status_name(status: i32) -> *const c_char {
    Status::from_code(status).map_or(c"unknown status", Status::name).as_ptr()
}

/// Message of the last call on this thread that did not return SIDELANE_OK, in a sentence. It may
/// be read until the next such call on this thread. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_last_message() -> *const c_char {
    message::last()
}
