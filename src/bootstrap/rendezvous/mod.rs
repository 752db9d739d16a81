//! Rendezvous: how processes become the ranks of a world, the first time and again after a loss.
//!
//! ```text
//!   connect   (first)  ┐                       ┌ JoinRequest      a joining rank: connect, prove, join
//!   rebuild   (again)  ┴── host and address ───┤
//!                                              └ HandshakeQueue   the host: pending, authenticated
//!                                                  └── JoinBarrier   present ranks; may the world begin?
//!   PeerAuth  ranks that have met, on streams of their own
//! ```
//!
//! The coordinator of the new world runs the host's side; each member gets a hub.

mod join;
mod listener;
#[cfg(test)]
mod tests;

pub use join::connect;
pub(super) use join::{Hosted, JoinBarrier, Membership, rebuild};
pub(super) use listener::{AuthenticatedPeer, HandshakeQueue};
pub use listener::{PeerAuth, PeerListener};
