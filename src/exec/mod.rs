//! Executors: interpreters of schedules that move bytes.
//!
//! The host stepper (`Host`) steps all tracks of a rank in the caller's thread, in launch order.
//! The planner's stepper (`Engine`) reads the same programs, and enqueues what they move on a CUDA
//! stream. A stream program, which nobody steps, is `Lowered` once and enqueued as a whole; what of
//! it crosses to other nodes is `Crossed`. A [`Recorder`] can watch the host stepper (or any other
//! executor), and [`write_chrome_trace`] writes what the ranks' recorders saw as one timeline.

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

pub use crate::lane::now;
pub use chrome::write_chrome_trace;
pub(crate) use crossed::Crossed;
pub use drive::{Executor, Until, drive};
pub(crate) use engine::{Awaited, Engine, Ground, Near, Packed};
pub use enqueued::Enqueued;
pub(crate) use host::Host;
pub use host::Moved;
pub use lowered::{Lowered, PeerWindows};
pub use recorder::{Call, Event, Kind, Recorder, Span, Timeline};
