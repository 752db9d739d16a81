//! The lock of the driver in this process (`SIDELANE_FAKE_CUDA_LOCKS`): calls that wait for the
//! device hold it meanwhile.
//!
//! ```text
//!   thread a   cuMemFree     |== holds it: waits until the device is drained ==|
//!   thread b   cuMemcpyAsync      ........ stands at the door ................ |--
//! ```
//!
//! Which calls wait with it held is not in CUDA's manual. It was seen of libcuda: memory that is
//! freed, modules that are loaded, kernels that are loaded at their first launch, and launches into
//! a queue that is full.

use std::cell::Cell;
use std::sync::{Condvar, Mutex};

use crate::counters::{COUNTERS, add};
use crate::driver::settings;

/// Whether a thread holds it.
static HELD: Mutex<bool> = Mutex::new(false);
static LET_GO: Condvar = Condvar::new();

thread_local! {
    /// A thread that holds it passes.
    static MINE: Cell<bool> = const { Cell::new(false) };
}

fn is_on() -> bool {
    settings().is_ok_and(|settings| settings.locks)
}

/// Waits until no other thread holds the lock. Every call of the driver that needs more than its
/// thread begins so.
pub fn pass() {
    if is_on() && !MINE.get() {
        let mut held = HELD.lock().unwrap();
        while *held {
            held = LET_GO.wait(held).unwrap();
        }
    }
}

/// Runs something that waits for the device, with the lock held.
pub fn hold<T>(wait: impl FnOnce() -> T) -> T {
    if !is_on() || MINE.get() {
        return wait();
    }
    let mut held = HELD.lock().unwrap();
    while *held {
        held = LET_GO.wait(held).unwrap();
    }
    *held = true;
    drop(held);
    add(&COUNTERS.lock_holds, 1);
    MINE.set(true);
    let done = wait();
    MINE.set(false);
    *HELD.lock().unwrap() = false;
    LET_GO.notify_all();
    done
}
