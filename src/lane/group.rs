//! The lanes from one rank to all ranks of a group.

use std::sync::Arc;
use std::time::Duration;

use super::rail::Link;
use super::wait::Patience;
use crate::bootstrap::Health;
use crate::rows::Rows;
use crate::topology::NodeMap;

/// How a rank reaches another.
#[derive(Clone, Debug)]
pub enum Reach {
    /// It is this rank itself.
    Own,
    /// By loads and stores: the shm lane.
    Load,
    /// Over a wire: the loop lane.
    Rail(Arc<Link>),
}

impl Reach {
    /// Name of the lane, for reports and errors.
    pub fn name(&self) -> &'static str {
        match self {
            Reach::Own => "own",
            Reach::Load => "shm",
            Reach::Rail(_) => "loop",
        }
    }
}

/// One rank's lanes in a group. Ranks are positions in the group.
#[derive(Debug)]
pub struct Lanes {
    /// This rank.
    pub rank: u32,
    /// Each rank's number in the world.
    pub world_ranks: Vec<u32>,
    /// Which ranks share memory.
    pub nodes: NodeMap,
    /// The lane to each rank.
    pub reach: Vec<Reach>,
    /// Vector loops of this machine.
    pub rows: Rows,
    /// Whether the world is alive.
    pub health: Arc<Health>,
    /// How long a live but silent rank is waited for.
    pub deadline: Duration,
    /// Whether this machine has fewer cores than ranks of the world.
    pub crowded: bool,
}

impl Lanes {
    /// What ends a wait for `peer`.
    pub fn patience(&self, peer: u32) -> Patience<'_> {
        Patience {
            health: &self.health,
            crowded: self.crowded,
            deadline: self.deadline,
            awaited: self.world_ranks[peer as usize],
        }
    }

    /// Receives what has come over the rails.
    pub fn progress(&self) {
        for reach in &self.reach {
            if let Reach::Rail(link) = reach {
                link.drain(&self.health);
            }
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.reach.len() as u32
    }
}
