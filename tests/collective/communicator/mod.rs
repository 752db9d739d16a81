//! All-reduce, broadcast, all-to-all, all-gather and messages, compared with their definitions.

mod case;
mod faults;
mod landed;
mod moves;
mod refusals;
mod send_recv;
mod sums;
mod windows;
