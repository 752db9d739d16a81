//! All-reduce, broadcast, all-to-all, all-gather and messages, against what they mean.

mod case;
mod faults;
mod landed;
mod messages;
mod moves;
mod refusals;
mod sums;
mod windows;
