//! Handles that C may keep, and what they stand for.

mod kind;
mod seat;
mod table;

pub use kind::{Kind, Object};
pub use seat::{ExclusiveCell, Lease};
pub use table::Table;
