//! Predictions about the schedules in [`sidelane_core::schedule`]: how long they take on hardware
//! that a file describes ([`time`]), and their requests to copy engines ([`CopyEngineWork`]). About
//! routers: loads by their decisions ([`Loads`]), and what a capacity drops ([`Dropped`]). About
//! whole models: the meshes of devices that train one fastest ([`parallel`]).

mod copy_engine_work;
mod expert_load;
pub mod parallel;
pub mod time;

pub use copy_engine_work::{CopyEngineWork, NamedWork, RankDispatches};
pub use expert_load::{Dropped, Load, Loads, Lost, Spread};
