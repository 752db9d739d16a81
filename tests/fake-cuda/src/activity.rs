//! Activities of the devices, for clients of CUPTI: kernels and copies, once they have run, with
//! the queue that took them.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Kinds of records, by CUPTI's numbers.
pub const MEMCPY: u32 = 1;
pub const CONCURRENT_KERNEL: u32 = 10;
pub const MEMCPY2: u32 = 22;

/// Queues, by CUPTI's numbers: for multiprocessors, for copy engines.
pub const COMPUTE: u32 = 1;
pub const ASYNC_MEMCPY: u32 = 2;

/// A bit for each kind that a client wants.
static WANTED: AtomicU32 = AtomicU32::new(0);
static DONE: Mutex<Vec<Activity>> = Mutex::new(Vec::new());

/// Something that was done.
pub struct Activity {
    pub kind: u32,
    pub start: u64,
    pub end: u64,
    /// Of a kernel. Names last as long as the process.
    pub name: Option<&'static CStr>,
    /// Of a copy.
    pub bytes: u64,
    pub channel: u32,
}

/// Says whether a kind is wanted; false if there is none of that number.
pub fn want(kind: u32, wanted: bool) -> bool {
    let known = [MEMCPY, CONCURRENT_KERNEL, MEMCPY2].contains(&kind);
    if known && wanted {
        WANTED.fetch_or(1 << kind, Ordering::Relaxed);
    } else if known {
        WANTED.fetch_and(!(1 << kind), Ordering::Relaxed);
    }
    known
}

/// Activities since the last call.
pub fn take() -> Vec<Activity> {
    std::mem::take(&mut *DONE.lock().unwrap())
}

/// Nanoseconds of the one clock that all devices have; never 0.
pub fn now() -> u64 {
    static ZERO: OnceLock<Instant> = OnceLock::new();
    ZERO.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1
}

/// A kernel that began then has run.
pub fn kernel(name: &'static CStr, start: u64) {
    note(Activity {
        kind: CONCURRENT_KERNEL,
        start,
        end: now(),
        name: Some(name),
        bytes: 0,
        channel: COMPUTE,
    });
}

/// A copy that began then has run.
pub fn copy(kind: u32, bytes: u64, channel: u32, start: u64) {
    note(Activity { kind, start, end: now(), name: None, bytes, channel });
}

fn note(activity: Activity) {
    if WANTED.load(Ordering::Relaxed) & 1 << activity.kind != 0 {
        DONE.lock().unwrap().push(activity);
    }
}

/// A name that lasts as long as the process; each is kept once.
pub fn lasting(name: &str) -> &'static CStr {
    static NAMES: Mutex<BTreeSet<&'static CStr>> = Mutex::new(BTreeSet::new());
    let name = CString::new(name).unwrap_or_default();
    let mut names = NAMES.lock().unwrap();
    if let Some(known) = names.get(name.as_c_str()) {
        return known;
    }
    let kept: &'static CStr = Box::leak(name.into_boxed_c_str());
    names.insert(kept);
    kept
}
