//! Runs of a small model, on ranks that are threads: all execution modes learn the same weights.

mod case;
mod checkpoints;
mod growths;
mod meshes;
#[allow(dead_code, reason = "each test program uses a part of this")]
#[path = "../../../../tests/support/processes.rs"]
mod processes;
mod program;
mod references;
mod rounding;
mod survivals;
