//! The parallel strategies next to expert parallelism, on the same worlds and collectives.
//!
//! | module | what is in it |
//! |---|---|
//! | [`mesh`] | which ranks form the groups of each dimension, experts folded as Megatron folds them |
//! | [`pipeline`] | schedules as plans: passes and messages of each stage, proof, time, activations |

pub mod error;
pub mod mesh;
pub mod pipeline;

pub use error::{MeshError, PipelineError};
pub use mesh::Mesh;
