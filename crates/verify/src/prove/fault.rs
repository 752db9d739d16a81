//! What can be wrong with a story, and where.

use std::fmt;
use std::ops::Range;

use sidelane_core::schedule::{FlagValue, Op, WindowId};

use crate::unroll::Role;

/// One operation, or one touch of the planner or the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpRef {
    /// The owner.
    pub rank: u32,
    /// What of the rank does it.
    pub role: Role,
    /// In which call of the story.
    pub call: usize,
    /// In which stage; touches come before its operations.
    pub stage: &'static str,
    /// Position in the stage.
    pub index: usize,
    /// The access.
    pub what: AccessKind,
}

/// What an [`OpRef`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// An operation, with the value of its flag.
    Op(Op, u64),
    /// The planner or the caller reads this.
    Reads(&'static str),
    /// The planner or the caller writes this.
    Writes(&'static str),
}

/// The first thing found wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProofFailure {
    /// An operation waits for ever.
    #[error("deadlock on {queues} queues: {op} has {seen:#x}, and no operation raises it further")]
    Deadlock {
        /// Onto how many queues the tracks were folded.
        queues: u32,
        /// The wait.
        op: OpRef,
        /// The value the word has.
        seen: u64,
    },
    /// Two accesses to the same bytes, one of them a write, that nothing orders.
    #[error("race: {a} and {b} on bytes {bytes:?} of rank {owner}'s {}", name(*window))]
    Race {
        /// One access.
        a: OpRef,
        /// The other.
        b: OpRef,
        /// Owner of the window.
        owner: u32,
        /// Which window.
        window: WindowId,
        /// The bytes.
        bytes: Range<u64>,
    },
    /// Bytes are read that their call did not write, or writes only later.
    #[error("unwritten: {reader} finds bytes {bytes:?} of rank {owner}'s {} not written by call {of}", name(*window))]
    Unwritten {
        /// The reader.
        reader: OpRef,
        /// The call that should have written them.
        of: usize,
        /// Owner of the window.
        owner: u32,
        /// Which window.
        window: WindowId,
        /// The first bytes missing.
        bytes: Range<u64>,
    },
    /// Bytes are written twice in one call.
    #[error("written twice: {a} and {b} on bytes {bytes:?} of rank {owner}'s {}", name(*window))]
    WrittenTwice {
        /// One write.
        a: OpRef,
        /// The other.
        b: OpRef,
        /// Owner of the window.
        owner: u32,
        /// Which window.
        window: WindowId,
        /// The bytes.
        bytes: Range<u64>,
    },
    /// Bytes are overwritten before their last reader.
    #[error("overwritten: {writer} comes before {reader} on bytes {bytes:?} of rank {owner}'s {}", name(*window))]
    Overwritten {
        /// The later call's write.
        writer: OpRef,
        /// The reader that came too late.
        reader: OpRef,
        /// Owner of the window.
        owner: u32,
        /// Which window.
        window: WindowId,
        /// The bytes.
        bytes: Range<u64>,
    },
    /// Bytes are overwritten by an earlier call.
    #[error("lost: {write} comes before {by} on bytes {bytes:?} of rank {owner}'s {}", name(*window))]
    Lost {
        /// The write that is lost.
        write: OpRef,
        /// The write that undoes it.
        by: OpRef,
        /// Owner of the window.
        owner: u32,
        /// Which window.
        window: WindowId,
        /// The bytes.
        bytes: Range<u64>,
    },
    /// A flag word that does not grow is raised while it is set: a wait may take its last signal
    /// for this one.
    #[error("still raised: {signal} finds the value of call {since}, which was never reset")]
    StillRaised {
        /// The signal.
        signal: OpRef,
        /// The call that raised the word before.
        since: usize,
    },
    /// A flag word is raised from two tracks.
    #[error("two writers of one flag word: {a} and {b}")]
    TwoWriters {
        /// A signal.
        a: OpRef,
        /// A signal of the same word from another track.
        b: OpRef,
    },
    /// A flag word does not grow.
    #[error("not monotone: {b} follows {a}")]
    NotMonotone {
        /// A signal.
        a: OpRef,
        /// The next of the same word, to no higher value.
        b: OpRef,
    },
    /// A random run ends with other bytes than the run in order.
    #[error("seed {seed}: rank {rank}{role} saw other bytes in call {call} than in an ordered run")]
    Differs {
        /// The seed.
        seed: u64,
        /// The actor whose outcome differs.
        rank: u32,
        /// What of the rank saw it.
        role: Role,
        /// In which call.
        call: usize,
    },
}

fn name(window: WindowId) -> &'static str {
    match window {
        WindowId::POOL => "pool",
        WindowId::CONTROL => "control window",
        WindowId::HOST_STAGING => "twin of the pool",
        _ => "window",
    }
}

impl fmt::Display for OpRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpRef { rank, role, call, stage, index, what } = self;
        write!(f, "rank {rank}{role}, call {call}, {stage}[{index}] ({what})")
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Own => "",
            Role::Relay => "'s relay",
            Role::Transfers => "'s transfers",
        })
    }
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            AccessKind::Op(Op::Put { to, .. }, _) => write!(f, "put to {to}"),
            AccessKind::Op(Op::PutRows { to, .. }, _) => write!(f, "put rows to {to}"),
            AccessKind::Op(Op::Signal { of, flag, level: FlagValue::Reset, .. }, value) => {
                write!(f, "set back {} of {of}, {value:#x}", flag.name())
            }
            AccessKind::Op(Op::Signal { to, of, flag, .. }, value) => {
                write!(f, "signal {} of {of} to {to}, {value:#x}", flag.name())
            }
            AccessKind::Op(Op::Wait { from, flag, .. }, value) => {
                write!(f, "wait for {} of {from}, {value:#x}", flag.name())
            }
            AccessKind::Op(Op::Reduce { .. }, _) => f.write_str("reduce"),
            AccessKind::Reads(what) => write!(f, "reads {what}"),
            AccessKind::Writes(what) => write!(f, "writes {what}"),
        }
    }
}
