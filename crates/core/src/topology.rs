//! Which ranks share a load domain, and which paths that leaves between those that do not.
//!
//! A *node* is a load domain: ranks that can reach each other's memory by loads and stores (or by
//! copy engine). Nodes are found by comparing the ranks' reports of where they run, never by
//! arithmetic on rank numbers: jobs interleave, nodes differ in size, and one machine may hold
//! several load domains.
//!
//! [`Paths`] are those of one group under one route: senders, relays and receivers.
//!
//! ```text
//!   direct    s ------------------------------> d          every rank of another node is its own relay
//!
//!   pxn       s --net--> relay (rail peer of s in the node of d) --load domain--> d
//!
//!   sums      the rail peer of s in each node sends s the counts of that node, on both routes
//! ```
//!
//! A *relay* of `s` takes the block that `s` has for the ranks it *serves*, and copies its rows to
//! them. Under `pxn` it serves its whole node; under `direct` it serves itself. So statements about
//! relays hold for both routes.

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

/// How rows reach the rank of their expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Route {
    /// Directly from the source to the destination.
    #[default]
    Direct,
    /// Once per remote node, to the rail peer there, which relays within its node (NCCL's PXN,
    /// DeepEP's internode dispatch).
    Pxn,
}

impl Route {
    /// All routes, for error messages and tests.
    pub const ALL: [Route; 2] = [Route::Direct, Route::Pxn];

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Route::Direct => "direct",
            Route::Pxn => "pxn",
        }
    }
}

/// The paths of one rank. Ranks are positions in the group; enumerations begin with the next rank
/// (or node), so that ranks do not all begin with the same one.
#[derive(Clone, Copy, Debug)]
pub struct Paths<'a> {
    nodes: &'a NodeMap,
    route: Route,
    me: u32,
}

impl<'a> Paths<'a> {
    /// For rank `me` of the group whose nodes are given.
    pub fn new(nodes: &'a NodeMap, route: Route, me: u32) -> Self {
        Paths { nodes, route, me }
    }

    /// This rank.
    pub fn me(&self) -> u32 {
        self.me
    }

    /// Which ranks share memory.
    pub fn nodes(&self) -> &'a NodeMap {
        self.nodes
    }

    /// The route.
    pub fn route(&self) -> Route {
        self.route
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.nodes.ranks()
    }

    /// The paths of another rank of the group.
    pub fn of(&self, rank: u32) -> Paths<'a> {
        Paths { me: rank, ..*self }
    }

    /// Whether a rank is of this node.
    pub fn same_node(&self, peer: u32) -> bool {
        self.nodes.same_node(self.me, peer)
    }

    /// Whether there is more than one node: only then do rows cross a net.
    pub fn is_multi_node(&self) -> bool {
        self.nodes.nodes() > 1
    }

    /// All other ranks.
    pub fn peers(&self) -> impl Iterator<Item = u32> + use<'a> {
        let (me, ranks) = (self.me, self.ranks());
        (1..ranks).map(move |step| (me + step) % ranks)
    }

    /// The other ranks of this node.
    pub fn local_peers(&self) -> impl Iterator<Item = u32> + use<'a> {
        let paths = *self;
        self.peers().filter(move |&peer| paths.same_node(peer))
    }

    /// The rail peers of this rank: they send it the counts of their nodes.
    pub fn count_senders(&self) -> impl Iterator<Item = u32> + use<'a> {
        let (nodes, me, own, count) = (self.nodes, self.me, self.nodes.node_of(self.me), self.nodes.nodes());
        (1..count).map(move |step| nodes.rail_peer(me, (own + step) % count))
    }

    /// The ranks whose rail peer this one is: it sends them the counts of its node.
    pub fn count_receivers(&self) -> impl Iterator<Item = u32> + use<'a> {
        let paths = *self;
        let own = self.nodes.node_of(self.me);
        self.peers().filter(move |&s| !paths.same_node(s) && paths.nodes.rail_peer(s, own) == paths.me)
    }

    /// The relays of this rank: where its blocks for other nodes go.
    pub fn relays(&self) -> impl Iterator<Item = u32> + use<'a> {
        let paths = *self;
        let all = (self.route == Route::Direct).then(|| self.peers().filter(move |&p| !paths.same_node(p)));
        let others = (self.route == Route::Pxn).then(|| self.count_senders());
        all.into_iter().flatten().chain(others.into_iter().flatten())
    }

    /// The ranks whose blocks this one takes.
    pub fn sources(&self) -> impl Iterator<Item = u32> + use<'a> {
        let paths = *self;
        let all = (self.route == Route::Direct).then(|| self.peers().filter(move |&p| !paths.same_node(p)));
        let others = (self.route == Route::Pxn).then(|| self.count_receivers());
        all.into_iter().flatten().chain(others.into_iter().flatten())
    }

    /// The ranks that `relay` serves, ascending.
    pub fn served_by(&self, relay: u32) -> &'a [u32] {
        let members = self.nodes.members(self.nodes.node_of(relay));
        match self.route {
            Route::Direct => &members[self.nodes.index_in_node(relay) as usize..][..1],
            Route::Pxn => members,
        }
    }

    /// By which rank the rows of this one reach `dest`: by itself on the same node.
    pub fn relay_to(&self, dest: u32) -> u32 {
        match self.route {
            Route::Pxn if !self.same_node(dest) => self.nodes.rail_peer(self.me, self.nodes.node_of(dest)),
            _ => dest,
        }
    }

    /// How many ranks may have to stage rows to relay: all, or none on the direct route.
    pub fn staged_ranks(&self) -> u32 {
        if self.route == Route::Pxn && self.is_multi_node() { self.ranks() } else { 0 }
    }

    /// Whether a connection to `peer` is needed.
    pub fn needs_connection(&self, peer: u32) -> bool {
        let (mine, theirs) = (self.nodes.node_of(self.me), self.nodes.node_of(peer));
        mine != theirs
            && (self.route == Route::Direct
                || self.nodes.rail_peer(self.me, theirs) == peer
                || self.nodes.rail_peer(peer, mine) == self.me)
    }

    /// Where `relay` keeps this rank's rows: this one's number among the relay's sources,
    /// ascending.
    pub fn place_at(&self, relay: u32) -> u32 {
        match self.route {
            Route::Pxn => self.of(relay).rail_senders_below(self.me),
            Route::Direct => {
                let members = self.nodes.members(self.nodes.node_of(relay));
                self.me - members.partition_point(|&member| member < self.me) as u32
            }
        }
    }

    /// Where this rank keeps its message to `source`: its number among the receivers, ascending.
    pub fn place_of_receiver(&self, source: u32) -> u32 {
        self.rail_senders_below(source)
    }

    /// How many ranks below `end` have this one as their rail peer. Time: O(nodes), because calls
    /// ask this for each peer.
    fn rail_senders_below(&self, end: u32) -> u32 {
        let own = self.nodes.node_of(self.me);
        let (index, size) = (self.nodes.index_in_node(self.me) as usize, self.nodes.members(own).len());
        let senders = |node| self.nodes.members(node).iter().skip(index).step_by(size);
        let below = |node| senders(node).take_while(|&&sender| sender < end).count() as u32;
        (0..self.nodes.nodes()).filter(|&node| node != own).map(below).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    mod nodes {
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

    mod paths {
        use super::*;

        fn maps() -> Vec<NodeMap> {
            [
                &[0, 0, 0, 0, 1, 1, 1, 1][..],
                &[0, 0, 0, 1, 1, 1, 1, 1],
                &[0, 1, 0, 1, 1, 2, 0, 1],
                &[0, 1, 2],
                &[0],
            ]
            .iter()
            .map(|labels| NodeMap::from_labels(labels))
            .collect()
        }

        #[test]
        fn a_token_has_one_relay_per_remote_node_under_pxn() {
            for map in maps() {
                for me in 0..map.ranks() {
                    let paths = Paths::new(&map, Route::Pxn, me);
                    assert_eq!(paths.relays().count() as u32, map.nodes() - 1);
                    for dest in paths.peers().filter(|&d| !paths.same_node(d)) {
                        let relay = paths.relay_to(dest);
                        assert!(paths.relays().any(|r| r == relay) && map.same_node(relay, dest));
                        assert!(paths.served_by(relay).contains(&dest));
                    }
                }
            }
        }

        #[test]
        fn sources_and_relays_are_two_views_of_one_relation() {
            for (map, route) in maps().iter().flat_map(|map| Route::ALL.map(|route| (map, route))) {
                for a in 0..map.ranks() {
                    for b in 0..map.ranks() {
                        let (of_a, of_b) = (Paths::new(map, route, a), Paths::new(map, route, b));
                        assert_eq!(of_a.relays().any(|r| r == b), of_b.sources().any(|s| s == a));
                        assert_eq!(
                            of_a.count_senders().any(|r| r == b),
                            of_b.count_receivers().any(|s| s == a)
                        );
                        let wired = [of_a, of_b]
                            .iter()
                            .zip([b, a])
                            .any(|(p, other)| p.relays().chain(p.count_senders()).any(|r| r == other));
                        assert_eq!((of_a.needs_connection(b), of_b.needs_connection(a)), (wired, wired));
                    }
                }
            }
        }

        #[test]
        fn places_number_the_sources_of_a_relay_without_a_gap() {
            for (map, route) in maps().iter().flat_map(|map| Route::ALL.map(|route| (map, route))) {
                for relay in 0..map.ranks() {
                    let paths = Paths::new(map, route, relay);
                    let mut sources: Vec<u32> = paths.sources().collect();
                    sources.sort_unstable();
                    let places: Vec<u32> = sources.iter().map(|&s| paths.of(s).place_at(relay)).collect();
                    assert_eq!(places, (0..sources.len() as u32).collect::<Vec<_>>());
                    let mut receivers: Vec<u32> = paths.count_receivers().collect();
                    receivers.sort_unstable();
                    let places: Vec<u32> = receivers.iter().map(|&s| paths.place_of_receiver(s)).collect();
                    assert_eq!(places, (0..receivers.len() as u32).collect::<Vec<_>>());
                }
            }
        }
    }
}
