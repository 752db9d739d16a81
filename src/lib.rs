//! Sidelane: MoE expert-parallel dispatch and combine that run beside the compute.

pub mod bootstrap;
pub mod config;
pub mod dtype;
pub mod ep;
pub mod error;
pub mod exec;
pub mod gate;
mod lane;
pub mod memory;
pub mod plan;
pub mod rows;
pub mod schedule;
pub mod topology;
pub mod world;

pub use dtype::{Dtype, Element};
pub use ep::ExpertParallel;
pub use error::{Error, Result};
pub use world::{Group, Options, Window, World};
