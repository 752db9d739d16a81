//! Handles that C may keep, and what they stand for.

mod kind;
mod seat;
mod table;

pub use kind::{Kind, Object};
pub use seat::{Lease, Seat};
pub use table::Table;
