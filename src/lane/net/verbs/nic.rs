//! From the machine's NICs to a rank's: discovered, chosen, opened.
//!
//! ```text
//!   Context::names --> usable: a port is active and has a GID --> choose --> Nic: context, path
//!
//!   named in the settings   all of them, in the order given: NIC 0, NIC 1, ...
//!   else                    one, by the places of NICs and GPUs in the machine (sidelane_core::nic_choice)
//! ```
//!
//! A RoCE port has each GID twice: for RoCE v1, which no router passes, and for RoCE v2, which
//! travels in UDP over IP. Switches are most often set up for those made of an IPv4 address.
//!
//! The kernel's files ([`Sysfs`]) have the addresses of ports, and the place of NICs in the
//! machine:
//!
//! ```text
//!   class/infiniband/<nic>/device                           link into the PCI tree; none for a soft NIC
//!   class/infiniband/<nic>/device/numa_node                 -1: unknown
//!   class/infiniband/<nic>/ports/<p>/rate                   "400 Gb/sec (4X NDR)"
//!   class/infiniband/<nic>/ports/<p>/gids/<i>               an address; all zero: empty
//!   class/infiniband/<nic>/ports/<p>/gid_attrs/types/<i>    "IB/RoCE v1" or "RoCE v2"; unreadable: empty
//!   bus/pci/devices/<address>                               link into the PCI tree: {vendor, class, numa_node}
//!   devices/system/node/node<n>/{cpulist, distance}         processors of a NUMA node, and its distances
//! ```

use std::fs;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::thread::{CpuSet, sched_getaffinity};
use sidelane_core::nic_choice::{self, GpuPlace, LinkLayer, Nearness, NicPlace, PciPath, RankPlace};

use super::ffi::{
    IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048,
    IBV_MTU_4096, IBV_PORT_ACTIVE, IBV_PORT_ARMED, IBV_PORT_DOWN, IBV_PORT_INIT, ibv_port_attr,
};
use super::order::PlacementOrder;
use super::{Context, Library, Path, Settings};
use crate::error::VerbsError;
use crate::memory::Numa;

/// A NIC that a rank uses, open and ready to connect.
#[derive(Clone, Debug)]
pub struct Nic {
    /// The NIC.
    pub context: Arc<Context>,
    /// How its queue pairs go out.
    pub path: Path,
    /// Its place in the machine.
    place: NicPlace,
    /// Why this rank took it; none if the settings name it.
    reason: Option<Reason>,
}

/// How near a NIC is, and to what.
#[derive(Clone, Debug)]
struct Reason {
    nearness: Nearness,
    /// Address of the GPU that the rank is taken to use.
    gpu: Option<String>,
}

impl std::fmt::Display for Nic {
    /// For reports: the NIC, its address, its place, and what is known about the order of its
    /// writes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Path { port, gid, gid_index, mtu, .. } = self.path;
        let address = gid.to_ipv4_mapped().map_or_else(|| gid.to_string(), |address| address.to_string());
        write!(f, "{} port {port}, {address} (GID {gid_index}), MTU {}", self.context.name(), mtu.bytes())?;
        if let Some(node) = self.place.numa_node {
            write!(f, ", NUMA node {node}")?;
        }
        if let Some(address) = self.place.pci.address() {
            write!(f, ", PCI {address}")?;
        }
        match &self.reason {
            Some(Reason { nearness, gpu: Some(gpu) }) => write!(f, ", {nearness} as GPU {gpu}")?,
            Some(Reason { nearness, gpu: None }) => write!(f, ", {nearness}")?,
            None => {}
        }
        match self.context.attributes().order {
            PlacementOrder::Kept(why) => write!(f, ", writes in order: {why}"),
            PlacementOrder::Unknown => write!(f, ", writes perhaps in any order"),
        }
    }
}

impl Nic {
    /// The NICs of this process, which is the `nth` rank of its node: those that the settings name,
    /// or else the nearest usable one.
    ///
    /// # Errors
    /// [`VerbsError::NoNic`], [`VerbsError::NoSuchNic`]; the error of a named NIC or, if none is
    /// usable, of the first: [`VerbsError::Open`], [`VerbsError::PortDown`],
    /// [`VerbsError::NoSuchPort`], [`VerbsError::NoGid`], [`VerbsError::NoSuchGid`],
    /// [`VerbsError::MtuTooLarge`].
    pub fn open(
        library: &Arc<Library>,
        sysfs: &Sysfs,
        settings: &Settings,
        nth: u32,
    ) -> Result<Vec<Nic>, VerbsError> {
        let names = Context::names(library)?;
        if !settings.nics.is_empty() {
            let named = named(&names, &settings.nics)?;
            return named.into_iter().map(|name| Self::of(library, sysfs, settings, name)).collect();
        }
        let (mut usable, mut refused) = (Vec::new(), None);
        for name in &names {
            match Self::of(library, sysfs, settings, name) {
                Ok(nic) => usable.push(nic),
                Err(why) => {
                    tracing::info!(nic = name, %why, "a NIC is left out");
                    refused.get_or_insert(why);
                }
            }
        }
        let gpus = sysfs.gpus();
        let own = GpuPlace::of_rank(&gpus, settings.visible_gpus.as_deref(), nth);
        let (turn, gpu) = (own.map_or(nth, |at| at as u32), own.map(|at| &gpus[at]));
        let rank = RankPlace { turn, gpu, numa_node: sysfs.own_node() };
        let places: Vec<NicPlace> = usable.iter().map(|nic| nic.place.clone()).collect();
        let Some((at, nearness)) =
            nic_choice::choose(&places, rank, |from, to| sysfs.numa_distance(from, to))
        else {
            return Err(refused.unwrap_or(VerbsError::NoNic));
        };
        let gpu = gpu.and_then(|gpu| gpu.pci.address()).map(str::to_owned);
        Ok(vec![Nic { reason: Some(Reason { nearness, gpu }), ..usable.swap_remove(at) }])
    }

    /// Opens one NIC, if it is usable.
    fn of(library: &Arc<Library>, sysfs: &Sysfs, settings: &Settings, nic: &str) -> Result<Nic, VerbsError> {
        let context = Context::open(library, nic)?;
        let (port, link) = active_port(&context, settings.port)?;
        let at = (nic, port.number);
        let gid = Gid::choose(&sysfs.gids(nic, port.number), link, settings.gid_index, at)?;
        let mtu = settings.mtu.unwrap_or(port.mtu);
        if mtu > port.mtu {
            let (asked, active) = (mtu.bytes(), port.mtu.bytes());
            return Err(VerbsError::MtuTooLarge { nic: nic.to_owned(), port: port.number, asked, active });
        }
        let path = Path {
            port: port.number,
            link,
            lid: port.lid,
            gid_index: gid.index,
            gid: gid.gid,
            mtu,
            pkey_index: settings.pkey_index,
            service_level: settings.service_level,
            traffic_class: settings.traffic_class,
            timeout: settings.timeout,
            retries: settings.retries,
            rnr_retries: settings.rnr_retries,
        };
        Ok(Nic { context, path, place: sysfs.nic(nic, port.number, link), reason: None })
    }
}

/// The port of this number, or the first that is active.
fn active_port(context: &Context, wanted: Option<u8>) -> Result<(Port, LinkLayer), VerbsError> {
    let ports = wanted.map_or(1..=context.attributes().ports, |port| port..=port);
    let mut down = None;
    for number in ports {
        let port = context.port(number)?;
        match (port.state, port.link) {
            (PortState::Active, Some(link)) => return Ok((port, link)),
            (PortState::Active, None) => _ = down.get_or_insert((number, "neither InfiniBand nor RoCE")),
            (state, _) => _ = down.get_or_insert((number, state.name())),
        }
    }
    let (port, state) = down.unwrap_or((1, "missing"));
    Err(VerbsError::PortDown { nic: context.name().to_owned(), port, state })
}

/// The NICs that the settings name, in that order.
///
/// # Errors
/// [`VerbsError::NoSuchNic`].
fn named<'a>(present: &'a [String], names: &[String]) -> Result<Vec<&'a str>, VerbsError> {
    let find = |name: &String| {
        let missing = || VerbsError::NoSuchNic { nic: name.clone(), present: present.to_vec() };
        present.iter().find(|nic| *nic == name).map(String::as_str).ok_or_else(missing)
    };
    names.iter().map(find).collect()
}

/// A port of a NIC, as of the query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its number, from 1.
    number: u8,
    /// Whether it carries traffic.
    state: PortState,
    /// Its network; `None` where the NIC does not report it (iWARP).
    link: Option<LinkLayer>,
    /// Its address within an InfiniBand subnet; 0 on Ethernet.
    lid: u16,
    /// The largest packet it sends now.
    mtu: Mtu,
}

/// Whether a port carries traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PortState {
    /// No link.
    Down,
    /// A link, but no subnet manager has been here.
    Initializing,
    /// Configured, not yet in use.
    Armed,
    /// It carries traffic.
    Active,
    /// Something newer.
    Other(u32),
}

impl PortState {
    /// Its name.
    fn name(self) -> &'static str {
        match self {
            PortState::Down => "down",
            PortState::Initializing => "initializing",
            PortState::Armed => "armed",
            PortState::Active => "active",
            PortState::Other(_) => "in an unknown state",
        }
    }
}

/// A network's number, of the specification.
pub(super) fn link_code(link: LinkLayer) -> u8 {
    match link {
        LinkLayer::InfiniBand => IBV_LINK_LAYER_INFINIBAND,
        LinkLayer::Ethernet => IBV_LINK_LAYER_ETHERNET,
    }
}

/// The network of a number.
pub(super) fn link_of(code: u8) -> Option<LinkLayer> {
    [LinkLayer::InfiniBand, LinkLayer::Ethernet].into_iter().find(|link| link_code(*link) == code)
}

/// The largest packet on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    B4096,
}

impl Mtu {
    /// All, smallest first.
    pub const ALL: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];

    /// In bytes.
    pub fn bytes(self) -> u32 {
        256 << self as u32
    }

    pub(super) fn code(self) -> u32 {
        match self {
            Mtu::B256 => IBV_MTU_256,
            Mtu::B512 => IBV_MTU_512,
            Mtu::B1024 => IBV_MTU_1024,
            Mtu::B2048 => IBV_MTU_2048,
            Mtu::B4096 => IBV_MTU_4096,
        }
    }

    pub(super) fn from_code(code: u32) -> Option<Self> {
        Mtu::ALL.into_iter().find(|mtu| mtu.code() == code)
    }
}

impl Port {
    pub(super) fn of(number: u8, attr: &ibv_port_attr) -> Self {
        let state = match attr.state {
            IBV_PORT_DOWN => PortState::Down,
            IBV_PORT_INIT => PortState::Initializing,
            IBV_PORT_ARMED => PortState::Armed,
            IBV_PORT_ACTIVE => PortState::Active,
            other => PortState::Other(other),
        };
        let link = link_of(attr.link_layer);
        // A code that is not known is larger than any that is.
        let mtu = Mtu::from_code(attr.active_mtu).unwrap_or(Mtu::B4096);
        Port { number, state, link, lid: attr.lid, mtu }
    }
}

/// An entry of a port's table of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gid {
    /// Its place in the table.
    index: u8,
    /// The address.
    gid: Ipv6Addr,
    /// Kind of the address.
    kind: GidType,
}

/// Kind of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GidType {
    /// InfiniBand; on Ethernet, RoCE v1.
    IbOrRoceV1,
    /// RoCE v2.
    RoceV2,
}

impl Gid {
    /// The one that a connection uses: that of index `wanted`; on Ethernet RoCE v2 with an IPv4
    /// address, else one with an IPv6 address, else the one of the link; on InfiniBand the first.
    ///
    /// # Errors
    /// [`VerbsError::NoGid`], [`VerbsError::NoSuchGid`].
    fn choose(
        gids: &[Gid],
        link: LinkLayer,
        wanted: Option<u8>,
        (nic, port): (&str, u8),
    ) -> Result<Gid, VerbsError> {
        let nic = nic.to_owned();
        if let Some(index) = wanted {
            let found = gids.iter().find(|gid| gid.index == index).copied();
            return found.ok_or(VerbsError::NoSuchGid { nic, port, index });
        }
        let kind = match link {
            LinkLayer::InfiniBand => GidType::IbOrRoceV1,
            LinkLayer::Ethernet => GidType::RoceV2,
        };
        let usable = gids.iter().filter(|gid| gid.kind == kind);
        usable.min_by_key(|gid| (gid.reach(), gid.index)).copied().ok_or(VerbsError::NoGid { nic, port })
    }

    /// How well routers know it: 0 is best.
    fn reach(&self) -> u32 {
        match self.kind {
            GidType::IbOrRoceV1 => 0,
            GidType::RoceV2 if self.gid.to_ipv4_mapped().is_some() => 0,
            GidType::RoceV2 if !self.gid.is_unicast_link_local() => 1,
            GidType::RoceV2 => 2,
        }
    }
}

/// The tree below a root: `/sys`, or one that a test laid out. Missing and unreadable files count
/// as unknown.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
    /// NVIDIA's driver has a folder for each GPU here, named by its address.
    driver: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Self {
        Sysfs { root: "/sys".into(), driver: "/proc/driver/nvidia/gpus".into() }
    }
}

impl Sysfs {
    /// The tree below this directory, and that of the driver's GPUs in `gpus` there.
    #[cfg(test)]
    pub fn below(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Sysfs { driver: root.join("gpus"), root }
    }

    /// The addresses of a port, in the order of its table; empty entries are left out.
    fn gids(&self, nic: &str, port: u8) -> Vec<Gid> {
        let dir = self.folder(nic).join("ports").join(port.to_string());
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

    /// The place of a NIC.
    fn nic(&self, name: &str, port: u8, link: LinkLayer) -> NicPlace {
        let (pci, numa_node) = place(&self.folder(name).join("device"));
        let rate = read(&self.folder(name).join(format!("ports/{port}/rate")));
        let rate = rate.and_then(|rate| rate.split([' ', '.']).next()?.parse().ok()).unwrap_or(0);
        NicPlace { name: name.to_owned(), pci, numa_node, link: Some(link), rate }
    }

    /// NVIDIA's GPUs, by address.
    fn gpus(&self) -> Vec<GpuPlace> {
        let mut devices: Vec<PathBuf> = fs::read_dir(self.root.join("bus/pci/devices"))
            .into_iter()
            .flatten()
            .flatten()
            .map(|device| device.path())
            .collect();
        devices.sort_unstable();
        // Class 3 are display controllers, those without a display among them.
        let is_gpu = |device: &PathBuf| {
            read(&device.join("vendor")).is_some_and(|vendor| vendor == "0x10de")
                && read(&device.join("class")).is_some_and(|class| class.starts_with("0x03"))
        };
        // In a container the driver lists only GPUs that it was given; the kernel lists all.
        let shown: Vec<_> = fs::read_dir(&self.driver).into_iter().flatten().flatten().collect();
        let hidden = |device: &PathBuf| {
            !shown.is_empty() && !shown.iter().any(|gpu| Some(&*gpu.file_name()) == device.file_name())
        };
        let gpu = |device: PathBuf| {
            let (pci, numa_node) = place(&device);
            GpuPlace { pci, numa_node, hidden: hidden(&device) }
        };
        devices.into_iter().filter(is_gpu).map(gpu).collect()
    }

    /// How far a NUMA node is from another, in the firmware's measure: 10 is the node itself.
    fn numa_distance(&self, from: u32, to: u32) -> Option<u32> {
        let distances = read(&self.nodes().join(format!("node{from}/distance")))?;
        // One number per node that is online.
        let at = numbered::<u32>(&self.nodes(), "node").iter().position(|&node| node == to)?;
        distances.split_ascii_whitespace().nth(at)?.parse().ok()
    }

    /// The NUMA node that this thread is bound to, if it is.
    fn own_node(&self) -> Option<u32> {
        let set = sched_getaffinity(None).ok()?;
        let allowed = |cpu: u32| (cpu as usize) < CpuSet::MAX_CPU && set.is_set(cpu as usize);
        Numa::below(self.nodes()).node_of(allowed)
    }

    fn folder(&self, nic: &str) -> PathBuf {
        self.root.join("class/infiniband").join(nic)
    }

    fn nodes(&self) -> PathBuf {
        self.root.join("devices/system/node")
    }
}

/// Where a device is in the PCI tree, and near to which NUMA node.
fn place(device: &std::path::Path) -> (PciPath, Option<u32>) {
    let path = device.canonicalize().ok();
    let pci = path.as_deref().and_then(std::path::Path::to_str).map_or_else(PciPath::default, PciPath::of);
    (pci, read(&device.join("numa_node")).and_then(|node| node.parse().ok()))
}

fn read(path: &std::path::Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The numbers of entries that are `prefix` and a number, ascending.
fn numbered<N: std::str::FromStr + Ord>(dir: &std::path::Path, prefix: &str) -> Vec<N> {
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
    fn named_nics_are_taken_in_their_order_and_a_missing_name_is_an_error() {
        let present = ["mlx5_0", "mlx5_1", "mlx5_2"].map(str::to_owned);
        let names = ["mlx5_2".to_owned(), "mlx5_0".to_owned()];
        assert_eq!(named(&present, &names), Ok(vec!["mlx5_2", "mlx5_0"]));
        let missing = VerbsError::NoSuchNic { nic: "mlx5_7".into(), present: present.to_vec() };
        assert_eq!(named(&present, &["mlx5_0".into(), "mlx5_7".into()]), Err(missing));
    }

    fn table(entries: &[(u8, &str, GidType)]) -> Vec<Gid> {
        let gid = |&(index, gid, kind): &(u8, &str, GidType)| Gid { index, gid: gid.parse().unwrap(), kind };
        entries.iter().map(gid).collect()
    }

    fn chosen(gids: &[Gid], link: LinkLayer, wanted: Option<u8>) -> Result<u8, VerbsError> {
        Gid::choose(gids, link, wanted, ("nic", 1)).map(|gid| gid.index)
    }

    #[test]
    fn roce_v2_with_ipv4_comes_first_then_ipv6_then_the_link_s_own() {
        use GidType::{IbOrRoceV1, RoceV2};
        let all = table(&[
            (0, "fe80::1", IbOrRoceV1),
            (1, "fe80::1", RoceV2),
            (2, "::ffff:10.0.0.1", IbOrRoceV1),
            (3, "2001:db8::1", RoceV2),
            (4, "::ffff:10.0.0.1", RoceV2),
            (5, "::ffff:10.0.0.9", RoceV2),
        ]);
        assert_eq!(chosen(&all, LinkLayer::Ethernet, None), Ok(4));
        assert_eq!(chosen(&all[..4], LinkLayer::Ethernet, None), Ok(3));
        assert_eq!(chosen(&all[..3], LinkLayer::Ethernet, None), Ok(1));
        let none = VerbsError::NoGid { nic: "nic".into(), port: 1 };
        assert_eq!(chosen(&all[..1], LinkLayer::Ethernet, None), Err(none.clone()));
        assert_eq!(chosen(&all, LinkLayer::InfiniBand, None), Ok(0));
        assert_eq!(chosen(&[], LinkLayer::InfiniBand, None), Err(none));
    }

    #[test]
    fn an_index_that_was_asked_for_is_taken_or_refused() {
        let gids = table(&[(0, "fe80::1", GidType::IbOrRoceV1)]);
        assert_eq!(chosen(&gids, LinkLayer::Ethernet, Some(0)), Ok(0));
        let missing = VerbsError::NoSuchGid { nic: "nic".into(), port: 1, index: 7 };
        assert_eq!(chosen(&gids, LinkLayer::Ethernet, Some(7)), Err(missing));
    }

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
    fn a_nic_s_place_and_rate_are_read_or_unknown() {
        let tree = Tree::new();
        tree.write("devices/pci0000:16/0000:17:00.0/numa_node", "1");
        tree.link("class/infiniband/mlx5_0/device", "devices/pci0000:16/0000:17:00.0");
        tree.write("class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)");
        tree.write("class/infiniband/mlx5_1/device/numa_node", "-1");
        tree.write("class/infiniband/mlx5_1/ports/1/rate", "2.5 Gb/sec (1X SDR)");
        let place = |nic| tree.sysfs().nic(nic, 1, LinkLayer::Ethernet);
        let mlx5_0 = place("mlx5_0");
        assert_eq!((mlx5_0.numa_node, mlx5_0.rate), (Some(1), 400));
        assert_eq!(mlx5_0.pci.address(), Some("0000:17:00.0"));
        assert_eq!((place("mlx5_1").numa_node, place("mlx5_1").rate), (None, 2));
        assert_eq!(
            (place("rxe0").numa_node, place("rxe0").pci, place("rxe0").rate),
            (None, PciPath::default(), 0)
        );
    }

    #[test]
    fn gpus_are_nvidia_s_display_controllers_by_address() {
        let tree = Tree::new();
        for (device, vendor, class) in [
            ("0000:9b:00.0", "0x10de", "0x030200"),
            ("0000:1b:00.0", "0x10de", "0x030200"),
            ("0000:1c:00.0", "0x10de", "0x068000"),
            ("0000:02:00.0", "0x1a03", "0x030000"),
        ] {
            let at = format!("devices/pci0000:00/{device}");
            tree.write(&format!("{at}/vendor"), vendor);
            tree.write(&format!("{at}/class"), class);
            tree.write(&format!("{at}/numa_node"), "0");
            tree.link(&format!("bus/pci/devices/{device}"), &at);
        }
        let gpus = tree.sysfs().gpus();
        let addresses: Vec<_> = gpus.iter().map(|gpu| (gpu.pci.address(), gpu.numa_node)).collect();
        assert_eq!(addresses, [(Some("0000:1b:00.0"), Some(0)), (Some("0000:9b:00.0"), Some(0))]);
        tree.write("gpus/0000:9b:00.0/information", "Device Minor: 1");
        assert_eq!(tree.sysfs().gpus().iter().map(|gpu| gpu.hidden).collect::<Vec<_>>(), [true, false]);
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
