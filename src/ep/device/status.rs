//! How a call ended, in a word that kernels can read.

use crate::error::{CallError, Error, MemoryError};

/// How the last call of a dispatch or its combines ended at this rank. Not 0: nothing moved, and
/// sums are zeros. A combine of a dispatch that was refused ends as that did.
///
/// | value | |
/// |---|---|
/// | 0 | well |
/// | 1 | this rank's input was refused |
/// | 2 | another rank's input was refused |
/// | 3 | a rank has no room, or more rows than its budget |
/// | 4 | ranks make different calls |
/// | 65536 | the world has failed |
///
/// In slots, each other value than 0 and 65536 is a [`KernelFault`](crate::error::KernelFault) that
/// a kernel has found: with a budget that graphs hold, also that a rank is over it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status(pub u32);

impl Status {
    /// All is well.
    pub const OK: Status = Status(0);
    /// This rank's input was refused.
    pub const REFUSED: Status = Status(1);
    /// Another rank's input was refused.
    pub const PEER_REFUSED: Status = Status(2);
    /// A rank has no room, or more rows than its budget.
    pub const NO_ROOM: Status = Status(3);
    /// Ranks make different calls.
    pub const MISMATCH: Status = Status(4);
    /// The world has failed.
    pub const WORLD_FAILED: Status = Status(1 << 16);

    /// That of an error which leaves the world alive.
    pub(super) fn of(error: &Error) -> Self {
        match error {
            Error::Memory(MemoryError::OutOfSpace { .. }) | Error::Call(CallError::OverBudget { .. }) => {
                Status::NO_ROOM
            }
            Error::Call(CallError::PeerRefused { .. }) => Status::PEER_REFUSED,
            Error::Call(CallError::KindsDiffer { .. } | CallError::Disagree { .. }) => Status::MISMATCH,
            _ => Status::REFUSED,
        }
    }
}
