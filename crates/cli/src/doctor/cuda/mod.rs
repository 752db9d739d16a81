//! CUDA: the three parts that must come together, each of which containers like to lose; then what the driver says.

mod devices;
mod driver;

use sidelane::device::Probe;
use sidelane::error::DeviceError;

use super::facts::Facts;
use super::finding::Finding;
use super::loader;
use super::root::Root;

/// What the driver says, without a look at the machine around it.
pub fn of_probe(probe: &Probe) -> Vec<Finding> {
    let mut findings = driver::findings(probe, None);
    findings.extend(devices::findings(probe));
    findings
}

pub fn findings(root: &Root, facts: &Facts) -> Vec<Finding> {
    let library = loader::find(root, facts, &["libcuda.so.1", "libcuda.so"]);
    let module = root.read("/proc/driver/nvidia/version").map(|text| module_version(&text));
    let nodes = root.numbered("/dev", "nvidia");
    match &facts.cuda {
        Ok(probe) => {
            let mut findings = driver::findings(probe, module.as_deref());
            findings.extend(devices::findings(probe));
            return findings;
        }
        Err(DeviceError::NoLibrary { .. }) if library.is_none() && module.is_none() && nodes == 0 => {
            return vec![Finding::note(
                "CUDA",
                "none",
                "No GPU here: everything runs on the host lanes.",
                "Nothing, unless there should be one: then install NVIDIA's driver.",
            )];
        }
        Err(_) => {}
    }
    let mut findings = vec![
        match module {
            Some(version) => Finding::ok("CUDA: driver", version, "The kernel module is loaded."),
            None => Finding::warn(
                "CUDA: driver",
                "not loaded",
                "Without the kernel module no GPU can be used.",
                "modprobe nvidia on the host; nvidia-smi shows whether it took.",
            ),
        },
        match library {
            Some(path) => Finding::ok("CUDA: libcuda", path.display().to_string(), "The library is there."),
            None => Finding::warn(
                "CUDA: libcuda",
                "not found",
                "The driver's library is missing, so the driver cannot be called.",
                "In a container: --gpus all with the NVIDIA container toolkit; else install the driver's libraries.",
            ),
        },
        match nodes {
            0 => Finding::warn(
                "CUDA: devices",
                "none",
                "No /dev/nvidiaN: this process cannot open a GPU.",
                "In a container: --gpus all; on a host: nvidia-modprobe -u -c 0.",
            ),
            count => {
                Finding::ok("CUDA: devices", count.to_string(), "Device nodes that can be opened as GPUs.")
            }
        },
    ];
    if let Err(error) = &facts.cuda {
        findings.push(Finding::warn(
            "CUDA: start",
            error.to_string(),
            "The driver cannot be used.",
            "As the message says; nvidia-smi asks the same driver.",
        ));
    }
    findings
}

/// The number in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 ...".
fn module_version(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    let number = |word: &&str| word.contains('.') && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    first.split_whitespace().find(number).unwrap_or(first).to_owned()
}
