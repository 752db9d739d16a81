//! Dispatch and combine on streams, against the stand-in driver with kernels that are built for the CPU: copies as late and
//! as torn as CUDA's rules allow, fresh memory poisoned.
//!
//! A process of its own for each test: the stand-in reads its settings once.
#![allow(unsafe_code, reason = "a caller's streams and memory are unsafe to use by contract")]

mod calls;
mod faults;
mod graphs;
mod nodes;
mod processes;
mod rank;
mod refusals;
mod replays;
mod rounds;

use std::path::Path;

use super::kernels::world as packed;
use crate::rows_common;

/// Variables of the stand-in.
type Settings<'a> = &'a [(&'a str, &'a str)];

/// Runs the body in a process with the stand-in's usual settings, and with kernels. `test` is the test's full name.
fn on_stand_in(test: &str, body: impl FnOnce()) {
    on_each(test, &[&[]], body);
}

/// Runs the body once for each of these settings, in a process of its own.
fn on_each(test: &str, runs: &[Settings<'_>], body: impl FnOnce()) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/kernels.cu");
    let (library, installed) = (stand_in_cuda::kernels(&source).unwrap(), stand_in_cuda::install().unwrap());
    let usual = [
        ("SIDELANE_STAND_IN_KERNELS", library.to_str().unwrap()),
        ("LD_LIBRARY_PATH", installed.to_str().unwrap()),
        ("CUDA_MODULE_LOADING", "EAGER"),
    ];
    let runs: Vec<_> = runs.iter().map(|settings| [&usual, *settings].concat()).collect();
    crate::apart::each(test, &runs.iter().map(Vec::as_slice).collect::<Vec<_>>(), body);
}
