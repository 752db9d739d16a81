//! What lines do.

use sidelane_core::schedule::Flag;

use super::Phase;

/// A line of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    Host,
    Stream,
    Compute,
    Card,
}

/// One thing that a line does before the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// Is busy.
    Busy(u64),
    /// Copies, one after the other, between ranks of one node or within one.
    Copy { to: u32, from: u32, copies: u64, bytes: u64 },
    /// Messages to a rank of another node; `rest` bytes of the same follow.
    Send { to: u32, messages: u64, bytes: u64, rest: u64 },
    /// Raises a word at `to`.
    Signal { to: u32, of: u32, flag: Flag, value: u64 },
    /// Waits for a word of its own rank.
    Wait { of: u32, flag: Flag, value: u64 },
    /// Hands a task to another line of the rank, and goes on.
    Hand(Line, Box<Task>),
    /// Waits until another line of the rank has nothing to do.
    Join(Line),
    /// A phase is over.
    Mark(Phase),
}
