//! The tcp lane: the interface of a NIC over sockets, for machines without one, and for tests with
//! partitions.
//!
//! One connection per pair of peers carries records both ways. The receiver writes for the sender,
//! after it has checked each target, and raises the flags itself.
//!
//! ```text
//!   rank a                              one connection                              rank b
//!   put: header, rows in place   --sendmsg-->  | record | record | ...  --readv-->  regions of b
//!   progress or waiting thread   <--readv---   | record | ...           <---------  put
//!
//!   flush:    a sends Ask(n) behind its puts;  b answers n;  a waits for it
//! ```
//!
//! *Credits* are TCP's own window. A sender that finds no room receives meanwhile, so two ranks
//! that fill each other's window cannot block each other. Rows are not packed: they go from their
//! place to the socket, and from the socket to their target. The rest of a record that a sender
//! gave up in the middle goes to an outbox, so that the stream stays whole.
//!
//! *Identity* is proved as at the rendezvous, with the job's secret. The proof covers job, epoch
//! and ranks.
//!
//! *Ends.* A connection that ends while its peer has left, or is known to be lost, is no fault.
//! Otherwise the rendezvous is given a moment to report the fate of the peer. If it reports that
//! all are well, the connection broke ([`Cause::Connection`](crate::error::Cause::Connection)).

mod connection;
#[cfg(test)]
mod tests;
mod transport;

pub use transport::TcpTransport;
