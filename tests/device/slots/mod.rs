//! Instances on a device in fixed slots, against the fake driver with kernels that are built
//! for the CPU: copies as late and as torn as CUDA's rules allow, fresh memory poisoned.
//!
//! A process of its own for each test: the fake driver reads its settings once.
#![allow(unsafe_code, reason = "a caller's streams and memory are unsafe to use by contract")]

mod budget;
mod calls;
mod counts;
mod faults;
mod graphs;
mod nodes;
mod processes;
mod rank;
mod refusals;
mod replays;
mod rounds;
mod verdicts;

use crate::apart::each_with_kernels as on_each;
use crate::kernels::world as packed;
use crate::{devices, support};

/// Runs the body in a process with the fake's usual settings, and with kernels. `test` is the
/// test's full name.
fn on_fake_driver(test: &str, body: impl FnOnce()) {
    on_each(test, &[&[]], body);
}
