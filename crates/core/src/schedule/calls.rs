//! How a rank counts its calls, and what hangs on the count.
//!
//! There is one count for all kinds of calls, because every rank enters every call, also a refused
//! one, and one in which ranks find that their calls differ. A count of dispatches alone would
//! drift apart there.

/// The calls one rank has entered on one `ExpertParallel`.
///
/// ```
/// let mut calls = sidelane_core::schedule::Calls::new(3);
/// calls.enter();
/// calls.returned();
/// calls.enter();
/// assert_eq!((calls.number(), calls.value()), (2, 3 << 48 | 2 << 8));
/// assert_eq!((calls.parity(), calls.last_return()), (0, 3 << 48 | 1 << 8));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calls {
    running: u64,
    last_return: u64,
}

/// Bits of a value that count the parts of a call. Above them: 40 bits for the number of the call,
/// 16 for the epoch.
const PART_BITS: u32 = 8;
const NUMBER_BITS: u32 = 40;

impl Calls {
    /// By how much the value of a call exceeds that of the call before.
    pub const STEP: u64 = 1 << PART_BITS;

    /// None yet, in a world of this epoch.
    pub fn new(epoch: u16) -> Self {
        Calls { running: u64::from(epoch) << (PART_BITS + NUMBER_BITS), last_return: 0 }
    }

    /// Enters the next call, whatever it is and whatever becomes of it.
    pub fn enter(&mut self) {
        self.running += Self::STEP;
    }

    /// The running call let peers read this rank's memory: they will confirm with its value.
    pub fn returned(&mut self) {
        self.last_return = self.running;
    }

    /// Value to which the running call raises its flags:
    /// [`FlagValue::Call`](super::FlagValue::Call).
    pub fn value(&self) -> u64 {
        self.running
    }

    /// What peers raise their `Read` flags to, once all that was offered is read:
    /// [`FlagValue::LastReturn`](super::FlagValue::LastReturn).
    pub fn last_return(&self) -> u64 {
        self.last_return
    }

    /// The number of the running call, from 1: the name of its handle, and of the call in errors.
    pub fn number(&self) -> u64 {
        self.running >> PART_BITS & (u64::MAX >> (u64::BITS - NUMBER_BITS))
    }

    /// Which of two tags, publications, messages and headers the running call takes.
    pub fn parity(&self) -> u64 {
        Self::parity_of(self.running)
    }

    /// The parity of the call that a flag was raised in.
    pub fn parity_of(value: u64) -> u64 {
        value >> PART_BITS & 1
    }
}
