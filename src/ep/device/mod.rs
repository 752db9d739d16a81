//! Instances on a device: rows in memory of a GPU, calls on a CUDA stream, and no kernel between
//! packed and landed rows.
//!
//! | module | what it is |
//! |---|---|
//! | `planned` | exact sizes or a budget: the caller's thread lays out each call and has copy engines move rows |
//! | `slots` | fixed slots, or a budget that graphs hold: every address is a constant, so the stream carries a call out alone |
//! | `passage` | how rows cross between nodes: from device to device, or by pinned memory of the host |
//! | `guard` | what ends the waits of streams when the world fails |
//! | `status` | how a call ended, in a word that kernels can read |

mod guard;
mod passage;
pub(super) mod planned;
pub(super) mod slots;
mod status;

use std::sync::atomic::{AtomicU64, Ordering};

pub use status::Status;

/// Number of a new instance on a device. It distinguishes handles within this process.
fn next_instance() -> u64 {
    static INSTANCES: AtomicU64 = AtomicU64::new(0);
    INSTANCES.fetch_add(1, Ordering::Relaxed)
}
