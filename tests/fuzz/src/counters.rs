//! Counters of LLVM: one byte for each edge of code that was compiled with them.
//!
//! Code that was compiled so calls the function below before `main`, once for each crate. The
//! counters of a crate lie side by side, and are written by the threads that run its code. So a
//! campaign runs one target alone.
#![allow(unsafe_code, reason = "memory that the compiler names by its bounds")]

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::Feature;

/// The counters of a crate.
#[derive(Clone, Copy)]
struct Counters(&'static [AtomicU8]);

static ALL: Mutex<Vec<Counters>> = Mutex::new(Vec::new());

/// Instrumented code calls this as it is loaded.
///
/// # Safety
/// The compiler's: from `start` to `end` are counters that live as long as the program.
#[unsafe(no_mangle)]
unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, end: *mut u8) {
    // SAFETY: both are bounds of the same counters.
    let len = usize::try_from(unsafe { end.offset_from(start) }).unwrap_or_default();
    // SAFETY: as the caller promised. Instrumented code writes bytes without order, as relaxed
    // stores do on this machine; a count that is lost costs an edge, and no more.
    let counters = unsafe { std::slice::from_raw_parts(start.cast::<AtomicU8>(), len) };
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    // A crate may say so again.
    if !all.iter().any(|Counters(other)| std::ptr::eq(*other, counters)) {
        all.push(Counters(counters));
    }
}

fn all() -> Vec<Counters> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Whether any code of this program counts.
pub fn exist() -> bool {
    !all().is_empty()
}

/// Nothing was taken from here on.
pub fn reset() {
    for Counters(counters) in all() {
        counters.iter().for_each(|counter| counter.store(0, Ordering::Relaxed));
    }
}

/// The edges that were taken since then, and about how often each.
pub fn taken() -> Vec<Feature> {
    let counters = all();
    let counters = counters.iter().flat_map(|Counters(counters)| counters.iter());
    let counts = counters.map(|counter| counter.load(Ordering::Relaxed)).enumerate();
    // 1, 2 to 3, 4 to 7 ..: loops that run once more are no news.
    counts.filter(|&(_, count)| count > 0).map(|(edge, count)| (edge, count.ilog2() as u8)).collect()
}
