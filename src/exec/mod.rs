//! Executors: interpreters of schedules that move bytes.
//!
//! The host stepper (`Host`) steps all tracks of a rank in the caller's thread, in launch order. A [`Recorder`] can watch
//! it (or any other executor), and [`write_chrome_trace`] writes what the ranks' recorders saw as one timeline.

mod chrome;
mod host;
mod recorder;

pub use chrome::write_chrome_trace;
pub(crate) use host::Host;
pub use host::Moved;
pub use recorder::{Call, Event, Kind, Recorder, Timeline};
