//! Errors of the pure part: one type per layer, with data in its fields.

mod call;
mod gate;
mod plan;

pub use call::{CallError, CallKind};
pub use gate::GateError;
pub use plan::PlanError;
