//! The loopback lane: the interface of a NIC, between emulated nodes of one machine.
//!
//! A NIC offers one-sided operations: the sender names a region, an offset and bytes, and the
//! receiver's processor takes no part. Here the connection is one shared segment per pair of ranks,
//! and the receiving NIC is a thread of the receiver. Nothing else of the other node is mapped, so
//! a schedule that relies on loads from another node cannot work here by accident.
//!
//! ```text
//!   rank a                    segment of the pair (a, b)                    rank b
//!   put              --records-->  | ring a->b: head, tail, bell, bytes |  --> progress thread:
//!   progress thread  <--records--  | ring b->a: head, tail, bell, bytes |      checks, regions of b
//! ```
//!
//! Credits: a sender never writes past the receiver's tail. While it waits for credit it receives
//! its own records, so two ranks that fill each other's rings cannot block each other.

mod emulator;
mod link;
mod ring;
mod wires;

pub use emulator::LinkEmulator;
#[cfg(test)]
pub use link::LoopbackConnection;
#[cfg(test)]
pub use ring::ring_bytes;
pub use wires::LoopbackTransport;
