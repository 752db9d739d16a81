//! Training over a mesh: the model of [`crate::model`], made of the layers of `sidelane-parallel`.
//!
//! | module | what is in it |
//! |---|---|
//! | `strategy` | sizes of the mesh, ZeRO, schedule, attention, and their checks |
//! | `tensors` | a rank's tensors, and where their values are in the whole ones |
//! | `groups` | groups of a rank |
//! | `pass_calls` | calls of layers in a pass, and which of them a rank refuses that fails alone |
//! | `block` | norm, attention, experts: forward and backward |
//! | `stage` | embedding, blocks and loss as a stage of a pipeline |
//! | `optimizer` | parameters of one kind, whole or cut by ZeRO |
//! | `train` | steps, losses, counts of bytes |
//! | `replay` | the reference: one process that computes what all ranks do |
//! | [`checkpoint`] | shards of all ranks, which any other mesh reads |

mod block;
pub mod checkpoint;
mod groups;
mod optimizer;
mod pass_calls;
mod replay;
mod stage;
mod strategy;
mod tensors;
mod train;

pub use strategy::{Context, ScheduleName, Sizes, Strategy, StrategyError, Zero};
pub use train::{MeshTrainer, Moved, TensorPart, Traffic};
