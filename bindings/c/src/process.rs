//! The process that owns the handles.
//!
//! `fork` copies memory and one thread of many: the child has neither the threads that keep a world
//! alive nor a rank of its own, and its locks may stay locked forever. So the process that gets the
//! first handle owns them all, and every call first checks that it runs in that process. The check
//! takes no lock.

use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::fault::Fault;

/// The process that handles belong to; 0 before the first.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Whether this process may use the library.
pub fn check() -> Result<(), Fault> {
    match OWNER.load(Ordering::Acquire) {
        0 => Ok(()),
        parent => {
            let child = process::id();
            if parent == child { Ok(()) } else { Err(Fault::Forked { child, parent }) }
        }
    }
}

/// Handles are this process's from now on.
pub fn own() {
    let _ = OWNER.compare_exchange(0, process::id(), Ordering::AcqRel, Ordering::Acquire);
}
