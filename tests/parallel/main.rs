//! The other parallel strategies: meshes and pipeline schedules.

mod mesh;
mod mutants;
mod naive_pipeline;
mod schedules;
