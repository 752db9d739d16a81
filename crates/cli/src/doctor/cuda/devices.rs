//! Each device, then each ability with the devices that have it.

use sidelane::device::{DeviceFacts, Probe, WriteOrder};

use super::super::finding::{Finding, Level, bytes};

/// An ability of devices: what it is good for, and what follows from its lack.
struct Ability {
    what: &'static str,
    has: fn(&DeviceFacts) -> bool,
    with: &'static str,
    lack: Level,
    without: &'static str,
    advice: &'static str,
}

const ABILITIES: [Ability; 8] = [
    Ability {
        what: "CUDA: flags",
        has: |device| device.wide_memory_operations,
        with: "Streams write and await words of 64 bits.",
        lack: Level::Warn,
        without: "Streams cannot await words of 64 bits, which flags are.",
        advice: "Update the driver; in a virtual machine pass the whole GPU through.",
    },
    Ability {
        what: "CUDA: shared memory",
        has: |device| device.virtual_memory && device.descriptors,
        with: "Ranks in other processes can map the device's memory.",
        lack: Level::Warn,
        without: "The device's memory cannot be handed to other processes as a descriptor.",
        advice: "Update the driver; in a virtual machine pass the whole GPU through.",
    },
    Ability {
        what: "CUDA: pinned memory",
        has: |device| device.host_register,
        with: "The heap of the host can be pinned where it lies.",
        lack: Level::Note,
        without: "Memory of the host can be allocated for the device, but not pinned where it lies.",
        advice: "Nothing: a property of the machine.",
    },
    Ability {
        what: "CUDA: fabric handles",
        has: |device| device.fabric,
        with: "Memory can be handed to other machines of one NVLink domain.",
        lack: Level::Note,
        without: "Other machines are reached by network cards, not by NVLink.",
        advice: "Nothing on a machine without NVLink to others; else start nvidia-imex.",
    },
    Ability {
        what: "CUDA: multicast",
        has: |device| device.multicast,
        with: "The switch can write one copy to many devices.",
        lack: Level::Note,
        without: "One copy goes to one device.",
        advice: "Nothing without an NVSwitch; with one, start nvidia-fabricmanager.",
    },
    Ability {
        what: "CUDA: cards to memory",
        has: |device| device.direct_rdma && device.direct_rdma_mapped,
        with: "Network cards can read and write the device's mapped memory.",
        lack: Level::Note,
        without: "Rows for other machines cross the memory of the host.",
        advice: "On GPUs made for data centres: update the driver; in a virtual machine pass the whole GPU through.",
    },
    Ability {
        what: "CUDA: dma-buf",
        has: |device| device.dma_buf,
        with: "Cards register the device's memory by a descriptor.",
        lack: Level::Note,
        without: "Cards can register the device's memory only through nvidia-peermem.",
        advice: "Use NVIDIA's open kernel modules on Linux 5.12 or newer, or modprobe nvidia-peermem.",
    },
    Ability {
        what: "CUDA: order of cards' writes",
        has: |device| device.write_order != WriteOrder::None || device.flush_remote_writes,
        with: "A flag that a card writes behind data into the device's memory is seen after the data.",
        lack: Level::Note,
        without: "A card's data may be seen after its flag: rows for other machines cross the memory of the host.",
        advice: "Nothing: a property of the GPU and the machine.",
    },
];

pub fn findings(probe: &Probe) -> Vec<Finding> {
    let devices = &probe.devices;
    let mut findings: Vec<Finding> = devices.iter().map(describe).collect();
    if devices.is_empty() {
        findings.push(Finding::warn(
            "CUDA: devices",
            "none",
            "The driver shows no GPU to this process.",
            "Look at CUDA_VISIBLE_DEVICES; in a container --gpus all.",
        ));
        return findings;
    }
    findings.extend(ABILITIES.iter().map(|ability| judge(ability, devices)));
    if devices.len() > 1 {
        findings.push(peers(&probe.peers));
    }
    findings
}

fn describe(device: &DeviceFacts) -> Finding {
    let DeviceFacts { name, uuid, capability: (major, minor), multiprocessors, copy_engines, .. } = device;
    let what = format!("GPU {}", device.device);
    let memory = bytes(device.memory);
    let found = format!(
        "{name}, compute capability {major}.{minor}, {multiprocessors} SMs, {memory}, {copy_engines} copy engines, {uuid}"
    );
    match (major, copy_engines) {
        (..8, _) => Finding::warn(
            what,
            found,
            "The kernels are made for compute capability 8.0 and newer.",
            "Use another GPU: CUDA_VISIBLE_DEVICES.",
        ),
        (_, 0) => Finding::note(
            what,
            found,
            "Without a copy engine the SMs move the rows.",
            "Nothing: a property of the GPU, or of its part.",
        ),
        _ => Finding::ok(what, found, "Copy engines move rows while the SMs compute."),
    }
}

fn judge(ability: &Ability, devices: &[DeviceFacts]) -> Finding {
    let lacking: Vec<String> = devices
        .iter()
        .filter(|device| !(ability.has)(device))
        .map(|device| device.device.to_string())
        .collect();
    if lacking.is_empty() {
        return Finding::ok(ability.what, "yes", ability.with);
    }
    let found = if lacking.len() == devices.len() {
        "no".to_owned()
    } else {
        format!("not GPU {}", lacking.join(", "))
    };
    match ability.lack {
        Level::Warn => Finding::warn(ability.what, found, ability.without, ability.advice),
        _ => Finding::note(ability.what, found, ability.without, ability.advice),
    }
}

/// Pairs that do not reach each other, in one direction or both.
fn peers(peers: &[Vec<bool>]) -> Finding {
    const WHAT: &str = "CUDA: peers";
    let pairs = (0..peers.len()).flat_map(|a| (0..a).map(move |b| (b, a)));
    let apart: Vec<String> =
        pairs.filter(|&(b, a)| !(peers[a][b] && peers[b][a])).map(|(b, a)| format!("{b}-{a}")).collect();
    if apart.is_empty() {
        return Finding::ok(
            WHAT,
            "all reach each other",
            "One node: copy engines reach every device's memory.",
        );
    }
    Finding::note(
        WHAT,
        format!("not {}", apart.join(", ")),
        "Devices that do not reach each other are not one node: rows between them take the way between nodes.",
        "nvidia-smi topo -p2p rw shows why; in virtual machines and with ACS on, PCIe peers are cut off.",
    )
}
