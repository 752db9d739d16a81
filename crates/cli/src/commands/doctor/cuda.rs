//! CUDA: its three parts, each of which containers often lack; then the driver's report.

use sidelane::device::{BatchedCopies, DeviceProperties, ModuleLoading, Probe, Version, WriteOrder};
use sidelane::error::DeviceError;

use super::finding::{Finding, Level, seen};
use super::machine::{Facts, Root, find_library};
use crate::table::bytes;

/// The driver's report, without a look at the machine around it.
pub fn of_probe(probe: &Probe) -> Vec<Finding> {
    said(probe, None)
}

pub fn findings(root: &Root, facts: &Facts) -> Vec<Finding> {
    let library = find_library(root, facts, &["libcuda.so.1", "libcuda.so"]);
    let module = root.read("/proc/driver/nvidia/version").map(|text| module_version(&text));
    let nodes = root.numbered("/dev", "nvidia");
    match &facts.cuda {
        Ok(probe) => {
            return said(probe, module.as_deref());
        }
        Err(DeviceError::NoLibrary { .. }) if library.is_none() && module.is_none() && nodes == 0 => {
            return vec![
                Finding::new("CUDA", "none")
                    .means("No GPU here: everything runs on the host lanes.")
                    .note("Nothing, unless there should be one: then install NVIDIA's driver."),
            ];
        }
        Err(_) => {}
    }
    let mut findings = vec![
        match module {
            Some(version) => Finding::new("CUDA: driver", version).means("The kernel module is loaded."),
            None => Finding::new("CUDA: driver", "not loaded").means("Without the kernel module no GPU can be used.").warn("modprobe nvidia on the host; nvidia-smi shows whether it took."),
        },
        match library {
            Some(path) => Finding::new("CUDA: libcuda", path.display().to_string()).means("The library is there."),
            None => Finding::new("CUDA: libcuda", "not found").means("The driver's library is missing, so the driver cannot be called.").warn("In a container: --gpus all with the NVIDIA container toolkit; else install the driver's libraries."),
        },
        match nodes {
            0 => Finding::new("CUDA: devices", "none").means("No /dev/nvidiaN: this process cannot open a GPU.").warn("In a container: --gpus all; on a host: nvidia-modprobe -u -c 0."),
            count => {
                Finding::new("CUDA: devices", count.to_string()).means("Device nodes that can be opened as GPUs.")
            }
        },
    ];
    if let Err(error) = &facts.cuda {
        findings.push(
            Finding::new("CUDA: start", error.to_string())
                .means("The driver cannot be used.")
                .warn("As the message says; nvidia-smi asks the same driver."),
        );
    }
    findings
}

/// The number in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 ...".
fn module_version(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    let number = |word: &&str| word.contains('.') && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    first.split_whitespace().find(number).unwrap_or(first).to_owned()
}

/// The driver's report on all devices alike, on each, and on the abilities of each.
fn said(probe: &Probe, module: Option<&str>) -> Vec<Finding> {
    let mut findings = vec![identity(probe, module).named("CUDA: driver")];
    if probe.version < Version::MAPPED_FLAGS {
        findings.push(
            Finding::new("CUDA: device heap", "refused")
                .means("Stream memory operations on mapped memory are not safe with this driver.")
                .warn("Update to a driver for CUDA 12.5 or newer."),
        );
    }
    findings.extend([
        batches(probe).named("CUDA: batched copies"),
        loading(probe).named("CUDA: kernel loading"),
        queues(probe).named("CUDA: queues"),
    ]);
    findings.extend(devices(probe));
    findings
}

fn identity(probe: &Probe, module: Option<&str>) -> Finding {
    let Probe { version, library, .. } = probe;
    if probe.fake_driver {
        return seen(format!("fake driver for CUDA {version} ({library})"))
            .means("This is no driver and there is no GPU: tests load it to check the host's side.")
            .note("Nothing in a test. Otherwise unset SIDELANE_CUDA_LIBRARY, and look at LD_LIBRARY_PATH.");
    }
    let module = module.map_or_else(String::new, |module| format!("{module}, "));
    seen(format!("{module}for CUDA {version} ({library})")).means("The driver has started.")
}

fn batches(probe: &Probe) -> Finding {
    const MEANING: &str = "Many copies are handed over at once, but not in captured graphs. Before CUDA 13.1 SMs make those within one GPU.";
    match probe.batched_copies {
        BatchedCopies::None => seen("none")
            .means("Copies are handed over one by one; between memory of one device, SMs move them.")
            .note("Update to a driver for CUDA 12.8 or newer."),
        BatchedCopies::First => seen("yes, as of CUDA 12.8").means(MEANING),
        BatchedCopies::Second => seen("yes, as of CUDA 13.0").means(MEANING),
    }
}

fn loading(probe: &Probe) -> Finding {
    match probe.module_loading {
        ModuleLoading::Eager => seen("eager").means("No launch waits for the loading of a kernel."),
        ModuleLoading::Lazy => seen("lazy").means("Sidelane's own kernels are loaded when an instance is built. The first launch of any other kernel waits for all streams.")
        .note("Only for slots between ranks that are threads of one process: CUDA_MODULE_LOADING=EAGER before it starts."),
        ModuleLoading::Unknown(mode) => seen(format!("mode {mode}")).means("This library does not know the mode. Sidelane's own kernels are loaded when an instance is built.")
        .note("Only for slots between ranks that are threads of one process: CUDA_MODULE_LOADING=EAGER before it starts."),
    }
}

fn queues(probe: &Probe) -> Finding {
    match probe.queues {
        1 => seen("1").means("All streams share one hardware queue: where one waits for a peer, compute behind it waits too.")
        .note("Unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more; Megatron sets it to 1 by default."),
        count => seen(count.to_string()).means("Hardware queues that streams are folded on; a waiting stream holds up those on its queue."),
    }
}

struct Ability {
    what: &'static str,
    has: fn(&DeviceProperties) -> bool,
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
        with: "Ranks in other processes can map the device's memory, and device heaps can grow.",
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
        without: "Other machines are reached by NICs only, without NVLink.",
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
        what: "CUDA: NICs to memory",
        has: |device| device.direct_rdma && device.direct_rdma_mapped,
        with: "NICs can read and write the device's mapped memory.",
        lack: Level::Note,
        without: "Rows for other machines pass through host memory.",
        advice: "On GPUs made for data centers: update the driver; in a virtual machine pass the whole GPU through.",
    },
    Ability {
        what: "CUDA: dma-buf",
        has: |device| device.dma_buf,
        with: "NICs register the device's memory by a descriptor.",
        lack: Level::Note,
        without: "NICs can register the device's memory only through nvidia-peermem.",
        advice: "Use NVIDIA's open kernel modules on Linux 5.12 or newer, or modprobe nvidia-peermem.",
    },
    Ability {
        what: "CUDA: order of NICs' writes",
        has: |device| device.write_order != WriteOrder::None || device.flush_remote_writes,
        with: "A flag that a NIC writes behind data into the device's memory is seen after the data.",
        lack: Level::Note,
        without: "A NIC's data may be seen after its flag: rows for other machines pass through host memory.",
        advice: "Nothing: a property of the GPU and the machine.",
    },
];

fn devices(probe: &Probe) -> Vec<Finding> {
    let devices = &probe.devices;
    let mut findings: Vec<Finding> = devices.iter().map(describe).collect();
    if devices.is_empty() {
        findings.push(
            Finding::new("CUDA: devices", "none")
                .means("The driver shows no GPU to this process.")
                .warn("Look at CUDA_VISIBLE_DEVICES; in a container --gpus all."),
        );
        return findings;
    }
    findings.extend(ABILITIES.iter().map(|ability| judge(ability, devices)));
    if devices.len() > 1 {
        findings.push(peers(&probe.peers).named("CUDA: peers"));
    }
    findings
}

fn describe(device: &DeviceProperties) -> Finding {
    let DeviceProperties { name, uuid, capability: (major, minor), multiprocessors, copy_engines, .. } =
        device;
    let what = format!("GPU {}", device.device);
    let memory = bytes(device.memory);
    let found = format!(
        "{name}, compute capability {major}.{minor}, {multiprocessors} SMs, {memory}, {copy_engines} copy engines, {uuid}"
    );
    match (major, copy_engines) {
        (..8, _) => Finding::new(what, found)
            .means("The kernels are made for compute capability 8.0 and newer.")
            .warn("Use another GPU: CUDA_VISIBLE_DEVICES."),
        (_, 0) => Finding::new(what, found)
            .means("Without a copy engine the SMs move the rows.")
            .note("Nothing: a property of the GPU, or of its part."),
        _ => Finding::new(what, found).means("Copy engines move rows while the SMs compute."),
    }
}

fn judge(ability: &Ability, devices: &[DeviceProperties]) -> Finding {
    let lacking: Vec<String> = devices
        .iter()
        .filter(|device| !(ability.has)(device))
        .map(|device| device.device.to_string())
        .collect();
    if lacking.is_empty() {
        return Finding::new(ability.what, "yes").means(ability.with);
    }
    let found = if lacking.len() == devices.len() {
        "no".to_owned()
    } else {
        format!("not GPU {}", lacking.join(", "))
    };
    let lacks = Finding::new(ability.what, found).means(ability.without);
    Finding { level: ability.lack, advice: Some(ability.advice), ..lacks }
}

/// Pairs that do not reach each other, in one direction or both.
fn peers(peers: &[Vec<bool>]) -> Finding {
    let pairs = (0..peers.len()).flat_map(|a| (0..a).map(move |b| (b, a)));
    let apart: Vec<String> =
        pairs.filter(|&(b, a)| !(peers[a][b] && peers[b][a])).map(|(b, a)| format!("{b}-{a}")).collect();
    if apart.is_empty() {
        return seen("all reach each other").means("One node: copy engines reach every device's memory.");
    }
    seen(format!("not {}", apart.join(", "))).means("Devices that do not reach each other are not one node: rows between them take the way between nodes.").note("nvidia-smi topo -p2p rw shows why; in virtual machines and with ACS on, PCIe peers are cut off.")
}
