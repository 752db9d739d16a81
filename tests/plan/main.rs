//! Plans: placement, receive modes, traffic, and relay order.

mod modes;
mod properties;
mod relay_order;
#[path = "../support/mod.rs"]
mod support;
mod traffic;
