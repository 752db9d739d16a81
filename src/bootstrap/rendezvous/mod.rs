//! Rendezvous: how processes become the ranks of a world, the first time and again after a loss.
//!
//! ```text
//!   connect    first: rank 0 hosts, and the world begins when all ranks are here      JoinBarrier
//!   rebuild    again: the lowest survivor that answers hosts, and all agree first     Gathering
//!   grow       later: rank 0 admits spares, all agree as in a rebuild, and the ranks once more
//!   spare      the other side: asks, and comes to the next world
//!   Lineage    what a rank keeps from world to world: its listener, the newest world that it agreed to
//!   HandshakeQueue   the host's side of a connection: pending, authenticated
//!   PeerAuth   ranks that have met, on streams of their own
//! ```
//!
//! The coordinator of the new world runs the host's side; each member gets a hub.

mod gathering;
mod grow;
mod join;
mod listener;
mod rebuild;
#[cfg(test)]
mod tests;

pub(super) use gathering::{Gathering, Lineage, Step};
pub(super) use grow::grow;
pub use grow::{Growth, spare};
pub use join::connect;
pub(super) use join::{Hosted, JoinBarrier, Membership};
pub(super) use listener::{AuthenticatedPeer, HandshakeQueue};
pub use listener::{PeerAuth, PeerListener};
pub(super) use rebuild::{Search, rebuild, window};
