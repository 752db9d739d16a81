//! The overlap room: graphs on threads of the host, on CUDA streams, and around a real layer.

#[path = "../device/apart.rs"]
mod apart;
#[path = "../support/mod.rs"]
mod support;

mod cuda;
mod graphs;
mod layers;
mod microbatches;
mod troubles;
