//! Kernels against their definitions, on random and special values: sums, gates and plans to the
//! bit, products within the bounds of their roundings.

pub mod copies;
pub mod gate;
pub mod plan_choices;
pub mod products;
pub mod rank_sums;
pub mod sums;
