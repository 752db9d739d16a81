//! RDMA NICs: libibverbs, ports and their losses, PCIe links, signals, and which rank takes which
//! NIC.
//!
//! Files tell what the machine has. What a rank takes of it, the verbs lane itself says
//! ([`NicSurvey`](sidelane::NicSurvey)), by the code that a rank runs.

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
    for port in ports {
        findings.push(describe(port));
        findings.extend(losses(root, port));
    }
    findings.extend(root.list(CLASS).iter().filter_map(|nic| pcie(root, nic)));
    if !ports.is_empty() {
        findings.push(signals(facts).named("signals over NICs"));
        findings.extend(choice(facts));
    }
    findings
}

/// Packets that a port sent again since its driver was loaded, where the driver counts them. Those
/// that came out of sequence are not counted: adaptive routing makes them, too.
fn losses(root: &Root, Port { nic, port, .. }: &Port) -> Option<Finding> {
    let count = |name| -> Option<u64> {
        root.read(format!("{CLASS}/{nic}/ports/{port}/hw_counters/{name}"))?.parse().ok()
    };
    let (gaps, timeouts) = (count("packet_seq_err")?, count("local_ack_timeout_err")?);
    let finding = Finding::new(
        format!("NIC {nic}, port {port}, losses"),
        format!("{gaps} sequence errors, {timeouts} timeouts"),
    );
    Some(match gaps + timeouts {
        0 => finding.means("No packet was sent again since the driver was loaded."),
        _ => finding
            .means("Packets were lost since the driver was loaded: each costs a resend, the last of a message a whole timeout.")
            .note("Set PFC or ECN on NICs and all switches for the priority of SIDELANE_VERBS_TRAFFIC_CLASS; on InfiniBand check the cables."),
    })
}

/// Whether a NIC has all lanes and the rate that it can have.
fn pcie(root: &Root, nic: &str) -> Option<Finding> {
    let value = |name| root.read(format!("{CLASS}/{nic}/device/{name}"));
    // "32.0 GT/s PCIe"
    let rate = |name| value(name).and_then(|rate| Some(rate.split_once(' ')?.0.to_owned()));
    let link = |speed, width| Some(format!("{} GT/s x {}", rate(speed)?, value(width)?));
    let now = link("current_link_speed", "current_link_width")?;
    let most = link("max_link_speed", "max_link_width")?;
    let what = format!("NIC {nic}, PCIe");
    Some(match now == most {
        true => Finding::new(what, now).means("The link is as wide and as fast as the NIC can use."),
        false => Finding::new(what, format!("{now} of {most}"))
            .means("The NIC gets fewer lanes, or slower ones, than it can use.")
            .note("Use a slot that has as many, and look for a loose riser: lspci -vv, LnkSta."),
    })
}

/// Which NIC each rank takes, with its port, address and partition, and which NICs none takes.
pub fn choice(facts: &Facts) -> Vec<Finding> {
    const ADVICE: &str = "Mend what it says. Until then --net auto takes tcp, or ends if a setting is wrong.";
    let none = |why: String| {
        Finding::new("NIC of rank 0", why).means("No rank of this machine has a NIC.").warn(ADVICE)
    };
    let survey = match &facts.nics {
        Ok(survey) => survey,
        Err(error) => return vec![none(error.to_string())],
    };
    let left_out = survey.left_out.iter().map(|(nic, why)| {
        Finding::new(format!("NIC {nic}, choice"), why)
            .means("No rank takes it unless SIDELANE_VERBS_NICS names it.")
    });
    let taken = survey.ranks.iter().enumerate().map(|(nth, nics)| {
        Finding::new(format!("NIC of rank {nth}"), nics.join("; "))
            .means("If ranks use GPUs in this order. Ranks without a GPU take NICs by their cores, in turn.")
    });
    let none = survey.ranks.is_empty().then(|| none("none is usable".to_owned()));
    left_out.chain(taken).chain(none).collect()
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
