//! The other parallel strategies: meshes, data parallelism, pipeline schedules, tensor and context
//! parallel layers.

mod buckets;
#[path = "../support/cases.rs"]
mod cases;
mod context;
mod data;
mod dropout;
mod dual_pipe;
mod embedding;
mod layer_norm;
mod linear;
mod linear_in_chunks;
mod memory;
mod mesh;
mod messages;
mod microbatches;
mod mutants;
mod naive_pipeline;
mod overlap_plans;
mod pipelines;
mod post_validation;
#[path = "../support/ranks.rs"]
mod ranks;
mod recomputation;
mod refused_passes;
mod schedules;
mod tensors;
mod textbook;
mod tied;
mod wire;
