//! Rendezvous: how processes become the ranks of a world, the first time and again after a loss.
//!
//! ```text
//!   connect   (first)  ┐                       ┌ join              the guest's side: connect, prove, join
//!   rebuild   (again)  ┴── who hosts, where? ──┤
//!                                              └ handshake_queue   the host's side: pending, authenticated
//!                                                  └── join_barrier   present ranks; may the world begin?
//!   pass      ranks that have met, on streams of their own
//! ```
//!
//! The coordinator of the new world runs the host's side; each member gets a hub.

mod connect;
mod handshake_queue;
mod join;
mod join_barrier;
mod peer_listener;
mod rebuild;

pub use connect::connect;
pub(super) use handshake_queue::{AuthenticatedPeer, HandshakeQueue};
pub(super) use join::Membership;
pub(super) use join_barrier::JoinBarrier;
pub use peer_listener::{PeerAuth, PeerListener};
pub(super) use rebuild::rebuild;

#[cfg(test)]
mod tests;
