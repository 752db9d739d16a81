//! Schedules: proofs, and mutants that the proofs must find.

mod call_mutations;
#[path = "../support/cases.rs"]
mod cases;
mod collective_proof;
mod groups;
mod named_mutants;
mod proof;
mod replays;
mod skeleton_mutations;
mod stream_mutations;
mod stream_proof;
mod stripes;
