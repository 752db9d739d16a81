//! RDMA: the verbs library, the cards of /sys/class/infiniband, and whether they may be opened.

use super::facts::Facts;
use super::finding::Finding;
use super::loader;
use super::root::Root;

const CLASS: &str = "/sys/class/infiniband";

/// One port of a card, as the kernel describes it.
#[derive(Debug, PartialEq, Eq)]
pub struct Port {
    card: String,
    port: String,
    state: String,
    link_layer: String,
    rate: String,
}

/// All ports of all cards.
pub fn ports(root: &Root) -> Vec<Port> {
    let cards = root.list(CLASS).into_iter();
    cards
        .flat_map(|card| {
            let dir = format!("{CLASS}/{card}/ports");
            root.list(&dir).into_iter().map(move |port| {
                let value =
                    |name| root.read(format!("{dir}/{port}/{name}")).unwrap_or_else(|| "unknown".into());
                // "4: ACTIVE"
                let state = value("state");
                let state = state.rsplit_once(": ").map_or(state.as_str(), |(_, name)| name).to_owned();
                let (link_layer, rate) = (value("link_layer"), value("rate"));
                Port { card: card.clone(), port, state, link_layer, rate }
            })
        })
        .collect()
}

pub fn findings(root: &Root, facts: &Facts, ports: &[Port]) -> Vec<Finding> {
    let mut findings = vec![library(root, facts, !ports.is_empty())];
    if ports.is_empty() {
        findings.push(Finding::note(
            "network cards",
            "none",
            "No card of RDMA kind. Jobs on one machine need none.",
            "If there should be one: lspci, then the driver (mlx5_ib, rdma_rxe for a soft one).",
        ));
    } else if root.numbered("/dev/infiniband", "uverbs") == 0 {
        findings.push(Finding::warn(
            "/dev/infiniband",
            "no uverbs device",
            "The kernel has cards, but this process cannot open them.",
            "modprobe ib_uverbs; in a container pass --device=/dev/infiniband.",
        ));
    }
    findings.extend(ports.iter().map(describe));
    findings
}

fn library(root: &Root, facts: &Facts, has_cards: bool) -> Finding {
    const WHAT: &str = "libibverbs";
    const ADVICE: &str = "Install libibverbs1 and ibverbs-providers (Debian), rdma-core elsewhere.";
    match loader::find(root, facts, &["libibverbs.so.1"]) {
        Some(path) => Finding::ok(WHAT, path.display().to_string(), "Cards can be driven."),
        None if has_cards => Finding::warn(
            WHAT,
            "not found",
            "There are cards, but the library that drives them is missing.",
            ADVICE,
        ),
        None => Finding::note(WHAT, "not found", "Needed only to drive network cards.", ADVICE),
    }
}

fn describe(port: &Port) -> Finding {
    let Port { card, port, state, link_layer, rate } = port;
    let (what, found) = (format!("card {card}, port {port}"), format!("{state}, {link_layer}, {rate}"));
    match (state.as_str(), link_layer.as_str()) {
        ("ACTIVE", "Ethernet") => {
            Finding::ok(what, found, "RoCE: loss is rare only with flow control on the switch.")
        }
        ("ACTIVE", _) => Finding::ok(what, found, "Ready."),
        _ => Finding::warn(
            what,
            found,
            "The port carries no traffic.",
            "Check the cable, the switch and, for InfiniBand, that a subnet manager runs.",
        ),
    }
}
