//! The lane between nodes, and why it is that one.

use sidelane::World;

/// What carries bytes between the nodes of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    pub lane: String,
    pub reason: String,
}

impl Rail {
    /// Of this world; none where there is only one node.
    pub fn of(world: &World) -> Option<Self> {
        world.rail().map(|rail| Rail { lane: rail.lane.into(), reason: rail.why.to_string() })
    }
}
