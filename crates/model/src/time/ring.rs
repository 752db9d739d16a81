//! Equal nodes in a ring: all of them, or one that stands for all.

/// Nodes of equal size, ranks numbered node by node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ring {
    /// Number of nodes.
    pub nodes: u32,
    /// Ranks of each.
    pub members: u32,
    /// Whether every rank is played, or those of the first node alone.
    pub whole: bool,
}

impl Ring {
    /// Number of ranks of the group.
    pub fn ranks(&self) -> u32 {
        self.nodes * self.members
    }

    /// Number of ranks that are played.
    pub fn played(&self) -> u32 {
        if self.whole { self.ranks() } else { self.members }
    }

    /// The simulated rank that represents a rank, and the number of nodes by which the group is
    /// rotated for it.
    pub fn player(&self, rank: u32) -> (u32, u32) {
        match self.whole {
            true => (rank, 0),
            false => (rank % self.members, rank / self.members),
        }
    }

    /// What becomes of a rank when the group is turned back by so many nodes.
    pub fn turned_back(&self, rank: u32, by: u32) -> u32 {
        (rank + self.ranks() - by * self.members) % self.ranks()
    }

    /// Indices of all ranks' equal shares of a table, as the rank that represents `rank` has them,
    /// `by` nodes further.
    pub fn turned<T: Copy>(&self, table: &[T], by: u32) -> impl Iterator<Item = T> {
        let shift = table.len() / self.nodes as usize * by as usize;
        let (last, first) = table.split_at(table.len() - shift);
        first.iter().chain(last).copied()
    }
}
