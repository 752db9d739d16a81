//! Executors: interpreters of schedules that move bytes.
//!
//! The host stepper (`HostStepper`) steps all tracks of a rank in the caller's thread, in launch
//! order. The enqueuer's stepper (`CopyEngineStepper`) reads the same programs, and enqueues what
//! they move on a CUDA stream. A stream program, which nobody steps, is `Lowered` once and enqueued
//! as a whole; what of it crosses to other nodes is `ProxyOps`. A [`Recorder`] can watch the host
//! stepper (or any other executor), and [`write_chrome_trace`] writes what the ranks' recorders saw
//! as one timeline.

mod across;
mod chrome;
mod crossed;
mod drive;
mod engine;
mod enqueued;
mod host;
mod lowered;
mod outbox;
mod recorder;

#[doc(hidden)]
pub use crate::lane::now;
pub use chrome::write_chrome_trace;
pub(crate) use crossed::ProxyOps;
// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub use drive::{Executor, Until, drive};
pub(crate) use engine::{Awaited, CopyEngineStepper, DeviceMap, LocalPeer, Packed};
pub use enqueued::EnqueueCounts;
pub(crate) use host::HostStepper;
pub use host::TransferCounts;
#[doc(hidden)]
pub use lowered::{Lowered, PeerWindows};
#[doc(hidden)]
pub use recorder::{Event, NodeSpan, OpKind, TimedCall};
pub use recorder::{Recorder, Timeline};
