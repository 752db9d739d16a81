//! Words that streams write and wait for.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::code::Result;
use crate::memory::Engine;
use crate::work::Width;

/// Writes a word; every observer of it sees the earlier writes.
pub fn write(engine: &Engine, at: u64, value: u64, width: Width) -> Result<()> {
    engine.word(at, width.bytes(), true, || match width {
        // SAFETY: `word` keeps the word mapped, and the call that enqueued it refused misaligned
        // addresses.
        Width::Four => unsafe { AtomicU32::from_ptr(at as *mut _) }.store(value as u32, Ordering::Release),
        // SAFETY: as above.
        Width::Eight => unsafe { AtomicU64::from_ptr(at as *mut _) }.store(value, Ordering::Release),
    })
}

/// Reads a word; earlier writes are visible after it.
pub fn read(engine: &Engine, at: u64, width: Width) -> Result<u64> {
    engine.word(at, width.bytes(), false, || match width {
        // SAFETY: as in `write`.
        Width::Four => unsafe { AtomicU32::from_ptr(at as *mut _) }.load(Ordering::Acquire).into(),
        // SAFETY: as in `write`.
        Width::Eight => unsafe { AtomicU64::from_ptr(at as *mut _) }.load(Ordering::Acquire),
    })
}
