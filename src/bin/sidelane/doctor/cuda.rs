//! CUDA: the three parts that must come together, each of which containers like to lose.

use super::facts::Facts;
use super::finding::Finding;
use super::loader;
use super::root::Root;

pub fn findings(root: &Root, facts: &Facts) -> Vec<Finding> {
    let library = loader::find(root, facts, &["libcuda.so.1", "libcuda.so"]);
    let driver = root.read("/proc/driver/nvidia/version").map(|text| driver_version(&text));
    let devices = root.numbered("/dev", "nvidia");
    if library.is_none() && driver.is_none() && devices == 0 {
        return vec![Finding::note(
            "CUDA",
            "none",
            "No GPU here: everything runs on the host lanes.",
            "Nothing, unless there should be one: then install NVIDIA's driver.",
        )];
    }
    vec![
        match driver {
            Some(version) => Finding::ok("CUDA: driver", version, "The kernel module is loaded."),
            None => Finding::warn(
                "CUDA: driver",
                "not loaded",
                "Without the kernel module no GPU can be used.",
                "modprobe nvidia on the host; nvidia-smi shows whether it took.",
            ),
        },
        match library {
            Some(path) => {
                Finding::ok("CUDA: libcuda", path.display().to_string(), "The driver can be called.")
            }
            None => Finding::warn(
                "CUDA: libcuda",
                "not found",
                "The driver's library is missing, so the driver cannot be called.",
                "In a container: --gpus all with the NVIDIA container toolkit; else install the driver's libraries.",
            ),
        },
        match devices {
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
    ]
}

/// The number in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 ...".
fn driver_version(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    let number = |word: &&str| word.contains('.') && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    first.split_whitespace().find(number).unwrap_or(first).to_owned()
}
