//! Ranks by node.

/// Which node each rank of a group belongs to. Ranks here are positions in the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeMap {
    node_of: Vec<u32>,
    index_in_node: Vec<u32>,
    members: Vec<Vec<u32>>,
}

impl NodeMap {
    /// Groups ranks by label: equal labels, one node. Nodes are numbered in order of first
    /// appearance.
    pub fn from_labels<L: PartialEq>(labels: &[L]) -> Self {
        let mut firsts: Vec<usize> = Vec::new();
        let mut map = NodeMap { node_of: Vec::new(), index_in_node: Vec::new(), members: Vec::new() };
        for (rank, label) in labels.iter().enumerate() {
            let node = firsts.iter().position(|&f| labels[f] == *label).unwrap_or_else(|| {
                firsts.push(rank);
                map.members.push(Vec::new());
                firsts.len() - 1
            });
            map.node_of.push(node as u32);
            map.index_in_node.push(map.members[node].len() as u32);
            map.members[node].push(rank as u32);
        }
        map
    }

    /// The nodes of a subset of these ranks, renumbered by their position in `ranks`.
    pub fn subset(&self, ranks: &[u32]) -> Self {
        let labels: Vec<u32> = ranks.iter().map(|&r| self.node_of(r)).collect();
        NodeMap::from_labels(&labels)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.node_of.len() as u32
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        self.members.len() as u32
    }

    /// The node of a rank.
    pub fn node_of(&self, rank: u32) -> u32 {
        self.node_of[rank as usize]
    }

    /// Position of a rank among the members of its node.
    pub fn index_in_node(&self, rank: u32) -> u32 {
        self.index_in_node[rank as usize]
    }

    /// The ranks of a node, ascending.
    pub fn members(&self, node: u32) -> &[u32] {
        &self.members[node as usize]
    }

    /// Whether two ranks reach each other's memory by loads and stores.
    pub fn same_node(&self, a: u32, b: u32) -> bool {
        self.node_of(a) == self.node_of(b)
    }

    /// The rail peer of `source` in `node`: member (index of the source in its own node) mod (size
    /// of `node`). With nodes of different size several sources share one rail peer.
    pub fn rail_peer(&self, source: u32, node: u32) -> u32 {
        let members = self.members(node);
        members[self.index_in_node(source) as usize % members.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_follow_labels_not_rank_arithmetic() {
        let map = NodeMap::from_labels(&["b", "a", "b", "a", "b"]);
        assert_eq!((map.ranks(), map.nodes()), (5, 2));
        assert_eq!(map.members(0), [0, 2, 4]);
        assert_eq!(map.members(1), [1, 3]);
        assert_eq!(map.index_in_node(4), 2);
        assert!(map.same_node(1, 3) && !map.same_node(0, 1));
    }

    #[test]
    fn rail_peer_wraps_in_the_smaller_node() {
        let map = NodeMap::from_labels(&[0, 0, 0, 1, 1, 1, 1, 1]);
        assert_eq!(map.rail_peer(7, 0), 1, "index 4 of the larger node meets member 4 mod 3");
        assert_eq!(map.rail_peer(2, 1), 5);
    }

    #[test]
    fn a_subset_is_renumbered_by_position() {
        let map = NodeMap::from_labels(&[0, 0, 1, 1]).subset(&[3, 0, 2]);
        assert_eq!(map.members(0), [0, 2]);
        assert_eq!(map.members(1), [1]);
    }
}
