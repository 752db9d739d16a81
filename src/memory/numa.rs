//! NUMA nodes of this machine: which processors are near to which memory.
//!
//! ```text
//!   devices/system/node/node<n>/cpulist      "0-3,8"
//!
//!   8 ranks on 2 nodes     0 0 0 0 1 1 1 1          blocks: adjacent ranks share a memory
//!   2 ranks on 4 nodes     0-1 2-3                  several nodes each
//! ```
//!
//! Memory lies where its first writer runs, so a rank that stays on one node has its heap there.

use std::fs;
use std::path::{Path, PathBuf};

/// The NUMA nodes that have processors, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numa {
    nodes: Vec<(u32, Vec<u32>)>,
}

impl Numa {
    /// Nodes of this machine. None where the kernel reports none.
    pub fn here() -> Self {
        Numa::below("/sys/devices/system/node")
    }

    /// As a directory like that describes them.
    pub fn below(dir: impl AsRef<Path>) -> Self {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let node = |path: PathBuf| {
            let number = path.file_name()?.to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = fs::read_to_string(path.join("cpulist")).ok()?;
            let processors: Vec<u32> = processors(list.trim()).collect();
            (!processors.is_empty()).then_some((number, processors))
        };
        let mut nodes: Vec<_> = entries.filter_map(|entry| node(entry.path())).collect();
        nodes.sort_unstable();
        Numa { nodes }
    }

    /// The node of these processors, if all belong to one.
    pub fn node_of(&self, processors: impl Fn(u32) -> bool) -> Option<u32> {
        let mut nodes = self.nodes.iter().filter(|(_, own)| own.iter().any(|&cpu| processors(cpu)));
        let (node, _) = nodes.next()?;
        nodes.next().is_none().then_some(*node)
    }

    /// Processors for the `nth` of `ranks`, among the `allowed` ones: of one node or, with more
    /// nodes than ranks, of several. Empty if one node has them all, or one rank may have all
    /// nodes.
    pub fn share(&self, allowed: impl Fn(u32) -> bool, nth: u32, ranks: u32) -> Option<Vec<u32>> {
        let own = |(_, own): &(u32, Vec<u32>)| own.iter().copied().filter(|&cpu| allowed(cpu)).collect();
        let mut nodes: Vec<Vec<u32>> = self.nodes.iter().map(own).collect();
        nodes.retain(|processors| !processors.is_empty());
        if nodes.len() < 2 || ranks < 2 || nth >= ranks {
            return None;
        }
        let upto = |rank: u32| (rank as usize * nodes.len()) / ranks as usize;
        let (first, end) = (upto(nth), upto(nth + 1));
        Some(nodes[first..end.max(first + 1)].concat())
    }
}

/// The processors of a list like `0-3,8`.
fn processors(list: &str) -> impl Iterator<Item = u32> + '_ {
    let ranges = list.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse::<u32>().ok()?..=last.parse().ok()?)
    });
    ranges.flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numa(lists: &[(u32, &str)]) -> Numa {
        let nodes = lists.iter().map(|&(node, list)| (node, processors(list).collect()));
        Numa { nodes: nodes.collect() }
    }

    #[test]
    fn numa_nodes_are_read_in_order_without_processorless_ones() {
        let dir = std::env::temp_dir().join(format!("sidelane-numa-{}", std::process::id()));
        for (node, list) in [("node10", "8\n"), ("node2", "4-6,9\n"), ("node3", "\n"), ("power", "1\n")] {
            fs::create_dir_all(dir.join(node)).unwrap();
            fs::write(dir.join(node).join("cpulist"), list).unwrap();
        }
        let read = Numa::below(&dir);
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(read, numa(&[(2, "4-6,9"), (10, "8")]));
        assert_eq!(Numa::below(&dir), Numa::default());
    }

    #[test]
    fn processors_are_on_a_node_only_if_all_are() {
        let numa = numa(&[(0, "0-3,8"), (2, "4-7,9-11")]);
        assert_eq!(numa.node_of(|cpu| cpu == 8 || cpu == 1), Some(0));
        assert_eq!(numa.node_of(|cpu| (9..=10).contains(&cpu)), Some(2));
        assert_eq!(numa.node_of(|cpu| cpu == 3 || cpu == 4), None);
        assert_eq!(numa.node_of(|_| false), None);
    }

    #[test]
    fn ranks_share_numa_nodes_in_blocks_or_get_several() {
        let two = numa(&[(0, "0-1"), (1, "2-3")]);
        let shares =
            |ranks| (0..ranks).map(|nth| two.share(|_| true, nth, ranks).unwrap()).collect::<Vec<_>>();
        assert_eq!(shares(4), [[0, 1], [0, 1], [2, 3], [2, 3]]);
        assert_eq!(shares(3), [[0, 1], [0, 1], [2, 3]]);
        let four = numa(&[(0, "0"), (1, "1"), (2, "2"), (3, "3")]);
        assert_eq!(four.share(|_| true, 0, 2), Some(vec![0, 1]));
        assert_eq!(four.share(|_| true, 1, 2), Some(vec![2, 3]));
        assert_eq!(four.share(|cpu| cpu > 1, 0, 2), Some(vec![2]));
    }

    #[test]
    fn one_rank_or_one_node_needs_no_share() {
        let two = numa(&[(0, "0-1"), (1, "2-3")]);
        assert_eq!(two.share(|_| true, 0, 1), None);
        assert_eq!(two.share(|cpu| cpu < 2, 0, 4), None);
        assert_eq!(Numa::default().share(|_| true, 0, 4), None);
    }
}
