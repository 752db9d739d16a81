//! The other parallel strategies: meshes, pipeline schedules, tensor parallel layers, context parallelism.

mod context;
mod embedding;
mod linear;
mod mesh;
mod mutants;
mod naive_pipeline;
#[path = "../support/ranks.rs"]
mod ranks;
mod schedules;
mod tensors;
