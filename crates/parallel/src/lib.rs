//! The parallel strategies next to expert parallelism, on the same worlds and collectives.
//!
//! | module | what is in it |
//! |---|---|
//! | [`mesh`] | which ranks form the groups of each dimension, experts folded as Megatron folds them |

pub mod error;
pub mod mesh;

pub use error::MeshError;
pub use mesh::Mesh;
