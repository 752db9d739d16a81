//! A flag word, in a cache line of its own.
//!
//! ```text
//!   byte 0    value: epoch, number of the call, part of the call; one writer, only grows
//!   byte 8    number of threads that sleep on it
//!   byte 16   tag of even calls        kind and refusal, options | handle | base
//!   byte 40   tag of odd calls
//! ```
//!
//! The tag is written before the value and read after it. Two tags are enough: a writer can be one
//! call ahead of a reader, never two, because each call waits for the entry of every rank.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::thread::futex;

use crate::bootstrap::wait::futex_for;
use crate::memory::access;
use crate::schedule::{Calls, ControlLayout, Tag};
use crate::sync::flag::FlagWords;

/// View of one flag line in mapped memory.
#[derive(Clone, Copy, Debug)]
pub struct FlagLine<'a> {
    words: &'a [AtomicU64; 8],
}

impl<'a> FlagLine<'a> {
    /// A line at this address.
    ///
    /// # Safety
    /// 64 bytes, aligned to 8, mapped for `'a`, used as a flag line by every process that maps
    /// them.
    pub unsafe fn new(at: NonNull<u8>) -> Self {
        // SAFETY: by the contract above; atomics may be shared with other processes.
        FlagLine { words: unsafe { at.cast().as_ref() } }
    }

    /// The current value, with everything its writer did before.
    #[inline]
    pub fn value(self) -> u64 {
        self.flag().value()
    }

    /// Raises the value, tag first, and wakes its sleepers. For the word's only writer.
    #[inline]
    pub fn raise(self, value: u64, tag: Option<&Tag>) {
        if let Some(tag) = tag {
            for (word, value) in self.words[tag_at(value)..].iter().zip(tag.to_words()) {
                // The value's release, below, publishes it. Tags of two values in turn lie apart,
                // so a slow reader of the last tag does not see this one.
                word.store(value, Ordering::Relaxed);
            }
        }
        self.flag().raise(value, full_fence, || self.wake());
    }

    #[cold]
    fn wake(self) {
        let _ = futex::wake(self.low_half(), futex::Flags::empty(), u32::MAX >> 1);
    }

    /// The tag that came with this value.
    pub fn tag(self, value: u64) -> Tag {
        let at = tag_at(value);
        access::read(self.words[at].as_ptr().cast(), ControlLayout::TAG_BYTES);
        // Relaxed: the caller has loaded the value with acquire, and the tag lies behind it.
        Tag::from_words(std::array::from_fn(|i| self.words[at + i].load(Ordering::Relaxed)))
    }

    /// First byte of the tag that comes with this value.
    pub(super) fn tag_offset(value: u64) -> u64 {
        tag_at(value) as u64 * 8
    }

    /// Sleeps until the value is no longer `seen`, or for `slice`.
    pub fn sleep(self, seen: u64, slice: Duration) {
        self.flag().sleep(seen, || futex_for(self.low_half(), seen as u32, slice));
    }

    fn flag(self) -> FlagWords<'a> {
        FlagWords::new(&self.words[0], half(&self.words[1], 0))
    }

    /// A futex is 32 bits wide: the half that changes with every value.
    fn low_half(self) -> &'a AtomicU32 {
        half(&self.words[0], if cfg!(target_endian = "little") { 0 } else { 1 })
    }
}

/// A fence of all orders. On x86-64 the compiler makes a locked instruction of one, during which
/// readers of the line that was just written have to wait: between distant cores that was a quarter
/// of a signal's way.
#[inline]
fn full_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has SSE2.
    unsafe {
        std::arch::x86_64::_mm_mfence()
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

fn tag_at(value: u64) -> usize {
    ((ControlLayout::TAGS + Calls::parity_of(value) * ControlLayout::TAG_BYTES) / 8) as usize
}

fn half(word: &AtomicU64, index: usize) -> &AtomicU32 {
    // SAFETY: an aligned 8-byte word holds two aligned 4-byte words; both views are atomic.
    unsafe { &*(word.as_ptr().cast::<AtomicU32>().add(index)) }
}
