//! Runs of a small model, on ranks that are threads: all execution modes learn the same weights.

mod case;
mod checkpoints;
mod growths;
mod meshes;
mod program;
mod references;
mod survivals;
