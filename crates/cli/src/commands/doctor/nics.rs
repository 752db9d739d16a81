//! RDMA NICs: libibverbs, ports, signals, and which rank takes which NIC.

use sidelane_core::nic_choice::{self, GpuPlace, LinkLayer, NicPlace, PciPath, RankPlace};

use super::finding::{Finding, seen};
use super::machine::{Facts, Root, find_library};

const CLASS: &str = "/sys/class/infiniband";

#[derive(Debug, PartialEq, Eq)]
pub struct Port {
    nic: String,
    port: String,
    state: String,
    link_layer: String,
    rate: String,
}

impl Port {
    fn place(&self, root: &Root) -> NicPlace {
        let (pci, numa_node) = place(root, &format!("{CLASS}/{}/device", self.nic));
        let link = match self.link_layer.as_str() {
            "InfiniBand" => Some(LinkLayer::InfiniBand),
            "Ethernet" => Some(LinkLayer::Ethernet),
            _ => None,
        };
        let rate = self.rate.split([' ', '.']).next().and_then(|rate| rate.parse().ok()).unwrap_or(0);
        NicPlace { name: self.nic.clone(), pci, numa_node, link, rate }
    }
}

pub fn ports(root: &Root) -> Vec<Port> {
    let nics = root.list(CLASS).into_iter();
    nics.flat_map(|nic| {
        let dir = format!("{CLASS}/{nic}/ports");
        root.list(&dir).into_iter().map(move |port| {
            let value = |name| root.read(format!("{dir}/{port}/{name}")).unwrap_or_else(|| "unknown".into());
            // "4: ACTIVE"
            let state = value("state");
            let state = state.rsplit_once(": ").map_or(state.as_str(), |(_, name)| name).to_owned();
            let (link_layer, rate) = (value("link_layer"), value("rate"));
            Port { nic: nic.clone(), port, state, link_layer, rate }
        })
    })
    .collect()
}

pub fn findings(root: &Root, facts: &Facts, ports: &[Port]) -> Vec<Finding> {
    let mut findings = vec![library(root, facts, !ports.is_empty()).named("libibverbs")];
    if ports.is_empty() {
        findings.push(
            Finding::new("NICs", "none")
                .means("No RDMA NIC. Jobs on one machine need none.")
                .note("If there should be one: lspci, then the driver (mlx5_ib, rdma_rxe for a soft one)."),
        );
    } else if root.numbered("/dev/infiniband", "uverbs") == 0 {
        findings.push(
            Finding::new("/dev/infiniband", "no uverbs device")
                .means("The kernel has NICs, but this process cannot open them.")
                .warn("modprobe ib_uverbs; in a container pass --device=/dev/infiniband."),
        );
    }
    findings.extend(ports.iter().map(describe));
    if !ports.is_empty() {
        findings.push(signals(facts).named("signals over NICs"));
        findings.extend(choice(root, facts, ports));
    }
    findings
}

/// Which NIC each rank takes, and which NICs none takes. Ranks have a GPU each, if there are GPUs.
fn choice(root: &Root, facts: &Facts, ports: &[Port]) -> Vec<Finding> {
    if let Some(named) = &facts.verbs_nics {
        let finding = Finding::new("NICs of each rank", named);
        return vec![finding.means("SIDELANE_VERBS_NICS names them.")];
    }
    let mut nics: Vec<NicPlace> = Vec::new();
    for port in ports.iter().filter(|port| port.state == "ACTIVE") {
        // Ranks use the first active port of a NIC.
        if nics.iter().all(|nic| nic.name != port.nic) {
            nics.push(port.place(root));
        }
    }
    let left_out = nic_choice::left_out(&nics);
    let reasons = nics.iter().zip(&left_out).filter_map(|(nic, reason)| Some((nic, reason.as_ref()?)));
    let mut findings: Vec<Finding> = reasons
        .map(|(nic, reason)| {
            Finding::new(format!("NIC {}, choice", nic.name), reason.to_string())
                .means("No rank takes it unless SIDELANE_VERBS_NICS names it.")
        })
        .collect();
    let gpus = gpus(root);
    let visible = facts.visible_gpus.as_deref();
    let ranks = (0..gpus.len() as u32).map_while(|nth| Some((nth, GpuPlace::of_rank(&gpus, visible, nth)?)));
    let mut seen = Vec::new();
    for (nth, at) in ranks {
        if seen.contains(&at) {
            break;
        }
        seen.push(at);
        let rank = RankPlace { turn: at as u32, gpu: Some(&gpus[at]), numa_node: None };
        let Some((nic, nearness)) = nic_choice::choose(&nics, rank, |from, to| distance(root, from, to))
        else {
            break;
        };
        let gpu = gpus[at].pci.address().unwrap_or("unknown");
        findings.push(
            Finding::new(
                format!("NIC of rank {nth}"),
                format!("{}, {nearness} as GPU {gpu}", nics[nic].name),
            )
            .means("If ranks use GPUs in this order, and if the NIC opens and has an address."),
        );
    }
    if seen.is_empty() && !nics.is_empty() {
        findings.push(
            Finding::new("NIC of each rank", "by NUMA distance")
                .means("No GPU is visible: ranks take the nearest NICs to their cores, in turn."),
        );
    }
    findings
}

/// Where a device of sysfs is in the PCI tree, and near to which NUMA node.
fn place(root: &Root, device: &str) -> (PciPath, Option<u32>) {
    let path = root.join(device).canonicalize().unwrap_or_default();
    let node = root.read(format!("{device}/numa_node")).and_then(|node| node.parse().ok());
    (PciPath::of(&path.to_string_lossy()), node)
}

/// NVIDIA's GPUs, by address. Class 3 are display controllers, those without a display among them.
fn gpus(root: &Root) -> Vec<GpuPlace> {
    const DEVICES: &str = "/sys/bus/pci/devices";
    let devices = root.list(DEVICES).into_iter().map(|address| format!("{DEVICES}/{address}"));
    let is = |device: &str, file, prefix| {
        root.read(format!("{device}/{file}")).is_some_and(|value| value.starts_with(prefix))
    };
    // In a container the driver lists only GPUs that it was given; the kernel lists all.
    let shown = root.list("/proc/driver/nvidia/gpus");
    let gpu = |device: String| {
        let (pci, numa_node) = place(root, &device);
        let hidden = !shown.is_empty() && !shown.iter().any(|address| device.ends_with(address.as_str()));
        GpuPlace { pci, numa_node, hidden }
    };
    devices.filter(|device| is(device, "vendor", "0x10de") && is(device, "class", "0x03")).map(gpu).collect()
}

/// The firmware's measure of the distance between two NUMA nodes.
fn distance(root: &Root, from: u32, to: u32) -> Option<u32> {
    const NODES: &str = "/sys/devices/system/node";
    let distances = root.read(format!("{NODES}/node{from}/distance"))?;
    // One number for each node that is online, in ascending order.
    let listed = root.list(NODES);
    let mut nodes: Vec<u32> =
        listed.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
    nodes.sort_unstable();
    let at = nodes.iter().position(|&node| node == to)?;
    distances.split_ascii_whitespace().nth(at)?.parse().ok()
}

fn signals(facts: &Facts) -> Finding {
    match facts.verbs_signal.as_deref().map(str::trim) {
        None | Some("" | "auto") => seen("auto").means(
            "By write between NICs that are known to place writes in order, else by immediate. \
             Reports say which.",
        ),
        Some("write") => seen("write")
            .means("Flags pass rows if NICs or switches change the order of writes: wrong rows, silently.")
            .note("Unset SIDELANE_VERBS_SIGNAL, unless NICs and switches are known to keep the order."),
        Some(other @ ("fetch-add" | "immediate")) => seen(other).means("No write passes such a signal."),
        Some(other) => seen(other)
            .means("The library refuses it.")
            .warn("Unset SIDELANE_VERBS_SIGNAL, or set auto, write, fetch-add or immediate."),
    }
}

fn library(root: &Root, facts: &Facts, has_nics: bool) -> Finding {
    const ADVICE: &str = "Install libibverbs1 and ibverbs-providers (Debian), rdma-core elsewhere.";
    match find_library(root, facts, &["libibverbs.so.1"]) {
        Some(path) => seen(path.display().to_string()).means("NICs can be driven."),
        None if has_nics => seen("not found")
            .means("There are NICs, but the library that drives them is missing.")
            .warn(ADVICE),
        None => seen("not found").means("Needed only to drive NICs.").note(ADVICE),
    }
}

fn describe(port: &Port) -> Finding {
    let Port { nic, port, state, link_layer, rate } = port;
    let (what, found) = (format!("NIC {nic}, port {port}"), format!("{state}, {link_layer}, {rate}"));
    match (state.as_str(), link_layer.as_str()) {
        ("ACTIVE", "Ethernet") => {
            Finding::new(what, found).means("RoCE: loss is rare only with flow control on the switch.")
        }
        ("ACTIVE", _) => Finding::new(what, found).means("Ready."),
        _ => Finding::new(what, found)
            .means("The port carries no traffic.")
            .warn("Check the cable, the switch and, for InfiniBand, that a subnet manager runs."),
    }
}
