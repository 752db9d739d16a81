//! The MoE layer: against its formula, against finite differences, and against itself in other
//! chunks; and its behavior when a part fails.

mod bf16;
mod bf16_reference;
mod bits;
pub mod case;
mod cublas;
mod dense;
mod device;
mod differences;
pub mod meddled;
mod overlap;
mod rebuilt;
mod refusals;
mod timed;
