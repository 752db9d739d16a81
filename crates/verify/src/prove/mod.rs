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
//! Words that [do not grow](sidelane_core::schedule::stream) are proved as if they did, by the
//! number of the call in place of 1, and as bytes. A signal writes them and must find them reset, a
//! wait reads them and must find its own call's signal, and a reset writes them once more. If all
//! of these are ordered, the constants work like the numbers. To see this, take the first wait, in
//! any run, that ends by another call's signal. All earlier events went as in the proof. So an
//! earlier signal had been reset when this wait began, and a later one was sent by a rank that had
//! heard of the end of this wait.
//!
//! The proof assumes the lanes' contract: a put to a peer lands at any time between its issue and
//! the moment the next signal of its track is visible; the signals of a track become visible in
//! order, each with its tag. [`check`](crate::check) simulates that contract at random.

#![allow(clippy::result_large_err, reason = "a fault ends the whole proof, and names two operations")]

mod access;
mod fault;
mod order;
mod pairs;
pub(super) mod program;
mod run;

use crate::unroll::UnrolledProgram;

pub use fault::{AccessKind, OpRef, ProofFailure};

use program::Program;

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
    /// Numbers of queues for which the story ends.
    pub queues: Vec<u32>,
}

/// Proves a story.
///
/// # Errors
/// The first fault found; the same one every time.
pub fn prove(story: &UnrolledProgram) -> Result<Proof, ProofFailure> {
    let program = Program::new(story);
    program.check_words()?;
    let mut queues = Vec::new();
    let mut order = Vec::new();
    for count in QUEUES.map(|count| if count == 0 { program.tracks } else { count }) {
        // With a queue for each track more queues change nothing.
        if queues.last().is_none_or(|&before| before < program.tracks) {
            order = run::run(&program, count)?;
        }
        queues.push(count);
    }
    let known = order::Knowledge::follow(&program, &order);
    let mut all = access::collect(&program, &known);
    let mut pairs = 0;
    for accesses in &mut all {
        pairs += pairs::check(&program, &known, accesses)?;
    }
    let accesses = all.iter().map(|accesses| accesses.list.len()).sum();
    Ok(Proof { operations: program.nodes.len(), accesses, pairs, queues })
}

/// Decides whether a story ends on `queues` queues per actor, in every interleaving.
///
/// # Errors
/// [`ProofFailure::Deadlock`].
pub fn ends(story: &UnrolledProgram, queues: u32) -> Result<(), ProofFailure> {
    run::run(&Program::new(story), queues).map(|_| ())
}
