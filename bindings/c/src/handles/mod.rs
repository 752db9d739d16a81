//! Handles that C may keep, and what they stand for.

mod exclusive_cell;
mod kind;
mod table;

pub use exclusive_cell::{ExclusiveCell, Lease};
pub use kind::{Kind, Object};
pub use table::Table;
