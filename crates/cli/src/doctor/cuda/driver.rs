//! What holds for all devices alike: version, batches, loading of kernels, queues.

use sidelane::device::{BatchedCopies, ModuleLoading, Probe, Version};

use super::super::finding::Finding;

pub fn findings(probe: &Probe, module: Option<&str>) -> Vec<Finding> {
    let mut findings = vec![identity(probe, module)];
    if probe.version < Version::MAPPED_FLAGS {
        findings.push(Finding::warn(
            "CUDA: device heap",
            "refused",
            "Stream memory operations on mapped memory are not safe with this driver.",
            "Update to a driver for CUDA 12.5 or newer.",
        ));
    }
    findings.extend([batches(probe), loading(probe), queues(probe)]);
    findings
}

fn identity(probe: &Probe, module: Option<&str>) -> Finding {
    const WHAT: &str = "CUDA: driver";
    let Probe { version, library, .. } = probe;
    if probe.stand_in {
        return Finding::note(
            WHAT,
            format!("stand-in for CUDA {version} ({library})"),
            "This is no driver and there is no GPU: tests load it to check the host's side.",
            "Nothing in a test. Otherwise unset SIDELANE_CUDA, and look at LD_LIBRARY_PATH.",
        );
    }
    let module = module.map_or_else(String::new, |module| format!("{module}, "));
    Finding::ok(WHAT, format!("{module}for CUDA {version} ({library})"), "The driver has started.")
}

fn batches(probe: &Probe) -> Finding {
    const WHAT: &str = "CUDA: batched copies";
    const MEANING: &str = "Many copies are handed over at once, but not in captured graphs. Before CUDA 13.1 SMs make those within one GPU.";
    match probe.batched_copies {
        BatchedCopies::None => Finding::note(
            WHAT,
            "none",
            "Copies are handed over one by one; between memory of one device, SMs move them.",
            "Update to a driver for CUDA 12.8 or newer.",
        ),
        BatchedCopies::First => Finding::ok(WHAT, "yes, as of CUDA 12.8", MEANING),
        BatchedCopies::Second => Finding::ok(WHAT, "yes, as of CUDA 13.0", MEANING),
    }
}

fn loading(probe: &Probe) -> Finding {
    const WHAT: &str = "CUDA: kernel loading";
    match probe.module_loading {
        ModuleLoading::Eager => Finding::ok(WHAT, "eager", "No launch waits for the loading of a kernel."),
        ModuleLoading::Lazy => Finding::warn(
            WHAT,
            "lazy",
            "A kernel's first launch can wait for a stream that itself waits for that launch.",
            "Set CUDA_MODULE_LOADING=EAGER before the program starts.",
        ),
        ModuleLoading::Unknown(mode) => Finding::note(
            WHAT,
            format!("mode {mode}"),
            "This library does not know the mode; a lazy one can make streams wait for each other for ever.",
            "Set CUDA_MODULE_LOADING=EAGER before the program starts.",
        ),
    }
}

fn queues(probe: &Probe) -> Finding {
    const WHAT: &str = "CUDA: queues";
    match probe.queues {
        1 => Finding::note(
            WHAT,
            "1",
            "All streams share one hardware queue: where one waits for a peer, compute behind it waits too.",
            "Unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more; Megatron sets it to 1 by default.",
        ),
        count => Finding::ok(
            WHAT,
            count.to_string(),
            "Hardware queues that streams are folded on; a waiting stream holds up those on its queue.",
        ),
    }
}
