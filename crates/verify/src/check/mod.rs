//! Runs an unrolled program at random, under the guarantees of the lanes and no more.
//!
//! `prove` rests on the lanes' contract; this module simulates it. Memory holds a tag for every
//! four bytes:
//!
//! ```text
//!   put      its pieces land one by one, in any order, at any later time; its source is read as late as the stage join
//!   signal   becomes visible late, with its tag, but not before all pieces of earlier puts and all earlier signals of its
//!            track; later puts of the track, and other tracks, may overtake it
//!   reduce   reads piece by piece, while others go on
//!   actors   each at its own speed, on one queue, on several, or on one per track
//! ```
//!
//! With every seed, each actor must have seen the same tags, call by call, as in an ordered run.

#![allow(clippy::result_large_err, reason = "a fault ends the whole proof, and names two operations")]

mod lane;
mod machine;

use std::ops::Range;

use machine::Machine;

use crate::prove::ProofFailure;
use crate::prove::program::Program;
use crate::unroll::{ActorCall, UnrolledProgram};

/// Size of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Random runs.
    pub seeds: u64,
    /// Pieces and signals that were delivered late, in all runs.
    pub deliveries: u64,
}

/// Plays a story once in order, and once for every seed.
///
/// # Errors
/// [`ProofFailure::Differs`] with the first seed whose outcome differs; [`ProofFailure::Deadlock`]
/// if a run does not end.
pub fn check(story: &UnrolledProgram, seeds: Range<u64>) -> Result<Checked, ProofFailure> {
    let program = Program::new(story);
    let expected = Machine::new(&program, None).play()?;
    let mut checked = Checked::default();
    for seed in seeds {
        let seen = Machine::new(&program, Some(seed)).play()?;
        for (actor, calls) in (0..).zip(seen.outcomes.iter().zip(&expected.outcomes)) {
            if let Some(call) = calls.0.iter().zip(calls.1).position(|(seen, expected)| seen != expected) {
                let ActorCall { rank, role, .. } = *program.part(actor, call as u32);
                return Err(ProofFailure::Differs { seed, rank, role, call });
            }
        }
        checked.seeds += 1;
        checked.deliveries += seen.deliveries;
    }
    Ok(checked)
}
