//! Executors: interpreters of schedules that move bytes.
//!
//! The host stepper (`Host`) steps all tracks of a rank in the caller's thread, in launch order. A [`Recorder`] can watch
//! it (or any other executor) and write what it saw as a timeline.

mod host;
mod recorder;

pub(crate) use host::Host;
pub use host::Moved;
pub use recorder::{Event, Recorder, write_chrome_trace};
