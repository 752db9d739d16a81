//! The other parallel strategies: meshes, data parallelism, pipeline schedules, tensor and context
//! parallel layers.

mod context;
mod data;
mod embedding;
mod linear;
mod mesh;
mod messages;
mod mutants;
mod naive_pipeline;
#[path = "../support/ranks.rs"]
mod ranks;
mod schedules;
mod tensors;
