//! The pure part of Sidelane: what could run on paper.
//!
//! Nothing here opens a file, reads a clock, starts a thread or holds unsafe code. The library
//! `sidelane` runs the plans of this crate, `sidelane-verify` proves them, and `sidelane-model`
//! predicts their time. Most users need `sidelane` alone, which exports the public part of this
//! crate.
//!
//! | module | contents |
//! |---|---|
//! | [`digest`] | digests by which ranks compare what they hold |
//! | [`dtype`] | element types of rows and of partial sums |
//! | [`error`] | errors of routers, plans and calls |
//! | [`topology`] | ranks that share memory, and paths between those that do not |
//! | [`gate`] | router decisions: [`Routing`](gate::Routing), losses, synthetic and recorded routing |
//! | [`plan`] | from routing and counts to placement |
//! | [`nic_choice`] | the NIC of a rank, by the places of NICs and GPUs in the machine |
//! | [`stripes`] | one stream of puts and signals over several queue pairs |
//! | [`schedule`] | programs of puts, signals, waits and sums; calls as steps; operands |

pub mod digest;
pub mod dtype;
pub mod error;
pub mod gate;
mod inputs;
pub mod nic_choice;
pub mod plan;
pub mod schedule;
pub mod stripes;
pub mod topology;
