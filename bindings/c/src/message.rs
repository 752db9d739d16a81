//! The sentence that belongs to the last status of a thread that was not `SIDELANE_OK`.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps a sentence until the next one.
pub fn keep(sentence: String) {
    let mut bytes = sentence.into_bytes();
    bytes.retain(|&byte| byte != 0);
    // A thread that is ending may have no place for it any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = CString::new(bytes).unwrap_or_default());
}

/// Where the sentence lies.
pub fn last() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
