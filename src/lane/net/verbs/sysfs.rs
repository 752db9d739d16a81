//! The kernel's files about NICs: addresses of their ports, and their place in the machine.
//!
//! ```text
//!   class/infiniband/<card>/device                           link into the PCI tree; none for a soft NIC
//!   class/infiniband/<card>/device/numa_node                 -1: unknown
//!   class/infiniband/<card>/ports/<p>/gids/<i>               an address; all zero: empty
//!   class/infiniband/<card>/ports/<p>/gid_attrs/types/<i>    "IB/RoCE v1" or "RoCE v2"; unreadable: empty
//!   devices/system/node/node<n>/{cpulist, distance}          processors of a NUMA node, and how far the others are
//! ```

use std::fs;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

use rustix::thread::{CpuSet, sched_getaffinity};

use super::gid::{Gid, GidType};
use crate::memory::Numa;

/// The tree below a root: `/sys`, or one that a test laid out. Missing and unreadable files count
/// as unknown.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Self {
        Sysfs::below("/sys")
    }
}

impl Sysfs {
    /// The tree below this directory.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Sysfs { root: root.into() }
    }

    /// The addresses of a port, in the order of its table; empty entries are left out.
    pub fn gids(&self, card: &str, port: u8) -> Vec<Gid> {
        let dir = self.card(card).join("ports").join(port.to_string());
        let gid = |index: u8| {
            let gid: Ipv6Addr = read(&dir.join("gids").join(index.to_string()))?.parse().ok()?;
            let kind = match read(&dir.join("gid_attrs/types").join(index.to_string()))?.as_str() {
                "IB/RoCE v1" => GidType::IbOrRoceV1,
                "RoCE v2" => GidType::RoceV2,
                _ => return None,
            };
            (!gid.is_unspecified()).then_some(Gid { index, gid, kind })
        };
        numbered(&dir.join("gids"), "").into_iter().filter_map(gid).collect()
    }

    /// The nearest NUMA node of a NIC.
    pub fn numa_node(&self, card: &str) -> Option<u32> {
        read(&self.card(card).join("device/numa_node"))?.parse().ok()
    }

    /// A NIC's path in the PCI tree: bridges, then its own address.
    pub fn pci_path(&self, card: &str) -> Option<PathBuf> {
        self.card(card).join("device").canonicalize().ok()
    }

    /// How far a NUMA node is from another, in the firmware's measure: 10 is the node itself.
    pub fn numa_distance(&self, from: u32, to: u32) -> Option<u32> {
        let distances = read(&self.nodes().join(format!("node{from}/distance")))?;
        // One number per node that is online.
        let at = numbered::<u32>(&self.nodes(), "node").iter().position(|&node| node == to)?;
        distances.split_ascii_whitespace().nth(at)?.parse().ok()
    }

    /// The NUMA node that this thread is bound to, if it is.
    pub fn own_node(&self) -> Option<u32> {
        let set = sched_getaffinity(None).ok()?;
        let allowed = |cpu: u32| (cpu as usize) < CpuSet::MAX_CPU && set.is_set(cpu as usize);
        Numa::below(self.nodes()).node_of(allowed)
    }

    fn card(&self, card: &str) -> PathBuf {
        self.root.join("class/infiniband").join(card)
    }

    fn nodes(&self) -> PathBuf {
        self.root.join("devices/system/node")
    }
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The numbers of entries that are `prefix` and a number, ascending.
fn numbered<N: std::str::FromStr + Ord>(dir: &Path, prefix: &str) -> Vec<N> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut numbers: Vec<N> = names.filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::net::verbs::fake::Tree;

    #[test]
    fn addresses_are_read_with_their_kinds_and_empty_ones_left_out() {
        let tree = Tree::new();
        let port = "class/infiniband/mlx5_0/ports/1";
        for (index, gid, kind) in [
            (0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),
            (1, "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2"),
            (2, "0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"),
            (10, "0000:0000:0000:0000:0000:ffff:0a00:0002", "RoCE v2"),
            (3, "fe80:0000:0000:0000:0000:0000:0000:0002", "RoCE v9"),
        ] {
            tree.write(&format!("{port}/gids/{index}"), gid);
            tree.write(&format!("{port}/gid_attrs/types/{index}"), kind);
        }
        tree.write(&format!("{port}/gids/4"), "fe80:0000:0000:0000:0000:0000:0000:0004");
        let gids = tree.sysfs().gids("mlx5_0", 1);
        let local: Ipv6Addr = "fe80::1".parse().unwrap();
        let mapped: Ipv6Addr = "::ffff:10.0.0.2".parse().unwrap();
        let expected = [
            Gid { index: 0, gid: local, kind: GidType::IbOrRoceV1 },
            Gid { index: 1, gid: local, kind: GidType::RoceV2 },
            Gid { index: 10, gid: mapped, kind: GidType::RoceV2 },
        ];
        assert_eq!(gids, expected);
        assert_eq!(tree.sysfs().gids("mlx5_1", 1), []);
    }

    #[test]
    fn a_card_s_place_is_read_or_unknown() {
        let tree = Tree::new();
        tree.write("devices/pci0000:16/0000:17:00.0/numa_node", "1");
        tree.link("class/infiniband/mlx5_0/device", "devices/pci0000:16/0000:17:00.0");
        tree.write("class/infiniband/mlx5_1/device/numa_node", "-1");
        let sysfs = tree.sysfs();
        assert_eq!(sysfs.numa_node("mlx5_0"), Some(1));
        assert!(sysfs.pci_path("mlx5_0").unwrap().ends_with("devices/pci0000:16/0000:17:00.0"));
        assert_eq!(sysfs.numa_node("mlx5_1"), None);
        assert_eq!((sysfs.numa_node("rxe0"), sysfs.pci_path("rxe0")), (None, None));
    }

    #[test]
    fn distances_are_those_between_nodes_that_are_there() {
        let tree = Tree::new();
        // Node 1 is offline: distances are listed for those that are there.
        tree.write("devices/system/node/node0/cpulist", "0-3,8");
        tree.write("devices/system/node/node0/distance", "10 21");
        tree.write("devices/system/node/node2/cpulist", "4-7,9-11");
        tree.write("devices/system/node/node2/distance", "20 10");
        let sysfs = tree.sysfs();
        assert_eq!(sysfs.numa_distance(0, 2), Some(21));
        assert_eq!(sysfs.numa_distance(2, 0), Some(20));
        assert_eq!(sysfs.numa_distance(0, 1), None);
    }
}
