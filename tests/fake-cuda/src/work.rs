//! What can stand in a stream.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::kernels::Launch;

/// One entry of a stream.
#[derive(Clone)]
pub enum Work {
    /// Moves bytes, at any time until later work of the stream needs them moved.
    Late(Late),
    Memory(Arc<[MemoryOperation]>),
    Kernel(Launch),
    Host(HostCall),
    Record(Arc<Mark>),
    Await(Arc<Mark>),
    /// Nothing, but it needs all before it.
    Flush,
}

/// Work that the rules let run late.
#[derive(Clone)]
pub enum Late {
    Copies(Arc<Copies>),
    Fill { to: u64, pattern: Arc<[u8]>, count: usize },
}

/// Copies in no order among themselves: a batch, or one copy alone.
pub struct Copies {
    pub all: Vec<Copy>,
    /// Whether pageable memory of the host may take part.
    pub pageable: bool,
}

/// One range to another.
#[derive(Clone)]
pub struct Copy {
    pub to: u64,
    pub from: Source,
    pub bytes: usize,
    /// The wish `CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`.
    pub overlap: bool,
}

/// Where a copy's bytes are when it runs.
#[derive(Clone)]
pub enum Source {
    At(u64),
    /// Read when the copy was enqueued, which its access order allowed.
    Kept(Vec<u8>),
}

/// A stream memory operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOperation {
    /// `fenced`: every observer of the value sees all earlier work of the stream.
    Write {
        at: u64,
        value: u64,
        width: Width,
        fenced: bool,
    },
    Wait {
        at: u64,
        value: u64,
        width: Width,
        until: Until,
    },
    Barrier,
}

/// Bytes of the word of a memory operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    Four,
    Eight,
}

/// Condition of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// At or past the value, counting round the end of the word.
    Reached,
    Equal,
    AnyBit,
    AnyZero,
}

impl Width {
    pub fn bytes(self) -> usize {
        match self {
            Width::Four => 4,
            Width::Eight => 8,
        }
    }
}

impl Until {
    /// Whether a word that holds `seen` ends the wait for `value`.
    pub fn holds(self, seen: u64, value: u64, width: Width) -> bool {
        match (self, width) {
            (Until::Reached, Width::Four) => (seen as u32).wrapping_sub(value as u32) as i32 >= 0,
            (Until::Reached, Width::Eight) => seen.wrapping_sub(value) as i64 >= 0,
            (Until::Equal, _) => seen == value,
            (Until::AnyBit, _) => seen & value != 0,
            (Until::AnyZero, Width::Four) => !(seen as u32 | value as u32) != 0,
            (Until::AnyZero, Width::Eight) => !(seen | value) != 0,
        }
    }
}

/// A host function and its argument.
#[derive(Clone, Copy)]
pub struct HostCall {
    pub function: unsafe extern "C" fn(*mut c_void),
    pub argument: *mut c_void,
}

// SAFETY: the caller gave the pointer for use on a thread of the driver.
unsafe impl Send for HostCall {}
// SAFETY: as above; nothing here looks behind the pointer.
unsafe impl Sync for HostCall {}

/// A point in a stream, reached once.
#[derive(Default)]
pub struct Mark {
    reached: AtomicBool,
    when: OnceLock<Instant>,
}

impl Mark {
    pub fn reach(&self) {
        self.when.get_or_init(Instant::now);
        self.reached.store(true, Ordering::Release);
    }

    pub fn is_reached(&self) -> bool {
        self.reached.load(Ordering::Acquire)
    }

    /// When it was reached.
    pub fn when(&self) -> Option<Instant> {
        self.when.get().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::{Until::*, Width::*};

    #[test]
    fn reached_counts_round_the_end_of_the_word() {
        assert!(Reached.holds(3, u64::from(u32::MAX), Four));
        assert!(!Reached.holds(u64::from(u32::MAX), 3, Four));
        assert!(Reached.holds(0, u64::MAX, Eight));
        assert!(!Reached.holds(3, u64::from(u32::MAX), Eight));
    }

    #[test]
    fn the_other_conditions_look_at_bits() {
        assert!(Equal.holds(7, 7, Eight) && !Equal.holds(6, 7, Eight));
        assert!(AnyBit.holds(0b10, 0b11, Four) && !AnyBit.holds(0b100, 0b11, Four));
        assert!(AnyZero.holds(0b10, !0b11, Four) && !AnyZero.holds(0b11, u64::from(!0b11u32), Four));
        assert!(AnyZero.holds(u64::from(u32::MAX), 0, Eight));
    }
}
