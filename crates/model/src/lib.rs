//! Predictions about the schedules in [`sidelane_core::schedule`]: how long they take on hardware
//! that a file describes ([`time`]), and their requests to copy engines ([`CopyEngineWork`]). And
//! about routers: loads by their decisions ([`Loads`]), and what a capacity drops ([`Dropped`]).

mod engines;
mod load;
pub mod time;

pub use engines::{CopyEngineWork, RankDispatches};
pub use load::{Dropped, Load, Loads, Lost, Spread};
