//! Messages between two ranks, in parts.
//!
//! ```text
//!   sender                                                         receiver
//!   Wait     taken of part n - 2  (a slot is free)
//!   Put      part n  --------------------------------------------> slot n mod 2 of this sender
//!   Signal   block = n, tag: how many bytes the message has  ----> Wait  block >= n
//!                                                                  copy to the caller
//!   read  <------------------------------------------------------- Signal  read = n, and how many were refused
//! ```
//!
//! Each ordered pair of ranks has two slots at the receiver, and numbers its parts: so a pair's
//! messages match in the order of sending, and a sender is at most two parts ahead. A message of no
//! bytes has one part.

use std::ops::Range;

use super::{Copied, RankView};
use crate::schedule::{Calls, Flag, FlagValue, Op, OperandId, PutSource, SpanCopy, TrackOp, WindowId};

/// Parts that a sender may be ahead.
const AHEAD: u64 = 2;

/// One direction between this rank and a peer: how many parts have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageChannel {
    /// The other rank.
    pub peer: u32,
    parts: Calls,
    first: u64,
}

impl MessageChannel {
    /// None yet, in a world of this epoch.
    pub fn new(peer: u32, epoch: u16) -> Self {
        let parts = Calls::new(epoch);
        MessageChannel { peer, parts, first: parts.value() }
    }

    /// Goes on to the next part.
    pub fn advance(&mut self) {
        self.parts.enter();
    }

    /// The number of the running part, as flags have it.
    pub fn value(&self) -> u64 {
        self.parts.value()
    }

    /// The part whose slot the running part reuses, if there is one.
    pub fn freed(&self) -> Option<u64> {
        self.value().checked_sub(AHEAD * Calls::STEP).filter(|&value| value > self.first)
    }

    /// The part before the running one whose answer has not been heard, if there is one.
    pub fn last(&self) -> Option<u64> {
        Some(self.value()).filter(|&value| value > self.first)
    }

    /// Bytes of the message that its part `nth` has.
    pub fn part(view: &RankView, len: u64, nth: u64) -> Range<u64> {
        let slot = view.staging.slot();
        (nth * slot).min(len)..((nth + 1) * slot).min(len)
    }

    /// Number of parts of a message.
    pub fn parts(view: &RankView, len: u64) -> u64 {
        len.div_ceil(view.staging.slot()).max(1)
    }

    /// The sender's wait for the slot.
    pub fn free(&self) -> TrackOp {
        item(Op::Wait { from: self.peer, flag: Flag::Read, level: FlagValue::Call })
    }

    /// The sender's put, and its word.
    pub fn send(&self, view: &RankView) -> [TrackOp; 2] {
        let signal = Op::Signal { to: self.peer, of: view.me, flag: Flag::Block, level: FlagValue::Call };
        [item(Op::Put { to: self.peer, operand: OperandId(0) }), item(signal)]
    }

    /// Bytes that the put moves.
    pub fn sent(&self, view: &RankView, bytes: Range<u64>) -> SpanCopy {
        SpanCopy {
            from: PutSource::Input,
            from_offset: bytes.start,
            to: WindowId::POOL,
            to_offset: view.staging.pair(view.me, self.parts.parity()),
            len: bytes.end - bytes.start,
        }
    }

    /// The receiver's wait.
    pub fn receive(&self) -> TrackOp {
        item(Op::Wait { from: self.peer, flag: Flag::Block, level: FlagValue::Call })
    }

    /// Bytes that the receiver copies.
    pub fn received(&self, view: &RankView, bytes: Range<u64>) -> Copied {
        let offset = view.staging.pair(self.peer, self.parts.parity());
        Copied { owner: view.me, offset, at: bytes.start, len: bytes.end - bytes.start }
    }

    /// The receiver's answer, which frees the slot, and carries the number of messages that it has
    /// refused so far, modulo 256.
    pub fn answer(&self, view: &RankView, refused: u8) -> TrackOp {
        let level = if refused > 0 { FlagValue::Part(refused) } else { FlagValue::Call };
        item(Op::Signal { to: self.peer, of: view.me, flag: Flag::Read, level })
    }
}

/// One part of two messages that pass each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessagePart {
    /// Whether it is of the message that this rank sends.
    pub sends: bool,
    /// Which part of its message.
    pub nth: u64,
}

impl MessagePart {
    /// The order in which a rank sends and receives these numbers of parts at once: in turn, so
    /// that no more parts lie unread between two ranks than there are slots.
    pub fn both(sends: u64, receives: u64) -> impl Iterator<Item = MessagePart> {
        (0..sends.max(receives)).flat_map(move |nth| Self::parts(nth, sends, receives).into_iter().flatten())
    }

    /// The `nth` parts of both messages, where they have so many.
    pub fn parts(nth: u64, sends: u64, receives: u64) -> [Option<MessagePart>; 2] {
        [(true, sends), (false, receives)]
            .map(|(sends, parts)| (nth < parts).then_some(MessagePart { sends, nth }))
    }
}

fn item(op: Op) -> TrackOp {
    TrackOp { track: 0, op }
}
