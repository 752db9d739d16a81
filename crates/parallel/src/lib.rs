//! The parallel strategies next to expert parallelism, on the same worlds and collectives.
//!
//! | module | what is in it |
//! |---|---|
//! | [`data`] | gradients and optimizer states over ranks: buckets, ZeRO-1, 2 and 3, checkpoints |
//! | [`mesh`] | which ranks form the groups of each dimension, experts folded as Megatron folds them |
//! | [`pipeline`] | schedules as plans: passes and messages of each stage, proof, time, and their run |
//! | [`tensor`] | linear layers, embedding and cross-entropy, cut over the ranks of a group; layer norm and dropout of a rank's tokens |
//! | [`context`] | attention over the tokens of all ranks of a group: Ulysses and ring |
//!
//! Meshes and plans are pure: they compute with numbers of ranks, stages and microbatches. All else
//! runs on a [`Communicator`](sidelane::collective::Communicator). There is no tensor type:
//! they take slices and check their lengths.

mod calls;
mod check;
pub mod context;
pub mod data;
pub mod error;
mod float;
pub mod mesh;
pub mod pipeline;
pub mod tensor;

pub use error::{MeshError, OverlapPlanError, PipelineError, SettingError};
pub use float::Float;
pub use mesh::Mesh;

/// The code of the page runs.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/parallel.md")]
struct Page;
