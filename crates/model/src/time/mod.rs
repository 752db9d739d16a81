//! The time interpreter: the same schedules and operands against a model of links, NICs and
//! engines.
//!
//! ```text
//!   routings --Placed--> layouts, forwards --the same skeletons and tables as in a real call--> tasks of every rank
//!                                                                                                    |
//!   Hardware ----------------------------------------------------------------> events in order of time, integer ns
//!                                                                                                    |
//!                                                                  Timing: phases, what is busiest, roofline, counts
//! ```
//!
//! **A rank.** A few *lines*, each of which does one task after the other and may wait for words:
//!
//! ```text
//!   host      plans, enqueues, posts, signals, waits               (the host executor also copies and sums here, on a core)
//!   stream    copies of engines, and the words behind them         2.3 us + bytes / rate each
//!   compute   kernels that pack, regroup and sum                   launch + bytes / rate of the memory
//!   NIC       what crosses: bytes / rate + a price a message       shared by the ranks that share the NIC
//! ```
//!
//! Bytes also pass the receiver's side of the link or NIC, first come, first served. A copy holds
//! its engine until its last byte has arrived; a NIC continues with its next task. A signal follows
//! the bytes of its track. A single copy therefore takes its price, the latency and bytes / rate,
//! exactly.
//!
//! **Large groups.** If the routings of all ranks are given, every rank is simulated. If those of
//! one node are given, that node represents all: rank i of node v acts at the same time as rank i
//! of the first node, with nodes counted from its own. So a signal of the first node's rank to node
//! v is also the signal of node -v to the first (`ring.rs`). Programs are alike by construction,
//! since [`Paths`](sidelane_core::topology::Paths) enumerates from the next node on. The model
//! assumes that the *routing* is alike, too: true of balanced routing up to chance, and false for
//! routing that prefers some nodes. A test compares the two.
//!
//! **Not modeled.** Congestion inside the network, other traffic, clocks that differ, stragglers,
//! the caller's experts.

mod account;
mod hardware;
mod lines;
mod lower;
mod machine;
mod placed;
mod ring;
mod slots;
mod task;
#[cfg(test)]
mod tests;
mod tracks;

pub use account::{Bottleneck, Phase, PhaseTime, RankWork, Resource, Timing};
pub use hardware::{Compute, Engines, Executor, Hardware, Host, Link, NicModel, UnknownHardware};
pub use placed::{Case, Placed};
pub use slots::slots;
