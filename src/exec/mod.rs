//! Executors: interpreters of schedules that move bytes.
//!
//! The host stepper (`Host`) steps all tracks of a rank in the caller's thread, in launch order. A [`Recorder`] can watch
//! it (or any other executor), and [`write_chrome_trace`] writes what the ranks' recorders saw as one timeline. The device
//! enqueuer (`Device`) lowers a static stage to copies and memory operations of a CUDA stream.

mod chrome;
mod device;
mod host;
mod recorder;

pub use chrome::write_chrome_trace;
pub use device::Enqueued;
pub(crate) use device::{Device, Ground};
pub(crate) use host::Host;
pub use host::Moved;
pub use recorder::{Call, Event, Kind, Recorder, Timeline};
