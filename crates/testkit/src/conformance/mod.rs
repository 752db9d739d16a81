//! The conformance suite: one table of features and places, carried out and compared bit by bit.
//!
//! ```text
//!   suite: Case (data) x Way --Run--> RankCalls: builds, calls, compares
//!                                       |                    |
//!              tensors of the host, or of a device           +--> Outcome, or the first Difference
//! ```

pub mod case;
pub mod case_run;
pub mod large_layers;
pub mod outcomes;
pub mod rank_calls;
pub mod suite;
pub mod tensors;
