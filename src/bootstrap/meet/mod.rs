//! Meeting: how processes become the ranks of a world, the first time and again after a loss.
//!
//! ```text
//!   rendezvous (first)  ┐                       ┌ join    the guest's side: knock, prove, take a seat
//!   rebuild    (again)  ┴── who hosts, where? ──┤
//!                                               └ lobby   the host's side: pending and authenticated peers
//!                                                   └──── muster    the present ranks, and whether the world may begin
//!   pass       ranks that have met, on streams of their own
//! ```
//!
//! The coordinator of the new world runs the host's side; each member gets a hub.

mod join;
mod lobby;
mod muster;
mod pass;
mod rebuild;
mod rendezvous;

pub(super) use join::Membership;
pub(super) use lobby::{AuthenticatedPeer, HandshakeQueue};
pub(super) use muster::JoinBarrier;
pub use pass::{PeerAuth, PeerListener};
pub(super) use rebuild::rebuild;
pub use rendezvous::connect;

#[cfg(test)]
mod tests;
