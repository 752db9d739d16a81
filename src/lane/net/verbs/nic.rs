//! From the machine's NICs to a rank's: discovered, chosen, opened.
//!
//! ```text
//!   Context::names --> usable: a port is active, has a GID and a partition --> choose --> Nic: context, path
//!
//!   named in the settings   all of them, in the order given: NIC 0, NIC 1, ...
//!   else                    one, by the places of NICs and GPUs in the machine (sidelane_core::nic_choice)
//! ```
//!
//! `reach` says which entries of a port's tables a connection uses. The kernel's files ([`Sysfs`])
//! have these tables, and the place of NICs in the machine:
//!
//! ```text
//!   class/infiniband/<nic>/device                           link into the PCI tree; none for a soft NIC
//!   class/infiniband/<nic>/device/numa_node                 -1: unknown
//!   class/infiniband/<nic>/node_type                        "1: CA"; "4: RNIC" is iWARP
//!   class/infiniband/<nic>/ports/<p>/rate                   "400 Gb/sec (4X NDR)"
//!   class/infiniband/<nic>/ports/<p>/gids/<i>               an address; all zero: empty
//!   class/infiniband/<nic>/ports/<p>/gid_attrs/types/<i>    "IB/RoCE v1" or "RoCE v2"; unreadable: empty
//!   class/infiniband/<nic>/ports/<p>/gid_attrs/ndevs/<i>    the network device that has the address
//!   class/infiniband/<nic>/ports/<p>/pkeys/<i>              a partition key; 0: empty
//!   class/net/<device>/uevent                               says whether the device is a VLAN
//!   bus/pci/devices/<address>                               link into the PCI tree: {vendor, class, numa_node}
//!   devices/system/node/node<n>/{cpulist, distance}         processors of a NUMA node, and its distances
//! ```

use std::fs;
use std::net::Ipv6Addr;
use std::path::{self, PathBuf};
use std::sync::Arc;

use rustix::thread::{CpuSet, sched_getaffinity};
use sidelane_core::nic_choice::{self, GpuPlace, LinkLayer, Nearness, NicPlace, PciPath, RankPlace};

use super::ffi::{
    IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048,
    IBV_MTU_4096, IBV_PORT_ACTIVE, IBV_PORT_ARMED, IBV_PORT_DOWN, IBV_PORT_INIT, IBV_QPF_GRH_REQUIRED,
    ibv_port_attr,
};
use super::order::PlacementOrder;
use super::reach::{Gid, Pkey, Pkeys, own_addresses};
use super::{Context, Library, Path, Settings, VerbsEnvironment};
use crate::error::{Error, VerbsError};
use crate::memory::Numa;

/// A NIC that a rank uses, open and ready to connect.
#[derive(Clone, Debug)]
pub struct Nic {
    /// The NIC.
    pub context: Arc<Context>,
    /// How its queue pairs go out.
    pub path: Path,
    /// The network device that has its address.
    device: Option<String>,
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
        let Path { port, gid, gid_index, ref pkeys, mtu, .. } = self.path;
        let address = gid.to_ipv4_mapped().map_or_else(|| gid.to_string(), |address| address.to_string());
        write!(f, "{} port {port}, {address} (GID {gid_index}", self.context.name())?;
        if let Some(device) = &self.device {
            write!(f, " of {device}")?;
        }
        let Pkey { key, index } = pkeys.preferred();
        write!(f, "), partition {key:#06x} (index {index}")?;
        if pkeys.all().len() > 1 {
            write!(f, ", or another of {}, if a peer shares that", pkeys.all().len())?;
        }
        write!(f, "), MTU {}", mtu.bytes())?;
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
    /// Its rate, in Gb/s; 0: unknown.
    pub fn rate(&self) -> u32 {
        self.place.rate
    }

    /// The NICs of this process, which is the `nth` rank of its node: those that the settings name,
    /// or else the nearest usable one.
    ///
    /// # Errors
    /// [`VerbsError::NoNic`], [`VerbsError::NoSuchNic`]; that of a named NIC or, if none is usable,
    /// those of all ([`VerbsError::NoUsableNic`]): [`VerbsError::Open`],
    /// [`VerbsError::OtherNetwork`], [`VerbsError::PortDown`], [`VerbsError::NoSuchPort`],
    /// [`VerbsError::NoGid`], [`VerbsError::NoSuchGid`], [`VerbsError::NoGidInSubnets`],
    /// [`VerbsError::NoSuchPkey`], [`VerbsError::NoPartition`], [`VerbsError::MtuTooLarge`].
    pub fn open(
        library: &Arc<Library>,
        sysfs: &Sysfs,
        settings: &Settings,
        nth: u32,
    ) -> Result<Vec<Nic>, VerbsError> {
        if !settings.nics.is_empty() {
            let names = Context::names(library)?;
            let named = named(&names, &settings.nics)?;
            return named.into_iter().map(|name| Self::of(library, sysfs, settings, name)).collect();
        }
        let mut present = Present::of(library, sysfs, settings)?;
        match present.choose(sysfs, settings, nth) {
            Some((at, reason)) => Ok(vec![Nic { reason, ..present.usable.swap_remove(at) }]),
            None => Err(refusal(present.refused.into_iter().map(|(_, why)| why))),
        }
    }

    /// Opens one NIC with its best port: that of the settings, or else the fastest of those that
    /// are usable, and of these the first.
    fn of(library: &Arc<Library>, sysfs: &Sysfs, settings: &Settings, nic: &str) -> Result<Nic, VerbsError> {
        if let Some(network) = sysfs.other_network(nic) {
            return Err(VerbsError::OtherNetwork { nic: nic.to_owned(), network });
        }
        let context = Context::open(library, nic)?;
        let ports = settings.port.map_or(1..=context.attributes().ports, |port| port..=port);
        let (mut best, mut refused): (Option<Nic>, _) = (None, Vec::new());
        for port in ports {
            match Self::at_port(&context, port, sysfs, settings) {
                Ok(nic) if best.as_ref().is_none_or(|best| nic.place.rate > best.place.rate) => {
                    best = Some(nic)
                }
                Ok(_) => {}
                Err(why) => refused.push(why),
            }
        }
        best.ok_or_else(|| refusal(refused.into_iter()))
    }

    /// A NIC with a port of its, if that is usable.
    fn at_port(
        context: &Arc<Context>,
        number: u8,
        sysfs: &Sysfs,
        settings: &Settings,
    ) -> Result<Nic, VerbsError> {
        let (nic, context) = (context.name(), Arc::clone(context));
        let port = context.port(number)?.active(nic)?;
        let unknown = || VerbsError::OtherNetwork { nic: nic.to_owned(), network: "an unknown network" };
        let link = port.link.ok_or_else(unknown)?;
        let at = (nic, number);
        let gid = Gid::choose(&sysfs.gids(nic, port.number), link, settings, at)?;
        let pkeys = Pkeys::of(sysfs.pkeys(nic, port.number), link, settings.pkey_index, at)?;
        let mtu = settings.mtu.unwrap_or(port.mtu);
        if mtu > port.mtu {
            let (asked, active) = (mtu.bytes(), port.mtu.bytes());
            return Err(VerbsError::MtuTooLarge { nic: nic.to_owned(), port: port.number, asked, active });
        }
        let path = Path {
            port: port.number,
            link,
            lid: port.lid,
            needs_global_header: port.needs_global_header,
            gid_index: gid.index,
            gid: gid.gid,
            mtu,
            pkeys,
            service_level: settings.service_level,
            traffic_class: settings.traffic_class,
            timeout: settings.timeout,
            retries: settings.retries,
            rnr_retries: settings.rnr_retries,
        };
        let (device, place) = (gid.device, sysfs.nic(nic, port.number, link));
        Ok(Nic { context, path, device, place, reason: None })
    }
}

/// The error of NICs or ports of which none is usable: all are named.
fn refusal(refused: impl Iterator<Item = VerbsError>) -> VerbsError {
    let each = |error| match error {
        VerbsError::NoUsableNic { refused } => refused,
        error => vec![error],
    };
    let mut refused: Vec<VerbsError> = refused.flat_map(each).collect();
    match refused.len() {
        0 => VerbsError::NoNic,
        1 => refused.remove(0),
        _ => VerbsError::NoUsableNic { refused },
    }
}

/// The NICs of this machine, for a rank that names none.
struct Present {
    usable: Vec<Nic>,
    /// Those that cannot be used, by name.
    refused: Vec<(String, VerbsError)>,
}

impl Present {
    fn of(library: &Arc<Library>, sysfs: &Sysfs, settings: &Settings) -> Result<Self, VerbsError> {
        let mut present = Present { usable: Vec::new(), refused: Vec::new() };
        for name in Context::names(library)? {
            match Nic::of(library, sysfs, settings, &name) {
                Ok(nic) => present.usable.push(nic),
                Err(why) => {
                    tracing::info!(nic = name, %why, "a NIC is left out");
                    present.refused.push((name, why));
                }
            }
        }
        Ok(present)
    }

    fn places(&self) -> Vec<NicPlace> {
        self.usable.iter().map(|nic| nic.place.clone()).collect()
    }

    /// The usable NIC that the `nth` rank of the machine takes, and why.
    fn choose(&self, sysfs: &Sysfs, settings: &Settings, nth: u32) -> Option<(usize, Option<Reason>)> {
        let gpus = sysfs.gpus();
        let own = GpuPlace::of_rank(&gpus, settings.visible_gpus.as_deref(), nth);
        let (turn, gpu) = (own.map_or(nth, |at| at as u32), own.map(|at| &gpus[at]));
        let rank = RankPlace { turn, gpu, numa_node: sysfs.own_node() };
        let distance = |from, to| sysfs.numa_distance(from, to);
        let (at, nearness) = nic_choice::choose(&self.places(), rank, distance)?;
        let gpu = gpu.and_then(|gpu| gpu.pci.address()).map(str::to_owned);
        Some((at, Some(Reason { nearness, gpu })))
    }
}

/// Which NICs the ranks of this machine take, as the verbs lane chooses them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NicSurvey {
    /// The NICs of each rank with a GPU of its own; of the first rank where no GPU is visible, or
    /// where settings name the NICs of all.
    pub ranks: Vec<Vec<String>>,
    /// NICs that no rank takes unless it names them, and why.
    pub left_out: Vec<(String, String)>,
}

impl NicSurvey {
    /// Of this machine, with the environment's settings.
    ///
    /// # Errors
    /// As those of a rank that opens its NICs.
    pub fn here() -> Result<Self, Error> {
        Ok(Self::of(&VerbsEnvironment::here()?)?)
    }

    pub(super) fn of(environment: &VerbsEnvironment) -> Result<Self, VerbsError> {
        let VerbsEnvironment { library, sysfs, settings } = environment;
        if !settings.nics.is_empty() {
            let nics = Nic::open(library, sysfs, settings, 0)?;
            let ranks = vec![nics.iter().map(ToString::to_string).collect()];
            return Ok(NicSurvey { ranks, left_out: Vec::new() });
        }
        let present = Present::of(library, sysfs, settings)?;
        let gpus = sysfs.gpus();
        let gpu_of = |nth| GpuPlace::of_rank(&gpus, settings.visible_gpus.as_deref(), nth);
        let more =
            (1..gpus.len() as u32).take_while(|&nth| gpu_of(nth).is_some_and(|at| Some(at) != gpu_of(0)));
        let of_rank = |nth| {
            let (at, reason) = present.choose(sysfs, settings, nth)?;
            Some(vec![Nic { reason, ..present.usable[at].clone() }.to_string()])
        };
        let ranks = std::iter::once(0).chain(more).filter_map(of_rank).collect();
        let places = present.places();
        let slow = places.iter().zip(nic_choice::left_out(&places));
        let slow = slow.filter_map(|(nic, reason)| Some((nic.name.clone(), reason?.to_string())));
        let refused = present.refused.iter().map(|(nic, why)| (nic.clone(), why.to_string()));
        Ok(NicSurvey { ranks, left_out: refused.chain(slow).collect() })
    }
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
    /// Its network; `None` if it is another than those.
    link: Option<LinkLayer>,
    /// Its address within an InfiniBand subnet; 0 on Ethernet.
    lid: u16,
    /// The largest packet it sends now.
    mtu: Mtu,
    /// Whether all packets from and to it need the global header, in its own subnet, too.
    needs_global_header: bool,
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
    /// The port of a NIC, if it carries traffic.
    ///
    /// # Errors
    /// [`VerbsError::PortDown`].
    pub fn active(self, nic: &str) -> Result<Self, VerbsError> {
        match self.state {
            PortState::Active => Ok(self),
            state => {
                Err(VerbsError::PortDown { nic: nic.to_owned(), port: self.number, state: state.name() })
            }
        }
    }

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
        let needs_global_header = attr.flags & IBV_QPF_GRH_REQUIRED != 0;
        Port { number, state, link, lid: attr.lid, mtu, needs_global_header }
    }
}

/// The tree below a root: `/sys`, or one that a test laid out. Missing and unreadable files count
/// as unknown.
#[derive(Clone, Debug)]
pub struct Sysfs {
    pub(super) root: PathBuf,
    /// NVIDIA's driver has a folder for each GPU here, named by its address.
    driver: PathBuf,
    /// Addresses of this network namespace, and their devices; none if they are unknown.
    pub(super) addresses: Option<Vec<(String, Ipv6Addr)>>,
}

impl Default for Sysfs {
    fn default() -> Self {
        let (root, driver) = ("/sys".into(), "/proc/driver/nvidia/gpus".into());
        Sysfs { root, driver, addresses: own_addresses() }
    }
}

impl Sysfs {
    /// The tree below this directory, and that of the driver's GPUs in `gpus` there.
    #[cfg(test)]
    pub fn below(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Sysfs { driver: root.join("gpus"), root, addresses: None }
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

    /// The network of a NIC that is neither InfiniBand nor RoCE, as far as is known. The ports of
    /// an iWARP NIC say that they are Ethernet.
    fn other_network(&self, nic: &str) -> Option<&'static str> {
        let kind = read(&self.folder(nic).join("node_type"))?;
        kind.starts_with("4:").then_some("iWARP")
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

    pub(super) fn port(&self, nic: &str, port: u8) -> PathBuf {
        self.folder(nic).join("ports").join(port.to_string())
    }

    fn nodes(&self) -> PathBuf {
        self.root.join("devices/system/node")
    }
}

/// Where a device is in the PCI tree, and near to which NUMA node.
fn place(device: &path::Path) -> (PciPath, Option<u32>) {
    let path = device.canonicalize().ok();
    let pci = path.as_deref().and_then(path::Path::to_str).map_or_else(PciPath::default, PciPath::of);
    (pci, read(&device.join("numa_node")).and_then(|node| node.parse().ok()))
}

pub(super) fn read(path: &path::Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The numbers of entries that are `prefix` and a number, ascending.
pub(super) fn numbered<N: std::str::FromStr + Ord>(dir: &path::Path, prefix: &str) -> Vec<N> {
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
    fn named_nics_keep_their_order_and_missing_name_is_error() {
        let present = ["mlx5_0", "mlx5_1", "mlx5_2"].map(str::to_owned);
        let names = ["mlx5_2".to_owned(), "mlx5_0".to_owned()];
        assert_eq!(named(&present, &names), Ok(vec!["mlx5_2", "mlx5_0"]));
        let missing = VerbsError::NoSuchNic { nic: "mlx5_7".into(), present: present.to_vec() };
        assert_eq!(named(&present, &["mlx5_0".into(), "mlx5_7".into()]), Err(missing));
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
