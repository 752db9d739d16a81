//! One-sided windows, emulated links, row collectives, and the communicator.

mod communicator;
mod paced;
mod rows;
#[path = "../support/mod.rs"]
mod support;
mod windows;
