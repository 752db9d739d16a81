//! Predictions about the schedules in [`sidelane_core::schedule`]: how long they take on hardware
//! that a file describes ([`time`]), and their requests to copy engines ([`CopyEngineWork`]).

mod engines;
pub mod time;

pub use engines::{CopyEngineWork, RankDispatches};
