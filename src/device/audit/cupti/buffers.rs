//! Buffers that CUPTI fills. It asks for them and gives them back on threads of its own, by
//! callbacks that take no argument of ours: so they lie in a static until they are read.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// Words of a buffer: a mebibyte, thousands of records. Records begin at multiples of eight.
const WORDS: usize = 1 << 17;

static FILLED: Mutex<Vec<Filled>> = Mutex::new(Vec::new());

/// A buffer with records.
pub struct Filled {
    pub words: Box<[u64]>,
    /// Bytes that hold records.
    pub valid: usize,
}

/// What came back since the last call.
pub fn take() -> Vec<Filled> {
    std::mem::take(&mut *FILLED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// # Safety
/// As [`Request`](super::ffi::Request) says: three places for results.
pub unsafe extern "C" fn request(buffer: *mut *mut u8, size: *mut usize, records: *mut usize) {
    let words = Box::into_raw(vec![0_u64; WORDS].into_boxed_slice());
    // SAFETY: by the contract; the receiver of the buffer gives it back to `complete`.
    unsafe {
        buffer.write(words.cast());
        size.write(WORDS * 8);
        records.write(0);
    }
}

/// # Safety
/// As [`Complete`](super::ffi::Complete) says: the buffer is from [`request`], and no code uses it
/// any more.
pub unsafe extern "C" fn complete(
    _context: *mut c_void,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    valid: usize,
) {
    if buffer.is_null() {
        return;
    }
    let words = std::ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), WORDS);
    // SAFETY: made by `request`, all of the same length, and given back once.
    let words = unsafe { Box::from_raw(words) };
    let filled = Filled { words, valid: valid.min(WORDS * 8) };
    FILLED.lock().unwrap_or_else(PoisonError::into_inner).push(filled);
}
