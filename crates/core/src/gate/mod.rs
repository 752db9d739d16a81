//! From the logits of a router to a [`Routing`], as known training systems do it. Pure: no memory
//! but its own, no I/O.
//!
//! ```text
//!   x [T,H] --(jitter)--> your matrix product --> logits [T,E]
//!                                                    |  noise, while training
//!                                                    v
//!                         scores [T,E]   softmax | sigmoid | sqrt-softplus          --> losses and their gradients
//!                                                    |  + bias, best groups, Sinkhorn, recorded choices
//!                                                    v
//!                         choices [T,K]  -->  weights [T,K]   divided by their sum, scaled
//!                                                    |  second choices thinned out; capacity: kept choices, places
//!                                                    v
//!   Decision:  experts [T,K] (-1: dropped), weights, slots, counts           --> Routing --> dispatch
//!                                                    |
//!                         bias' = bias + rate * sign(mean - counts)            after each batch, over all ranks
//! ```
//!
//! A [`GateConfig`] describes each step, a [`Preset`] is the configuration of a known system, and a
//! [`Gate`] runs it and keeps its memory: of calls of one size only the first allocates.
//!
//! **Bits.** The same call gives the same bits on every machine: sums have a fixed order,
//! exponentials are our own, and random numbers are named by (seed, step, purpose, rank, token).
//! Scores and weights are made in f64 and rounded once. Of equal scores the first expert wins.
//!
//! Two sources replace a model: [`synthetic()`] draws decisions from a [`Pattern`], [`Recorded`]
//! replays those of a real one.

mod capacity;
mod config;
mod losses;
mod math;
mod residual;
mod route_token;
mod router;
mod router_noise;
mod routing;
mod top_k;

pub use capacity::{CapacityInput, PlacedChoices, apply_capacity};
pub use config::{
    Capacity, CapacityRule, Divisor, DropPolicy, GateConfig, GroupScore, Noise, Normalize, Preset,
    PresetError, ScoreFunction, SecondExpertPolicy, Select,
};
pub use losses::{
    BalanceLoss, CountDivisor, CountedChoices, ImportanceInput, LossInput, PaddingTokens, TokenGroups,
    Totals, WeightsInput, importance_loss, update_bias, weights_backward, z_loss,
};
pub use residual::{Residual, ResidualGradients};
pub use router::{Decision, Gate, GateInput};
pub use router_noise::{RngKey, jitter};
pub use routing::{Pattern, PatternError, Recorded, RecordedError, Routing, synthetic};

use crate::error::GateError;

/// Whether `what` has `rows` rows of `columns` elements.
fn shape(what: &'static str, seen: usize, rows: usize, columns: usize) -> Result<(), GateError> {
    if seen == rows * columns { Ok(()) } else { Err(GateError::WrongShape { what, seen, rows, columns }) }
}

/// Whether a parameter has a value that its call can use.
fn ensure(right: bool, parameter: &'static str, seen: f64, expected: &'static str) -> Result<(), GateError> {
    if right { Ok(()) } else { Err(GateError::BadNumber { parameter, seen, expected }) }
}
