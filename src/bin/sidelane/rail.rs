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
        // Other machines are out of reach of a world today: it would not have been built.
        let only = || Rail { lane: "loop".into(), reason: "all nodes are on one machine".into() };
        (world.nodes().nodes() > 1).then(only)
    }
}
