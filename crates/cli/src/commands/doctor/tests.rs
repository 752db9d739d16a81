//! Machines laid out in a temporary directory.

use sidelane::NicSurvey;
use sidelane::config::unknown_variables;
use sidelane::device::{BatchedCopies, DeviceProperties, ModuleLoading, Probe, Version, WriteOrder};
use sidelane::error::{DeviceError, LaneError, VerbsError};
use tempfile::TempDir;

use super::*;
use crate::command_frame::tests::assert_page;

/// A directory that is a machine.
struct Machine(TempDir);

impl Machine {
    fn new() -> Self {
        Machine(tempfile::tempdir().unwrap())
    }

    fn with(self, path: &str, text: &str) -> Self {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        self
    }

    fn examine(&self) -> Vec<Finding> {
        self.examine_with(self.facts())
    }

    fn facts(&self) -> Facts {
        Facts {
            usable_cores: 4,
            locked_memory: Some(8 << 20),
            open_files: Some(1024),
            huge_pages: None,
            verbs_signal: None,
            nics: Ok(NicSurvey { ranks: vec![vec!["mlx5_0 port 1".into()]], left_out: Vec::new() }),
            unknown_variables: Vec::new(),
            library_path: Vec::new(),
            cuda: Err(DeviceError::NoLibrary {
                library: "libcuda.so.1".into(),
                reason: "no such file".into(),
            }),
        }
    }

    fn examine_with(&self, facts: Facts) -> Vec<Finding> {
        examine(&Root::new(self.0.path()), &facts)
    }

    fn with_nic(self, state: &str) -> Self {
        const PORT: &str = "sys/class/infiniband/mlx5_0/ports/1";
        self.with(&format!("{PORT}/state"), state)
            .with(&format!("{PORT}/link_layer"), "InfiniBand\n")
            .with(&format!("{PORT}/rate"), "400 Gb/sec (4X NDR)\n")
    }
}

fn finding<'f>(findings: &'f [Finding], what: &str) -> &'f Finding {
    findings.iter().find(|f| f.what == what).unwrap_or_else(|| panic!("no {what} in {findings:#?}"))
}

#[test]
fn an_empty_machine_is_described_and_not_a_panic() {
    let findings = Machine::new().examine();
    assert_eq!(finding(&findings, "kernel").level, Level::Warn);
    assert_eq!(finding(&findings, "memory").found, "unknown");
    assert_eq!(finding(&findings, "CUDA").found, "none");
    assert_eq!(finding(&findings, "NICs").level, Level::Note);
    assert!(findings.iter().all(|f| f.level == Level::Ok || f.advice.is_some()), "each problem has advice");
}

#[test]
fn the_document_names_exactly_the_keys_of_the_json() {
    let findings = Machine::new().examine();
    assert_page("doctor-json.md", &[Diagnosis { program: Program::HERE, findings }]);
}

#[test]
fn host_facts_are_read() {
    let findings = Machine::new()
        .with("proc/sys/kernel/osrelease", "6.1.0\n")
        .with("proc/cpuinfo", "processor : 0\nflags\t\t: fpu avx avx2\n")
        .with("proc/meminfo", "MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\nHugePages_Total: 3\n")
        .with("sys/fs/cgroup/memory.max", "1610612736\n")
        .with("sys/devices/system/cpu/online", "0-7\n")
        .with("sys/devices/system/node/node0/cpulist", "0-3")
        .with("sys/devices/system/node/node1/cpulist", "4-7")
        .examine();
    assert_eq!(finding(&findings, "kernel").found, "Linux 6.1.0");
    assert_eq!(finding(&findings, "cores").found, "4 usable of 8");
    assert_eq!(finding(&findings, "vector unit").found, "AVX2");
    assert_eq!(finding(&findings, "memory").found, "1 GiB free of 2 GiB, limited to 1.5 GiB");
    assert_eq!(finding(&findings, "NUMA nodes").found, "2");
    assert_eq!(finding(&findings, "open files").level, Level::Note);
}

#[test]
fn unknown_variables_are_listed_with_the_names_they_resemble() {
    let machine = Machine::new();
    assert_eq!(finding(&machine.examine(), "environment").level, Level::Ok);
    for (names, found, level) in [
        (&["SIDELANE_ROOT", "SIDELANE_HEAP"][..], "SIDELANE_ROOT", Level::Note),
        (
            &["SIDELANE_ROOT", "SIDELANE_RAIL", "SIDELANE_HAEP"],
            "SIDELANE_HAEP (SIDELANE_HEAP?), SIDELANE_RAIL (SIDELANE_NET?), SIDELANE_ROOT",
            Level::Warn,
        ),
    ] {
        let unknown_variables = unknown_variables(names.iter().map(|&name| name.to_owned()));
        let findings = machine.examine_with(Facts { unknown_variables, ..machine.facts() });
        let seen = finding(&findings, "environment");
        assert_eq!((&*seen.found, seen.level), (found, level));
    }
}

#[test]
fn available_memory_is_free_memory_capped_by_control_group() {
    let machine = Machine::new().with("proc/meminfo", "MemAvailable: 1048576 kB\n");
    let available = |machine: &Machine| available_memory(&Root::new(machine.0.path()));
    assert_eq!(available(&machine), Some(1 << 30));
    for (limit, bytes) in [("max", 1 << 30), ("2147483648", 1 << 30), ("536870912", 1 << 29)] {
        let machine = Machine::new().with("sys/fs/cgroup/memory.max", limit);
        let machine = machine.with("proc/meminfo", "MemAvailable: 1048576 kB\n");
        assert_eq!(available(&machine), Some(bytes), "{limit}");
    }
    assert_eq!(available(&Machine::new()), None);
}

#[test]
fn huge_pages_are_ok_if_granted_else_setting_picks_advice() {
    for (setting, granted, level, advice) in [
        ("always within_size advise [never] deny force", Some(false), Level::Note, "shmem_enabled"),
        ("always within_size [advise] never deny force", Some(false), Level::Note, "compact_memory"),
        ("always within_size [advise] never deny force", Some(true), Level::Ok, ""),
    ] {
        let machine = Machine::new().with("sys/kernel/mm/transparent_hugepage/shmem_enabled", setting);
        let findings = machine.examine_with(Facts { huge_pages: granted, ..machine.facts() });
        let found = finding(&findings, "huge pages (shared)");
        assert_eq!(found.level, level, "{setting}");
        assert!(found.advice.unwrap_or("").contains(advice), "{setting}: {found:?}");
    }
}

#[test]
fn active_nic_warns_without_library_device_or_locked_memory() {
    let machine = Machine::new().with_nic("4: ACTIVE\n");
    let findings = machine.examine();
    assert_eq!(finding(&findings, "NIC mlx5_0, port 1").found, "ACTIVE, InfiniBand, 400 Gb/sec (4X NDR)");
    for what in ["libibverbs", "/dev/infiniband", "locked memory"] {
        assert_eq!(finding(&findings, what).level, Level::Warn, "{what}");
    }
    assert_eq!(finding(&findings, "locked memory").found, "8 MiB");
    let both = Ok(NicSurvey { ranks: vec![vec!["a".into(), "b".into()]], left_out: Vec::new() });
    let of_two = machine.examine_with(Facts { nics: both, ..machine.facts() });
    assert_eq!(finding(&of_two, "locked memory").found, "8 MiB, so 4 MiB for each of 2 NICs");
    let facts = Facts {
        locked_memory: None,
        open_files: None,
        library_path: vec!["/opt/rdma".into()],
        ..machine.facts()
    };
    let findings =
        machine.with("opt/rdma/libibverbs.so.1", "").with("dev/infiniband/uverbs0", "").examine_with(facts);
    assert_eq!(finding(&findings, "libibverbs").found, "/opt/rdma/libibverbs.so.1");
    assert!(findings.iter().all(|f| f.what != "/dev/infiniband"));
    assert_eq!(finding(&findings, "locked memory").found, "unlimited");
}

#[test]
fn writes_as_signals_are_noted_where_there_are_nics() {
    let machine = Machine::new().with_nic("4: ACTIVE\n");
    for (setting, found, level) in [
        (None, "auto", Level::Ok),
        (Some("auto"), "auto", Level::Ok),
        (Some("immediate"), "immediate", Level::Ok),
        (Some("write"), "write", Level::Note),
        (Some("writes"), "writes", Level::Warn),
    ] {
        let facts = Facts { verbs_signal: setting.map(str::to_owned), ..machine.facts() };
        let findings = machine.examine_with(facts);
        let signals = finding(&findings, "signals over NICs");
        assert_eq!((signals.found.as_str(), signals.level), (found, level));
    }
    let findings = Machine::new().examine();
    assert!(findings.iter().all(|finding| finding.what != "signals over NICs"));
}

#[test]
fn the_lane_s_own_choice_is_shown_or_why_there_is_none() {
    let machine = Machine::new().with_nic("4: ACTIVE\n");
    let examined = |nics| machine.examine_with(Facts { nics, ..machine.facts() });
    let ranks = vec![vec!["mlx5_1 port 2, 10.0.0.1 (GID 3)".to_owned()], vec!["mlx5_0".to_owned()]];
    let left_out = vec![("mlx5_2".to_owned(), "less than half of 400 Gb/s".to_owned())];
    let findings = examined(Ok(NicSurvey { ranks, left_out }));
    let seen = |findings: &[Finding], what| {
        let finding = finding(findings, what);
        (finding.level, finding.found.clone())
    };
    let first = (Level::Ok, "mlx5_1 port 2, 10.0.0.1 (GID 3)".to_owned());
    assert_eq!(seen(&findings, "NIC of rank 0"), first);
    assert_eq!(seen(&findings, "NIC of rank 1"), (Level::Ok, "mlx5_0".to_owned()));
    assert_eq!(seen(&findings, "NIC mlx5_2, choice"), (Level::Ok, "less than half of 400 Gb/s".to_owned()));
    let error = VerbsError::NoPartition { nic: "mlx5_0".into(), port: 1 };
    let findings = examined(Err(LaneError::from(error.clone()).into()));
    assert_eq!(seen(&findings, "NIC of rank 0"), (Level::Warn, error.to_string()));
    let findings = examined(Ok(NicSurvey::default()));
    assert_eq!(seen(&findings, "NIC of rank 0"), (Level::Warn, "none is usable".to_owned()));
    let findings = Machine::new().examine();
    assert!(findings.iter().all(|finding| !finding.what.starts_with("NIC of rank")), "without NICs");
}

#[test]
fn resent_packets_are_noted_if_driver_counts_them() {
    const COUNTERS: &str = "sys/class/infiniband/mlx5_0/ports/1/hw_counters";
    for (gaps, timeouts, level) in [("0", "0", Level::Ok), ("3", "0", Level::Note), ("0", "2", Level::Note)] {
        let machine = Machine::new().with_nic("4: ACTIVE\n");
        let machine = machine.with(&format!("{COUNTERS}/packet_seq_err"), gaps);
        let findings = machine.with(&format!("{COUNTERS}/local_ack_timeout_err"), timeouts).examine();
        let losses = finding(&findings, "NIC mlx5_0, port 1, losses");
        assert_eq!(losses.level, level, "{losses:?}");
        assert_eq!(losses.found, format!("{gaps} sequence errors, {timeouts} timeouts"));
    }
    let findings = Machine::new().with_nic("4: ACTIVE\n").examine();
    assert!(findings.iter().all(|finding| !finding.what.ends_with("losses")));
}

#[test]
fn a_nic_with_fewer_or_slower_lanes_than_it_can_use_is_noted() {
    const DEVICE: &str = "sys/class/infiniband/mlx5_0/device";
    for (speed, width, level, found) in [
        ("32.0 GT/s PCIe", "16", Level::Ok, "32.0 GT/s x 16"),
        ("32.0 GT/s PCIe", "8", Level::Note, "32.0 GT/s x 8 of 32.0 GT/s x 16"),
        ("16.0 GT/s PCIe", "16", Level::Note, "16.0 GT/s x 16 of 32.0 GT/s x 16"),
    ] {
        let machine = Machine::new().with_nic("4: ACTIVE\n");
        let machine = machine.with(&format!("{DEVICE}/current_link_speed"), speed);
        let machine = machine.with(&format!("{DEVICE}/current_link_width"), width);
        let machine = machine.with(&format!("{DEVICE}/max_link_speed"), "32.0 GT/s PCIe");
        let findings = machine.with(&format!("{DEVICE}/max_link_width"), "16").examine();
        let pcie = finding(&findings, "NIC mlx5_0, PCIe");
        assert_eq!((pcie.level, pcie.found.as_str()), (level, found));
    }
}

#[test]
fn a_port_that_is_down_is_a_warning() {
    let findings = Machine::new().with_nic("1: DOWN\n").examine();
    assert_eq!(finding(&findings, "NIC mlx5_0, port 1").level, Level::Warn);
}

#[test]
fn each_missing_part_of_cuda_is_named() {
    let machine = Machine::new().with(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\nGCC version: 12.2\n",
    );
    let findings = machine.examine();
    assert_eq!(finding(&findings, "CUDA: driver").found, "550.54.14");
    assert_eq!(finding(&findings, "CUDA: libcuda").level, Level::Warn);
    assert_eq!(finding(&findings, "CUDA: devices").level, Level::Warn);
    let findings = machine
        .with("etc/ld.so.conf.d/arch.conf", "# multiarch\n/usr/lib/x86_64-linux-gnu\n")
        .with("usr/lib/x86_64-linux-gnu/libcuda.so.1", "")
        .with("dev/nvidia0", "")
        .with("dev/nvidia1", "")
        .with("dev/nvidiactl", "")
        .examine();
    assert_eq!(finding(&findings, "CUDA: libcuda").found, "/usr/lib/x86_64-linux-gnu/libcuda.so.1");
    assert_eq!(finding(&findings, "CUDA: devices").found, "2");
}

fn gpu(device: u32) -> DeviceProperties {
    DeviceProperties {
        device,
        name: "NVIDIA H200".into(),
        uuid: "GPU-00112233-4455-6677-8899-aabbccddeeff".into(),
        capability: (9, 0),
        multiprocessors: 132,
        memory: 141 << 30,
        copy_engines: 3,
        wide_memory_operations: true,
        flush_remote_writes: true,
        virtual_memory: true,
        descriptors: true,
        fabric: true,
        direct_rdma: true,
        direct_rdma_mapped: true,
        write_order: WriteOrder::AllDevices,
        dma_buf: true,
        multicast: true,
        host_register: true,
        several_processes: true,
        block_threads: 1024,
        multiprocessor_threads: 2048,
        grid: [i32::MAX as u32, 65535, 65535],
    }
}

pub(crate) fn probe(devices: u32) -> Probe {
    Probe {
        library: "libcuda.so.1".into(),
        fake_driver: false,
        version: Version(13000),
        batched_copies: BatchedCopies::Second,
        module_loading: ModuleLoading::Eager,
        queues: 8,
        devices: (0..devices).map(gpu).collect(),
        peers: vec![vec![true; devices as usize]; devices as usize],
    }
}

fn examine_cuda(probe: Probe) -> Vec<Finding> {
    let machine = Machine::new();
    let facts = Facts { cuda: Ok(probe), ..machine.facts() };
    let findings = machine.examine_with(facts);
    assert!(findings.iter().all(|f| f.level == Level::Ok || f.advice.is_some()), "each problem has advice");
    findings
}

#[test]
fn a_machine_with_all_that_cuda_has_is_all_right() {
    let findings = examine_cuda(probe(2));
    let cuda: Vec<_> =
        findings.iter().filter(|f| f.what.contains("CUDA") || f.what.contains("GPU")).collect();
    assert_eq!(cuda.len(), 4 + 2 + 8 + 1, "{cuda:#?}");
    assert!(cuda.iter().all(|f| f.level == Level::Ok), "{cuda:#?}");
    let first = finding(&findings, "GPU 0");
    assert!(first.found.contains("compute capability 9.0, 132 SMs, 141 GiB, 3 copy engines"), "{first:?}");
}

#[test]
fn features_missing_in_driver_are_named_with_consequence() {
    let mut old = probe(1);
    old.version = Version(12040);
    old.batched_copies = BatchedCopies::None;
    old.module_loading = ModuleLoading::Lazy;
    old.queues = 1;
    let findings = examine_cuda(old);
    assert_eq!(finding(&findings, "CUDA: driver").found, "for CUDA 12.4 (libcuda.so.1)");
    for (what, level) in [
        ("CUDA: device heap", Level::Warn),
        ("CUDA: batched copies", Level::Note),
        ("CUDA: kernel loading", Level::Note),
        ("CUDA: queues", Level::Note),
    ] {
        assert_eq!(finding(&findings, what).level, level, "{what}");
    }
}

#[test]
fn devices_that_lack_something_are_named() {
    let mut mixed = probe(3);
    mixed.devices[1].wide_memory_operations = false;
    mixed.devices.iter_mut().for_each(|device| device.dma_buf = false);
    mixed.peers[0][2] = false;
    let findings = examine_cuda(mixed);
    assert_eq!(finding(&findings, "CUDA: flags").found, "not GPU 1");
    assert_eq!(finding(&findings, "CUDA: flags").level, Level::Warn);
    assert_eq!(finding(&findings, "CUDA: dma-buf").found, "no");
    assert_eq!(finding(&findings, "CUDA: peers").found, "not 0-2");
}

#[test]
fn a_fake_driver_is_called_one() {
    let findings = examine_cuda(Probe { fake_driver: true, ..probe(1) });
    assert!(finding(&findings, "CUDA: driver").found.starts_with("fake driver"));
    assert_eq!(finding(&findings, "CUDA: driver").level, Level::Note);
}

#[test]
fn a_driver_that_does_not_start_says_why() {
    let machine = Machine::new();
    let error = DeviceError::Init { library: "libcuda.so.1".into(), code: 803, name: "MISMATCH".into() };
    let findings = machine.examine_with(Facts { cuda: Err(error), ..machine.facts() });
    let found = finding(&findings, "CUDA: start");
    assert_eq!(found.level, Level::Warn);
    assert!(found.found.contains("803") && found.found.contains("different versions"), "{found:?}");
}
