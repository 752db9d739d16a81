//! Instances on a device against the same calls on the host: bit for bit, on a
//! driver that does everything as late and as unordered as the rules allow.
//!
//! The driver and its kernels are the process's: each test is one of its own.
#![allow(unsafe_code, reason = "memory of a caller's own is named by contract")]

mod allocator;
pub mod blocks;
mod buffers;
mod bytes;
mod calls;
mod cudarc;
mod disturbed;
mod faults;
mod growth;
mod heap;
mod node_sums;
mod nodes;
mod processes;
pub mod rank;
mod rank_major;
mod rank_sums;
mod rebuilt;
mod records;
mod remap;
pub mod step;
mod training;

use crate::apart::{Settings, each_with_kernels};
use crate::support::sample;
use crate::{devices, support};

/// Seeds of the driver, of which each process has one: a sample of so many, and any in the process
/// of one.
fn seeds(count: u64) -> Vec<u64> {
    if std::env::var_os("SIDELANE_FAKE_CUDA_SEED").is_some() { vec![0] } else { sample(0..count, 3) }
}

/// Runs the body with kernels to launch, hardware queues, and a seed for all that the rules leave
/// open. `test` is the test's full name.
fn on_devices(test: &str, queues: u32, seed: u64, body: impl Fn()) {
    on_drivers(test, &["12080"], queues, seed, &body);
}

/// The same once for each version of the driver.
fn on_drivers(test: &str, versions: &[&'static str], queues: u32, seed: u64, body: &dyn Fn()) {
    let runs: Vec<_> = versions.iter().map(|&version| [("SIDELANE_FAKE_CUDA_DRIVER", version)]).collect();
    on_settings(test, &runs.iter().map(<[_; 1]>::as_slice).collect::<Vec<_>>(), (queues, seed), body);
}

/// The same once for each of these settings.
fn on_settings(test: &str, runs: &[Settings<'_>], (queues, seed): (u32, u64), body: &dyn Fn()) {
    let (queues, seed) = (queues.to_string(), seed.to_string());
    let usual: Settings<'_> = &[("CUDA_DEVICE_MAX_CONNECTIONS", &queues), ("SIDELANE_FAKE_CUDA_SEED", &seed)];
    let runs: Vec<_> = runs.iter().map(|settings| [usual, *settings].concat()).collect();
    each_with_kernels(test, &runs.iter().map(Vec::as_slice).collect::<Vec<_>>(), body);
}
