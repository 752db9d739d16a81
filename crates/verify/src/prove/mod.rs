//! Proves an unrolled program: it ends, no two accesses race, and every byte that is read was
//! written once, by its own call.
//!
//! Schedules have no branches, and flags are monotone with one writer, so no operation disables
//! another. Then
//!
//! 1. *one* greedy run decides deadlock-freedom for every interleaving ([`QUEUES`] says for which
//!    hardware);
//! 2. a wait for a value follows exactly the writer's first signal of that value or more, so
//!    happens-before is one relation, the same in every run, and every two accesses to the same
//!    bytes can be looked up in it;
//! 3. if all are ordered, every legal interleaving reads the same bytes.
//!
//! ```text
//!   unrolled program --numbered--> Program --run on each number of queues--> order --Knowledge--> known at each operation
//!                                                                                                  |
//!                                     accesses to each window --every two that meet, every read-----+--> ordered, written
//! ```
//!
//! Words that [do not grow](sidelane_core::schedule::stream_program) are proved as if they did, by
//! the number of the call in place of 1, and as bytes. A signal writes them and must find them
//! reset, a wait reads them and must find its own call's signal, and a reset writes them once more.
//! If all of these are ordered, the constants work like the numbers. To see this, take the first
//! wait, in any run, that ends by another call's signal. All earlier events went as in the proof.
//! So an earlier signal had been reset when this wait began, and a later one was sent by a rank
//! that had heard of the end of this wait.
//!
//! The proof assumes the lanes' contract: a put to a peer lands at any time between its issue and
//! the moment the next signal of its track is visible; the signals of a track become visible in
//! order, each with its tag. [`check`](crate::random_check) simulates that contract at random.

#![allow(clippy::result_large_err, reason = "a fault ends the whole proof, and names two operations")]

pub(super) mod flat_program;
mod happens_before;
mod overlapping_accesses;
mod races;

use std::fmt;
use std::ops::Range;

use flat_program::Program;
use happens_before::Knowledge;
use overlapping_accesses::Accesses;
use races::Judge;
use sidelane_core::schedule::{FlagValue, Op, WindowId};

use crate::unroll::{Role, UnrolledProgram};

/// Numbers of in-order queues onto which tracks are folded; 0 stands for a queue per track.
pub const QUEUES: [u32; 4] = [1, 2, 8, 0];

/// Size of the proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Operations of all ranks and calls.
    pub operations: usize,
    /// Accesses to windows.
    pub accesses: usize,
    /// Pairs of accesses to the same bytes with a write among them.
    pub pairs: u64,
    /// Numbers of queues for which the unrolled program ends.
    pub queues: Vec<u32>,
}

/// Proves an unrolled program.
///
/// # Errors
/// The first fault found; the same one every time.
pub fn prove(unrolled: &UnrolledProgram) -> Result<Proof, ProofFailure> {
    let program = Program::new(unrolled);
    let run = Run::of(&program)?;
    run.prove(&Accesses::of(&program))
}

/// Proves mutants of a program, with the same result as [`prove`]. Most mutants access the same
/// bytes as the program, only at other moments, so those accesses are collected once.
pub struct MutantProver<'a> {
    base: Program<'a>,
    accesses: Accesses,
}

impl<'a> MutantProver<'a> {
    /// Collects the accesses of a program.
    pub fn new(base: &'a UnrolledProgram) -> Self {
        let base = Program::new(base);
        let mut accesses = Accesses::of(&base);
        if let Ok(run) = Run::of(&base) {
            run.link(&mut accesses);
        }
        MutantProver { base, accesses }
    }

    /// Proves a mutant of the program, or the program itself.
    ///
    /// # Errors
    /// The first fault found; the same one as by [`prove`].
    pub fn prove(&self, mutant: &UnrolledProgram) -> Result<Proof, ProofFailure> {
        let program = Program::new(mutant);
        let run = Run::of(&program)?;
        match Accesses::fit(&self.base, &program) {
            true => run.prove(&self.accesses),
            false => run.prove(&Accesses::of(&program)),
        }
    }
}

/// A program that ends on all numbers of queues, and what is known in it.
struct Run<'p> {
    program: &'p Program<'p>,
    queues: Vec<u32>,
    known: Knowledge,
}

impl<'p> Run<'p> {
    fn of(program: &'p Program<'p>) -> Result<Self, ProofFailure> {
        program.check_words()?;
        let mut queues = Vec::new();
        let mut order = Vec::new();
        for count in QUEUES.map(|count| if count == 0 { program.tracks } else { count }) {
            // With a queue for each track more queues change nothing.
            if queues.last().is_none_or(|&before| before < program.tracks) {
                order = flat_program::run(program, count)?;
            }
            queues.push(count);
        }
        Ok(Run { program, queues, known: Knowledge::follow(program, &order) })
    }

    /// Finds the pairs that decide about all others, if the program has no fault.
    fn link(&self, accesses: &mut Accesses) {
        let judge = Judge::new(self.program, &self.known, accesses);
        if judge.check().is_ok() {
            let ordered: Vec<_> = accesses.windows.iter().map(|window| judge.ordered(window)).collect();
            accesses.windows.iter_mut().zip(ordered).for_each(|(window, ordered)| window.link(ordered));
        }
    }

    fn prove(self, accesses: &Accesses) -> Result<Proof, ProofFailure> {
        let operations = self.program.nodes.len();
        let (accesses, pairs) = Judge::new(self.program, &self.known, accesses).check()?;
        Ok(Proof { operations, accesses, pairs, queues: self.queues })
    }
}

/// Decides whether an unrolled program ends on `queues` queues per actor, in every interleaving.
///
/// # Errors
/// [`ProofFailure::Deadlock`].
pub fn ends(unrolled: &UnrolledProgram, queues: u32) -> Result<(), ProofFailure> {
    flat_program::run(&Program::new(unrolled), queues).map(|_| ())
}

/// One operation, or one touch of the planner or the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpRef {
    /// The owner.
    pub rank: u32,
    /// Actor of the rank that does it.
    pub role: Role,
    /// In which call of the unrolled program.
    pub call: usize,
    /// In which stage; touches come before its operations.
    pub stage: &'static str,
    /// Position in the stage.
    pub index: usize,
    /// The access.
    pub what: AccessKind,
}

/// Action of an [`OpRef`].
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
        /// Actor of the rank that saw it.
        role: Role,
        /// In which call.
        call: usize,
    },
}

fn name(window: WindowId) -> &'static str {
    match window {
        WindowId::POOL => "pool",
        WindowId::CONTROL => "control window",
        WindowId::HOST_STAGING => "host staging of the pool",
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
            Role::Caller => "'s caller",
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
