//! The `sidelane` program: commands, options, reports, and exit codes.

mod baselines;
mod bench;
mod collectives;
mod conformance;
mod copy_engines;
mod doctor;
mod files;
mod gpu_check;
mod launch;
mod layer;
mod machines;
mod network;
mod plan;
mod program;
mod put_bench;
mod refusals;
mod routing;
mod simulate;
mod trace;
mod widths;
