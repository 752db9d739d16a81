//! All-reduce, broadcast, all-to-all, all-gather and messages, compared with their definitions.

mod case;
mod faults;
mod landed;
mod messages;
mod moves;
mod refusals;
mod sums;
mod windows;
