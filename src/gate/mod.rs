//! From router scores to a [`Routing`]. Pure: no memory but its own, no I/O.
//!
//! Two sources stand in for a router where there is no model: [`synthetic()`] draws decisions from a [`Pattern`],
//! [`Recorded`] replays those of a real one.

mod recorded;
mod routing;
mod synthetic;

pub use recorded::{Recorded, RecordedError};
pub use routing::Routing;
pub use synthetic::{Pattern, PatternError, synthetic};
