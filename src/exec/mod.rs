//! Executors: interpreters of schedules that move bytes.
//!
//! ```text
//!   program  --drive-->  stepper                        the host: each operation in the caller's thread, in launch order
//!                        device::copy_engine_stepper    a device: the same operations, put on a CUDA stream call by call
//!   stream program  -->  device::constant               a device: operations without a host, lowered once and enqueued as a whole
//!                        device::net                    both: what of it crosses to other nodes
//! ```
//!
//! A [`Recorder`] can watch the host stepper, and [`Timeline::write_chrome_trace`] writes what the
//! recorders of all ranks saw as one trace.

mod device;
mod drive;
mod host_stepper;
mod recorder;

#[doc(hidden)]
pub use crate::lane::now;
pub use device::EnqueueCounts;
pub(crate) use device::{
    Awaited, CopyEngineStepper, DeviceMap, LocalPeer, Packed, PackedMetadata, ProxyOps, RelaySums,
};
#[doc(hidden)]
pub use device::{Lowered, PeerWindows};
// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub use drive::{StepExecutor, Until, drive};
pub(crate) use host_stepper::HostStepper;
pub use host_stepper::TransferCounts;
#[doc(hidden)]
pub use recorder::{Event, NodeSpan, OpKind, TimedCall};
pub use recorder::{Recorder, Timeline};
