//! The overlap room: graphs on threads of the host, on CUDA streams, and around a real layer.

mod cuda;
mod graphs;
mod layers;
mod microbatches;
mod troubles;
