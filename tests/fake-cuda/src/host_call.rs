//! Host functions in stream order. They may not call the driver.

use std::cell::Cell;

use crate::code::{Code, Result};
use crate::work::HostCall;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs one.
pub fn run(call: HostCall) {
    INSIDE.set(true);
    // SAFETY: the caller of `cuLaunchHostFunc` vouches for the function and its argument.
    unsafe { (call.function)(call.argument) };
    INSIDE.set(false);
}

/// Refuses calls of the driver from within one.
pub fn outside() -> Result<()> {
    if INSIDE.get() { Err(Code::NOT_PERMITTED) } else { Ok(()) }
}
