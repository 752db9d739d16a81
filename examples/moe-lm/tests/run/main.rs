//! Runs of a small model, on ranks that are threads: whatever way they are carried out, they learn the same.

mod case;
mod checkpoints;
mod program;
mod references;
