//! Sidelane: MoE expert-parallel dispatch and combine that run beside the compute.

pub mod bootstrap;
pub mod dtype;
pub mod error;
pub mod gate;
pub mod memory;
pub mod plan;
pub mod rows;
pub mod schedule;
pub mod topology;

pub use dtype::{Dtype, Element};
pub use error::{Error, Result};
