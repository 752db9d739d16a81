//! Choice of a rank's NIC among those of its machine, as NCCL chooses: near to its GPU.
//!
//! ```text
//!   usable NICs
//!     of the network that has most bandwidth here       InfiniBand or Ethernet: ranks of like machines agree
//!     at least half as fast as the fastest              leaves out NICs of storage and management
//!     nearest to the rank's GPU, else to its cores      bridges below one root port, root complex, NUMA distance
//!     fastest of these
//!   among several that are left, the nth GPU of the machine takes the nth, in turn; else the nth rank
//!
//!   pci0000:15 -- root port -- switch --+-- GPU 0, NIC a          rank 0 -> a
//!              '- root port -- switch --+-- GPU 1, NIC b          rank 1 -> b
//!   pci0000:00 -- root port -- NIC c, 100 Gb/s                    left out: less than half of 400 Gb/s
//! ```
//!
//! Which GPU is the rank's is not known before it makes a context. The nth rank of a machine is
//! taken to use the nth of the GPUs that it may see, as under torchrun. A scheduler that gives each
//! rank one GPU may call all of them 0. So a list of GPU 0 alone says nothing of a later rank.

/// Kind of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

/// Place in a machine's PCI tree: the root complex, bridges, and the device itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciPath(Vec<String>);

impl PciPath {
    /// From the path of a device in sysfs. Empty for a device without such a place.
    ///
    /// ```
    /// use sidelane_core::nic_choice::PciPath;
    /// let path = PciPath::of("/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0");
    /// assert_eq!(path.address(), Some("0000:16:00.0"));
    /// assert_eq!(PciPath::of("/sys/devices/virtual/infiniband/rxe0").address(), None);
    /// ```
    pub fn of(path: &str) -> Self {
        PciPath(path.split('/').skip_while(|part| !part.starts_with("pci")).map(str::to_owned).collect())
    }

    /// Address of the device; none if it has no place.
    pub fn address(&self) -> Option<&str> {
        self.0.last().map(String::as_str)
    }

    /// How near another device is in the tree; none if they share no root complex. `numa_distance`
    /// is that between their NUMA nodes.
    fn nearness(&self, other: &PciPath, numa_distance: Option<u32>) -> Option<Nearness> {
        let shared = self.0.iter().zip(&other.0).take_while(|(one, other)| one == other).count();
        match shared {
            0 => None,
            1 => Some(Nearness::RootComplex { numa_distance: numa_distance.unwrap_or(u32::MAX) }),
            _ => Some(Nearness::RootPort { bridges: (self.0.len() + other.0.len() - 2 * shared) as u32 }),
        }
    }
}

/// A usable NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicPlace {
    /// Its name.
    pub name: String,
    /// Its place in the PCI tree.
    pub pci: PciPath,
    /// The NUMA node that it is near to.
    pub numa_node: Option<u32>,
    /// Its network.
    pub link: Option<LinkLayer>,
    /// Its rate, in Gb/s; 0: unknown.
    pub rate: u32,
}

/// A GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuPlace {
    /// Its place in the PCI tree.
    pub pci: PciPath,
    /// The NUMA node that it is near to.
    pub numa_node: Option<u32>,
    /// Whether the driver hides it from this process, as in a container that was given others.
    pub hidden: bool,
}

impl GpuPlace {
    /// The GPU of the nth rank of a machine, among its GPUs by address. `visible` is the value of
    /// `CUDA_VISIBLE_DEVICES`, if it is set. None if there is no GPU, if they are named by anything
    /// but numbers, or if the list is GPU 0 alone and the rank is not the first.
    pub fn of_rank(gpus: &[GpuPlace], visible: Option<&str>, nth: u32) -> Option<usize> {
        let shown: Vec<usize> = (0..gpus.len()).filter(|&at| !gpus[at].hidden).collect();
        let listed: Vec<usize> = match visible {
            None => shown,
            Some(list) => list
                .split(',')
                .map_while(|number| shown.get(number.trim().parse::<usize>().ok()?).copied())
                .collect(),
        };
        let renumbered = nth > 0 && visible.is_some_and(|list| list.trim() == "0");
        (!listed.is_empty() && !renumbered).then(|| listed[nth as usize % listed.len()])
    }
}

/// A rank that takes a NIC.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankPlace<'a> {
    /// Its turn among equal NICs: the number of its GPU, or else its own on the machine.
    pub turn: u32,
    /// Its GPU.
    pub gpu: Option<&'a GpuPlace>,
    /// The NUMA node that it is bound to.
    pub numa_node: Option<u32>,
}

/// How near a NIC is to a rank, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// Below one root port with its GPU, so behind the same switch.
    RootPort {
        /// Steps between them in the tree.
        bridges: u32,
    },
    /// On the root complex of its GPU. Virtual machines may have one for all devices.
    RootComplex {
        /// Distance of their NUMA nodes; the largest number if unknown.
        numa_distance: u32,
    },
    /// By the firmware's measure; 10 is the node itself.
    NumaDistance(u32),
    /// One place is unknown.
    Unknown,
}

impl std::fmt::Display for Nearness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Nearness::RootPort { .. } => write!(f, "same PCI switch"),
            Nearness::RootComplex { .. } => write!(f, "same root complex"),
            Nearness::NumaDistance(10) => write!(f, "same NUMA node"),
            Nearness::NumaDistance(distance) => write!(f, "NUMA distance {distance}"),
            Nearness::Unknown => write!(f, "unknown distance"),
        }
    }
}

/// Why a rank does not consider a usable NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// The machine has more bandwidth on another kind of network.
    OtherNetwork,
    /// It has less than half the rate of the fastest, which is this, in Gb/s.
    Slow {
        /// Rate of the fastest.
        fastest: u32,
    },
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LeftOut::OtherNetwork => write!(f, "more bandwidth on another kind of network"),
            LeftOut::Slow { fastest } => write!(f, "less than half of {fastest} Gb/s"),
        }
    }
}

/// For each NIC why no rank considers it; none if ranks do.
pub fn left_out(nics: &[NicPlace]) -> Vec<Option<LeftOut>> {
    let rate = |link| -> u64 {
        nics.iter().filter(|nic| nic.link == Some(link)).map(|nic| u64::from(nic.rate)).sum()
    };
    let has = |link| nics.iter().any(|nic| nic.link == Some(link));
    let infiniband = has(LinkLayer::InfiniBand)
        && (!has(LinkLayer::Ethernet) || rate(LinkLayer::InfiniBand) >= rate(LinkLayer::Ethernet));
    let network = if infiniband { LinkLayer::InfiniBand } else { LinkLayer::Ethernet };
    let other = |nic: &NicPlace| nic.link.is_some_and(|link| link != network);
    let fastest = nics.iter().filter(|nic| !other(nic)).map(|nic| nic.rate).max().unwrap_or(0);
    let reason = |nic: &NicPlace| match nic.rate {
        _ if other(nic) => Some(LeftOut::OtherNetwork),
        rate if rate > 0 && rate < fastest.div_ceil(2) => Some(LeftOut::Slow { fastest }),
        _ => None,
    };
    nics.iter().map(reason).collect()
}

/// The NIC that a rank takes, as an index, and how near it is. None if there is no NIC.
/// `numa_distance` is that between two NUMA nodes, if the firmware says it.
pub fn choose(
    nics: &[NicPlace],
    rank: RankPlace<'_>,
    numa_distance: impl Fn(u32, u32) -> Option<u32>,
) -> Option<(usize, Nearness)> {
    let nearness = |nic: &NicPlace| {
        let node = rank.gpu.and_then(|gpu| gpu.numa_node).or(rank.numa_node);
        let distance = node.zip(nic.numa_node).and_then(|(from, to)| numa_distance(from, to));
        let in_tree = rank.gpu.and_then(|gpu| gpu.pci.nearness(&nic.pci, distance));
        in_tree.or(distance.map(Nearness::NumaDistance)).unwrap_or(Nearness::Unknown)
    };
    let left_out = left_out(nics);
    let considered = || (0..nics.len()).filter(|&at| left_out[at].is_none());
    let rank_of = |at: usize| (nearness(&nics[at]), std::cmp::Reverse(nics[at].rate));
    let best = considered().map(rank_of).min()?;
    let mut equal: Vec<usize> = considered().filter(|&at| rank_of(at) == best).collect();
    // In the order of the tree, however they were listed. NICs without a place keep their order.
    equal.sort_by_key(|&at| &nics[at].pci);
    Some((equal[rank.turn as usize % equal.len()], best.0))
}

#[cfg(test)]
mod tests {
    use LinkLayer::{Ethernet, InfiniBand};
    use proptest::prelude::*;

    use super::*;

    /// A machine: its GPUs by address, and its NICs.
    struct Machine {
        gpus: Vec<GpuPlace>,
        nics: Vec<NicPlace>,
    }

    /// A device behind a bridge of a root port.
    fn behind(complex: u32, port: u32, slot: u32) -> PciPath {
        PciPath::of(&format!(
            "/sys/devices/pci0000:{complex:02x}/0000:{complex:02x}:{port:02x}.0/0000:{:02x}:{slot:02x}.0/0000:{:02x}:00.0",
            complex + 1,
            complex + 2 + slot,
        ))
    }

    fn gpu(numa_node: u32, pci: PciPath) -> GpuPlace {
        GpuPlace { pci, numa_node: Some(numa_node), hidden: false }
    }

    fn nic(name: &str, (link, rate): (LinkLayer, u32), numa_node: u32, pci: PciPath) -> NicPlace {
        NicPlace { name: name.to_owned(), pci, numa_node: Some(numa_node), link: Some(link), rate }
    }

    fn distance(from: u32, to: u32) -> Option<u32> {
        Some(if from == to { 10 } else { 21 })
    }

    impl Machine {
        /// Names of the NICs that ranks with a GPU each take.
        fn names(&self, visible: Option<&str>, ranks: u32) -> Vec<&str> {
            let of = |nth| {
                let own = GpuPlace::of_rank(&self.gpus, visible, nth);
                let (turn, gpu) = (own.map_or(nth, |at| at as u32), own.map(|at| &self.gpus[at]));
                let rank = RankPlace { turn, gpu, numa_node: None };
                self.nics[choose(&self.nics, rank, distance).unwrap().0].name.as_str()
            };
            (0..ranks).map(of).collect()
        }
    }

    /// Eight root complexes, each with a switch for a GPU and a NIC; two more NICs for storage and
    /// one for management. NICs are not numbered in the order of GPUs.
    fn dgx_h100() -> Machine {
        let socket = |nth| nth / 4;
        let gpus = (0..8).map(|nth| gpu(socket(nth), behind(0x10 * nth, 1, 1))).collect();
        let compute = |nth: u32| {
            let name = format!("mlx5_{}", (nth + 3) % 8);
            nic(&name, (InfiniBand, 400), socket(nth), behind(0x10 * nth, 1, 0))
        };
        let mut nics: Vec<NicPlace> = (0..8).map(compute).collect();
        nics.push(nic("storage0", (InfiniBand, 400), 0, behind(0x90, 1, 0)));
        nics.push(nic("storage1", (InfiniBand, 400), 1, behind(0xa0, 1, 0)));
        nics.push(nic("management", (Ethernet, 100), 0, behind(0xb0, 1, 0)));
        Machine { gpus, nics }
    }

    #[test]
    fn each_gpu_of_a_dgx_h100_has_the_nic_of_its_switch() {
        let expected = [3, 4, 5, 6, 7, 0, 1, 2].map(|nth| format!("mlx5_{nth}"));
        assert_eq!(dgx_h100().names(None, 8), expected);
        // The launcher may show a rank its GPU alone, or GPUs in another order.
        assert_eq!(dgx_h100().names(Some("5"), 1), ["mlx5_0"]);
        assert_eq!(dgx_h100().names(Some("7,0"), 2), ["mlx5_2", "mlx5_3"]);
    }

    #[test]
    fn gpus_and_nics_that_share_a_switch_are_paired() {
        // HGX H200: four switches with two GPUs and two NICs each.
        let switches = 0..4u32;
        let gpus = switches
            .clone()
            .flat_map(|at| [2, 3].map(|slot| gpu(at / 2, behind(0x20 * at, 1, slot))))
            .collect();
        let nics = switches.flat_map(|at| {
            [0, 1].map(|slot| {
                nic(&format!("mlx5_{}", 2 * at + slot), (Ethernet, 400), at / 2, behind(0x20 * at, 1, slot))
            })
        });
        let machine = Machine { gpus, nics: nics.collect() };
        assert_eq!(machine.names(None, 8), (0..8).map(|nth| format!("mlx5_{nth}")).collect::<Vec<_>>());
        let order = [0, 2, 4, 6, 1, 3, 5, 7];
        let names = order.map(|nth| format!("mlx5_{nth}"));
        assert_eq!(machine.names(Some("0,2,4,6,1,3,5,7"), 8), names);
    }

    #[test]
    fn without_gpus_ranks_of_a_socket_take_its_nics_in_turn() {
        let nics: Vec<NicPlace> = ["a", "b", "c", "d"]
            .into_iter()
            .zip(0..)
            .map(|(name, nth)| nic(name, (InfiniBand, 200), nth / 2, behind(0x20 * nth, 1, 0)))
            .collect();
        let of = |turn, numa_node| {
            let rank = RankPlace { turn, gpu: None, numa_node };
            let (at, nearness) = choose(&nics, rank, distance).unwrap();
            (nics[at].name.as_str(), nearness)
        };
        let own = Nearness::NumaDistance(10);
        assert_eq!([0, 1, 2].map(|nth| of(nth, Some(0))), [("a", own), ("b", own), ("a", own)]);
        assert_eq!([3, 4].map(|nth| of(nth, Some(1))), [("d", own), ("c", own)]);
        assert_eq!(of(2, None), ("c", Nearness::Unknown));
    }

    #[test]
    fn bonded_ports_are_one_nic_for_all() {
        let gpus = (0..4).map(|nth| gpu(nth / 2, behind(0x20 * nth, 1, 0))).collect();
        let nics = vec![nic("mlx5_bond_0", (Ethernet, 200), 0, behind(0x80, 1, 0))];
        assert_eq!(Machine { gpus, nics }.names(None, 4), ["mlx5_bond_0"; 4]);
    }

    #[test]
    fn all_ranks_take_the_network_with_most_bandwidth() {
        let mixed = |infiniband, ethernet| {
            let gpus = vec![gpu(0, behind(0x10, 1, 1)), gpu(1, behind(0x20, 1, 1))];
            // Near to the first GPU is one network, near to the second the other.
            let nics = vec![
                nic("ib", (InfiniBand, infiniband), 0, behind(0x10, 1, 0)),
                nic("roce", (Ethernet, ethernet), 1, behind(0x20, 1, 0)),
            ];
            Machine { gpus, nics }
        };
        assert_eq!(mixed(400, 100).names(None, 2), ["ib", "ib"]);
        assert_eq!(mixed(100, 400).names(None, 2), ["roce", "roce"]);
        assert_eq!(mixed(200, 200).names(None, 2), ["ib", "ib"]);
        assert_eq!(left_out(&mixed(100, 400).nics), [Some(LeftOut::OtherNetwork), None]);
    }

    #[test]
    fn a_container_takes_the_virtual_function_that_it_sees() {
        // A pod of Kubernetes: one GPU, and a virtual function of the NIC behind the same switch.
        let own = gpu(1, behind(0x50, 1, 1));
        let virtual_function = PciPath::of(
            "/sys/devices/pci0000:50/0000:50:01.0/0000:51:00.0/0000:52:00.2/infiniband/mlx5_9/device",
        );
        let nics = [nic("mlx5_9", (Ethernet, 400), 1, virtual_function)];
        let rank = RankPlace { turn: 0, gpu: Some(&own), numa_node: None };
        let (at, nearness) = choose(&nics, rank, distance).unwrap();
        assert_eq!((at, nearness.to_string().as_str()), (0, "same PCI switch"));
    }

    #[test]
    fn in_a_flat_tree_numa_nodes_decide() {
        let flat = |at: u32| PciPath::of(&format!("/sys/devices/pci0000:00/0000:00:{at:02x}.0"));
        let nics = [0, 1].map(|node| nic(&format!("mlx5_{node}"), (Ethernet, 100), node, flat(node)));
        let at = |numa_node, turn| {
            let own = GpuPlace { numa_node, ..gpu(0, flat(9)) };
            choose(&nics, RankPlace { turn, gpu: Some(&own), numa_node: None }, distance).unwrap().0
        };
        assert_eq!([0, 1].map(|turn| at(Some(1), turn)), [1, 1]);
        assert_eq!([0, 1, 2].map(|turn| at(None, turn)), [0, 1, 0]);
    }

    #[test]
    fn slow_nics_are_left_out_and_unknown_rates_are_not() {
        let rates = [400, 200, 199, 0].map(|rate| nic("nic", (InfiniBand, rate), 0, PciPath::default()));
        assert_eq!(left_out(&rates), [None, None, Some(LeftOut::Slow { fastest: 400 }), None]);
        assert_eq!(choose(&[], RankPlace::default(), distance), None);
    }

    #[test]
    fn a_list_of_visible_gpus_ends_at_what_is_no_gpu() {
        let gpus = vec![GpuPlace::default(); 4];
        let of = |visible, nth| GpuPlace::of_rank(&gpus, visible, nth);
        assert_eq!([0, 1, 5].map(|nth| of(None, nth)), [Some(0), Some(1), Some(1)]);
        assert_eq!([0, 1, 2].map(|nth| of(Some("3, 1,-1,0"), nth)), [Some(3), Some(1), Some(3)]);
        assert_eq!(
            [0, 1].map(|nth| of(Some("0"), nth)),
            [Some(0), None],
            "each rank may see its own GPU as 0"
        );
        assert_eq!([0, 1].map(|nth| of(Some("1"), nth)), [Some(1), Some(1)]);
        let in_a_container: Vec<GpuPlace> =
            (0..4).map(|at| GpuPlace { hidden: at != 2, ..GpuPlace::default() }).collect();
        assert_eq!(GpuPlace::of_rank(&in_a_container, None, 0), Some(2));
        assert_eq!(GpuPlace::of_rank(&in_a_container, Some("0"), 0), Some(2));
        assert_eq!([Some(""), Some("4"), Some("GPU-7e5f"), Some("-1")].map(|list| of(list, 0)), [None; 4]);
        assert_eq!(GpuPlace::of_rank(&[], None, 0), None);
    }

    fn any_nic() -> impl Strategy<Value = NicPlace> {
        let link = prop::option::of(prop::bool::ANY.prop_map(|it| if it { InfiniBand } else { Ethernet }));
        let place = (0..4u32, 0..2u32, 0..3u32);
        (link, prop::sample::select(vec![0, 25, 100, 200, 400]), prop::option::of(0..2u32), place).prop_map(
            |(link, rate, numa_node, (complex, port, slot))| NicPlace {
                name: String::new(),
                pci: behind(0x20 * complex, port, slot),
                numa_node,
                link,
                rate,
            },
        )
    }

    proptest! {
        #[test]
        fn rank_takes_nearest_nic_of_those_not_left_out(
            nics in prop::collection::vec(any_nic(), 1..10),
            turn in any::<u32>(),
            with_gpu in any::<bool>(),
        ) {
            let own = gpu(0, behind(0x20, 1, 2));
            let rank = RankPlace { turn, gpu: with_gpu.then_some(&own), numa_node: Some(1) };
            let (at, nearness) = choose(&nics, rank, distance).unwrap();
            let left_out = left_out(&nics);
            prop_assert_eq!(left_out[at], None);
            for other in (0..nics.len()).filter(|&other| left_out[other].is_none()) {
                let alone = std::slice::from_ref(&nics[other]);
                prop_assert!(choose(alone, rank, distance).unwrap().1 >= nearness);
            }
        }

        #[test]
        fn ranks_spread_evenly_over_equal_nics(nics in 1..10usize, ranks in 1..40u32) {
            let nics = vec![nic("nic", (InfiniBand, 400), 0, behind(0x20, 1, 0)); nics];
            let mut load = vec![0u32; nics.len()];
            for turn in 0..ranks {
                load[choose(&nics, RankPlace { turn, ..RankPlace::default() }, distance).unwrap().0] += 1;
            }
            prop_assert_eq!(load.iter().sum::<u32>(), ranks);
            prop_assert!(load.iter().max().unwrap() - load.iter().min().unwrap() <= 1);
        }
    }
}
