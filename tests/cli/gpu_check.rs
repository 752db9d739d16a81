//! `sidelane gpu-check` on the fake driver: all parts complete with right results, and make no
//! claim about a GPU.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use sidelane::ep::Feature;

use crate::program::{Ended, assert_words, on_fake_cuda, read, run, run_with_report, sidelane};

/// `gpu-check` on the fake driver.
fn gpu_check(options: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = sidelane(&format!("gpu-check {options}"));
    on_fake_cuda(&mut command).envs(variables.iter().copied());
    command
}

/// The bound of a case: what stands still for so long blocks. Tests wait for it.
const CASE_SECONDS: u64 = 3;

fn cupti() -> PathBuf {
    fake_cuda::install().unwrap().join("libcupti.so.12")
}

fn cublas() -> PathBuf {
    fake_cuda::install().unwrap().join("libcublas.so.12")
}

/// Rows of one part, run as `gpu-check` runs it.
fn part(part: &str, variables: &[(&str, &str)]) -> Vec<Value> {
    let task = serde_json::json!({
        "part": part, "device": 0, "quick": true, "size": 128, "case_seconds": CASE_SECONDS
    });
    let mut command = sidelane("rank gpu-check");
    on_fake_cuda(command.arg(task.to_string())).env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    command.env_remove("SIDELANE_CUPTI_LIBRARY").env_remove("SIDELANE_SITE_PACKAGES");
    let ended = run(command.envs(variables.iter().copied()));
    let told = ended.out.lines();
    told.map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{ended:?}"))).collect()
}

fn rows<'r>(report: &'r Value, part: &str) -> Vec<&'r Value> {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().filter(|row| row["part"] == part).collect()
}

fn state<'r>(rows: &[&'r Value], what: &str) -> &'r str {
    let row = rows.iter().find(|row| row["what"].as_str().unwrap().starts_with(what));
    row.unwrap_or_else(|| panic!("no {what} in {rows:#?}"))["state"].as_str().unwrap()
}

#[test]
fn everything_runs_to_its_end_on_the_fake_driver_and_nothing_is_claimed_about_a_gpu() {
    let (ended, report) = run_with_report(&mut gpu_check(
        "--quick --size 128 --case-seconds 3",
        &[
            ("SIDELANE_CUPTI_LIBRARY", cupti().to_str().unwrap()),
            ("SIDELANE_CUBLAS_LIBRARY", cublas().to_str().unwrap()),
        ],
    ));
    let text = &ended.out;

    let wrong: Vec<&Value> =
        report["rows"].as_array().unwrap().iter().filter(|row| row["state"] == "wrong").collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(report["fake_driver"], true);
    assert_eq!(report["correct"], true);
    // The controls of the audit must fail here: no multiprocessor is held.
    assert_eq!((&report["audited"], &report["holds"]), (&Value::Bool(false), &Value::Bool(false)));
    assert_eq!(ended.code, Some(1), "a fake driver shows nothing about a GPU");
    assert_words(text, &["No GPU was here: nothing is shown about one.", "Locks: all pass"]);

    let driver = rows(&report, "driver");
    for what in
        ["modules", "copies and flags", "waits of 32", "waits of 64", "lists", "events", "batches", "graphs"]
    {
        assert_eq!(state(&driver, what), "right", "{what}");
    }
    assert_eq!(state(&driver, "memory by descriptor"), "right");
    let kernels = rows(&report, "kernels");
    assert_eq!(kernels.iter().filter(|row| row["what"].as_str().unwrap().starts_with("sum ")).count(), 5);
    for what in ["gate", "product", "product of cuBLAS", "copy by SMs"] {
        assert_eq!(state(&kernels, what), "right", "{what}");
    }
    let exchange = rows(&report, "exchange");
    for what in [
        "2 ranks",
        "4 ranks",
        "8 ranks",
        "8 ranks in a graph",
        "2 + 2 ranks, between nodes by memory of the host",
        "2 + 2 ranks, the same in a graph",
        "two layers in turns",
        "exact sizes, 8 ranks",
        "a budget, 8 ranks",
        "a budget, 4 ranks in a graph",
    ] {
        assert_eq!(state(&exchange, what), "right", "{what}");
    }
    let processes = rows(&report, "processes");
    for what in ["2 ranks", "4 ranks", "exact sizes, 4 ranks", "a budget, 4 ranks"] {
        assert_eq!(state(&processes, what), "right", "{what}");
    }

    let conformance = rows(&report, "conformance");
    assert_eq!(conformance.len(), Feature::ALL.len());
    for row in &conformance {
        let found = row["found"].as_str().unwrap();
        assert!(row["state"] == "right" || found.contains("not run"), "{row}");
    }
    assert_eq!(state(&conformance, "gradients"), "right");

    let audit = rows(&report, "audit");
    for what in [
        "control: a kernel",
        "control: copy by a kernel",
        "copy of 4 KiB on the GPU, alone",
        "copy of 64 MiB on the GPU, in a graph",
        "4 ranks, 0.9 MB to pinned",
        "4 ranks, 0.9 MB to the same",
    ] {
        assert_eq!(state(&audit, what), "void", "{what}");
    }
    for row in &audit {
        let (found, control) =
            (row["found"].as_str().unwrap(), row["what"].as_str().unwrap().starts_with("control"));
        assert!(!control || found.contains("the control does not hold here"), "{row}");
    }
    let locks = rows(&report, "locks");
    assert_eq!(locks.iter().map(|row| &row["answer"]).collect::<Vec<_>>(), ["passes"; 4], "{locks:#?}");
    let queues = rows(&report, "queues");
    assert!(queues.len() == 6 && queues.iter().all(|row| row["state"] == "answered"), "{queues:#?}");
    let conclusions = report["conclusions"].as_array().unwrap();
    assert!(conclusions[0].as_str().unwrap().starts_with("Locks: all pass"), "{conclusions:?}");
    let activity = rows(&report, "activity");
    assert_eq!(activity.iter().map(|row| &row["state"]).collect::<Vec<_>>(), ["right"; 3], "{activity:#?}");
    let blocks = rows(&report, "blocks");
    assert_eq!(state(&blocks, "bits with every limit"), "right");
    let limits: Vec<_> = blocks.iter().filter(|row| !row["limited"].is_null()).collect();
    let limited = |row: &&&Value| row["limited"]["blocks"].as_u64();
    assert_eq!(limits.iter().map(limited).collect::<Vec<_>>(), [None, Some(4), Some(2), Some(1)]);
    assert!(limits.iter().all(|row| row["limited"]["slowdown"].as_f64().unwrap() > 0.0));
    for part in ["interference", "costs", "rates", "blocks"] {
        let mut rows = rows(&report, part);
        rows.retain(|row| row["what"] != "bits with every limit");
        assert!(rows.len() >= 3, "{part}: {rows:#?}");
        for row in rows {
            assert_eq!(row["state"], "measured", "{row}");
            assert!(row["time"]["p50_us"].as_f64().unwrap() > 0.0, "{row}");
            assert_eq!(row["shows"], "nothing: the fake driver's times are not a GPU's");
        }
    }
}

/// As help and errors list them: in the order in which they run.
const PARTS: &str = "driver, kernels, locks, queues, processes, conformance, costs, rates, audit, \
                     activity, exchange, interference, blocks";

#[test]
fn gpu_check_names_missing_requirement_and_runs_nothing() {
    for (options, variables, code, words) in [
        ("", ("SIDELANE_CUDA_LIBRARY", "no-such-library.so"), 1, "cannot load no-such-library.so"),
        ("", ("SIDELANE_CUDA_LIBRARY", "libc.so.6"), 1, "libc.so.6 has no cuInit"),
        ("", ("SIDELANE_FAKE_CUDA_DEVICES", "0"), 1, "CUDA_ERROR_NO_DEVICE"),
        ("", ("SIDELANE_FAKE_CUDA_DRIVER", "12040"), 1, "gpu-check needs a driver for CUDA 12.5"),
        ("--device 3", ("SIDELANE_FAKE_CUDA_DEVICES", "2"), 1, "no device 3: the driver shows 2"),
        ("--size 100", ("SIDELANE_FAKE_CUDA_DEVICES", "1"), 2, "not a multiple of 128"),
        ("--part lock", ("SIDELANE_FAKE_CUDA_DEVICES", "1"), 2, PARTS),
        ("--minutes 0", ("SIDELANE_FAKE_CUDA_DEVICES", "1"), 2, "not above 0"),
    ] {
        let ended = run(&mut gpu_check(options, &[variables]));
        assert_eq!((ended.code, &ended.out[..]), (Some(code), ""), "{}", ended.err);
        assert_words(&ended.err, &[words]);
    }
}

/// What rows are about and how they came out.
fn states(rows: &[Value]) -> Vec<(&str, &str)> {
    rows.iter().map(|row| (row["what"].as_str().unwrap(), row["state"].as_str().unwrap())).collect()
}

#[test]
fn cupti_has_kernel_from_packed_to_landed_only_if_driver_adds() {
    let cupti = cupti();
    let cupti = ("SIDELANE_CUPTI_LIBRARY", cupti.to_str().unwrap());
    let (control, host, same) = (
        "control: plain copy on the GPU",
        "4 ranks, 0.9 MB to pinned windows of the host",
        "4 ranks, 0.9 MB to the same GPU, in batches",
    );
    let clean = part("activity", &[cupti]);
    assert_eq!(states(&clean), [(control, "right"), (host, "right"), (same, "right")]);
    let found = clean[0]["found"].as_str().unwrap();
    assert!(
        found.starts_with("no kernel; copies in queues of engines 0, of SMs 1, of neither 0; CUPTI is /")
    );
    for row in &clean[1..] {
        assert_eq!(row["found"], "no kernel; copies in queues of engines 12, of SMs 0, of neither 0");
    }

    // A driver that heeds no wish, and copies by a kernel of its own.
    let planted = part("activity", &[cupti, ("SIDELANE_FAKE_CUDA_COPY_KERNELS", "1")]);
    assert_eq!(states(&planted), [(control, "right"), (host, "right"), (same, "wrong")]);
    assert_eq!(
        planted[2]["found"],
        "KERNELS: 12 of fake_copy; copies in queues of engines 0, of SMs 0, of neither 0"
    );
}

#[test]
fn without_cupti_one_row_says_so_and_nothing_is_wrong() {
    for (variables, words) in [
        (&[][..], "not seen: no CUPTI: libcupti: "),
        (
            &[("SIDELANE_CUPTI_LIBRARY", "/nowhere/libcupti.so.12")],
            "not seen: no CUPTI: /nowhere/libcupti.so.12: ",
        ),
        (&[("SIDELANE_CUPTI_LIBRARY", "libc.so.6")], "not seen: libc.so.6 has no cuptiGetVersion"),
    ] {
        let rows = part("activity", variables);
        assert_eq!(states(&rows), [("list of kernels by CUPTI", "skipped")]);
        let found = rows[0]["found"].as_str().unwrap();
        assert!(found.starts_with(words), "{words:?} in {found:?}");
    }
}

#[test]
fn process_ranks_are_skipped_if_gpu_allows_one_process() {
    let rows = part("processes", &[("SIDELANE_FAKE_CUDA_COMPUTE_MODE", "3")]);
    assert_eq!(states(&rows), [("ranks as processes", "skipped")]);
    assert!(rows[0]["found"].as_str().unwrap().contains("compute mode allows one process"), "{rows:?}");
}

#[test]
fn a_part_that_dies_costs_its_own_rows_alone() {
    // Without kernels nothing that needs one can run; the driver's own rows do.
    let without = [("SIDELANE_FAKE_CUDA_KERNELS", "")];
    let parts = ["driver", "kernels", "audit", "interference", "blocks"];
    let arguments = format!("--quick --size 128 --part {}", parts.join(" --part "));
    let (ended, report) = run_with_report(&mut gpu_check(&arguments, &without));
    assert_eq!((ended.code, &report["correct"]), (Some(1), &Value::Bool(false)));
    assert_eq!(state(&rows(&report, "driver"), "modules"), "wrong");
    assert_eq!(state(&rows(&report, "driver"), "batches"), "right");
    for part in &parts[1..] {
        assert_eq!(state(&rows(&report, part), "to its end"), "wrong", "{part}");
    }
    assert_words(&ended.out, &["NOT RIGHT"]);
}

/// The answers of a part, by question.
fn answers(rows: &[Value]) -> Vec<(&str, &str)> {
    let of = |row: &'_ Value| row["answer"].as_str().unwrap_or_else(|| panic!("{row}")).to_owned();
    assert!(rows.iter().all(|row| row["state"] == "answered" && !of(row).is_empty()));
    rows.iter().map(|row| (row["what"].as_str().unwrap(), row["answer"].as_str().unwrap())).collect()
}

const CALLS: [&str; 4] =
    ["cuMemFree", "cuModuleLoadData", "cuMemFreeHost", "4,000 launches on the stream that waits"];

#[test]
fn lock_test_answers_blocks_for_each_call_of_locking_driver() {
    let settings = [("SIDELANE_FAKE_CUDA_LOCKS", "1"), ("SIDELANE_FAKE_CUDA_LAUNCH_QUEUE", "64")];
    let rows = part("locks", &settings);
    assert_eq!(answers(&rows), CALLS.map(|call| (call, "blocks")));
    assert!(rows[0]["found"].as_str().unwrap().contains("the call itself waits for the stream"), "{rows:#?}");
    assert!(rows[3]["found"].as_str().unwrap().contains("of 4000 launches were taken"), "{rows:#?}");
}

/// Questions of the queue test, in its order.
const QUEUES: [&str; 6] = [
    "connections 1, other streams of the same priority",
    "connections 1, other streams of the highest priority",
    "connections 8, other streams of the same priority",
    "connections 8, other streams of the highest priority",
    "connections 32, other streams of the same priority",
    "connections 32, other streams of the highest priority",
];

#[test]
fn queue_test_answers_blocks_where_streams_share_a_queue() {
    let rows = part("queues", &[]);
    let shared = ["blocks", "blocks", "passes", "passes", "passes", "passes"];
    assert_eq!(answers(&rows), QUEUES.into_iter().zip(shared).collect::<Vec<_>>());
    // Priorities with queues of their own; copies of a direction in a queue that all streams share.
    let by_priority = part("queues", &[("SIDELANE_FAKE_CUDA_PRIORITY_QUEUES", "1")]);
    let shared = ["blocks", "passes", "passes", "passes", "passes", "passes"];
    assert_eq!(answers(&by_priority), QUEUES.into_iter().zip(shared).collect::<Vec<_>>());
}

#[test]
fn queue_test_names_the_direction_whose_copies_share_a_queue() {
    let rows = part(
        "queues",
        &[("SIDELANE_FAKE_CUDA_PRIORITY_QUEUES", "1"), ("SIDELANE_FAKE_CUDA_COPY_QUEUES", "1")],
    );
    assert_eq!(answers(&rows), QUEUES.map(|what| (what, "blocks")));
    // With one queue for each priority the word behind that copy holds up the other streams' words,
    // too.
    for row in &rows[2..] {
        let found = row["found"].as_str().unwrap();
        assert_eq!(found, "BLOCKS: no copy to the host in 3 s; copies to the GPU, on the GPU pass");
    }
}

#[test]
fn rows_for_newer_driver_are_skipped_and_name_both_versions() {
    let same = ["4 ranks, 0.9 MB to the same GPU, in batches", "4 ranks, 16 KiB to the same GPU, in batches"];
    let rows = part("audit", &[("SIDELANE_FAKE_CUDA_DRIVER", "13000")]);
    let skipped: Vec<_> = rows.iter().filter(|row| row["state"] == "skipped").collect();
    assert_eq!(skipped.iter().map(|row| row["what"].as_str().unwrap()).collect::<Vec<_>>(), same);
    for row in skipped {
        let needs = "skipped: the overlap hint of a batch needs CUDA 13.1, and the driver is for CUDA 13.0";
        assert_eq!(row["found"], needs);
    }
    assert!(rows.iter().all(|row| row["state"] != "wrong"), "{rows:#?}");
    let rows = part("driver", &[("SIDELANE_FAKE_CUDA_DRIVER", "12060")]);
    let batches = rows.iter().find(|row| row["what"] == "batches of copies").unwrap();
    assert_eq!(batches["state"], "skipped");
    assert!(batches["found"].as_str().unwrap().contains("needs CUDA 12.8, and the driver is for CUDA 12.6"));
    assert!(rows.iter().all(|row| row["state"] != "wrong"), "{rows:#?}");
}

#[test]
fn cupti_of_a_wheel_is_found_and_named() {
    let site = tempfile::tempdir().unwrap();
    let folder = site.path().join("nvidia/cuda_cupti/lib");
    std::fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(cupti(), folder.join("libcupti.so.12")).unwrap();
    let rows = part("activity", &[("SIDELANE_SITE_PACKAGES", site.path().to_str().unwrap())]);
    assert_eq!(rows.iter().map(|row| &row["state"]).collect::<Vec<_>>(), ["right"; 3], "{rows:#?}");
    let named = format!("CUPTI is {}", folder.join("libcupti.so.12").display());
    assert!(rows[0]["found"].as_str().unwrap().contains(&named), "{rows:#?}");
}

/// The report of a run with these options.
fn report(options: &str, variables: &[(&str, &str)]) -> Value {
    run_with_report(&mut gpu_check(&format!("--quick --size 128 {options}"), variables)).1
}

#[test]
fn chosen_parts_run_alone_in_the_order_of_all() {
    let report = report("--part kernels,driver --part activity", &[]);
    let parts: Vec<&str> =
        report["rows"].as_array().unwrap().iter().map(|row| row["part"].as_str().unwrap()).collect();
    let mut found = parts.clone();
    found.dedup();
    assert_eq!(found, ["driver", "kernels", "activity"]);
    assert_eq!((&report["correct"], &report["audited"]), (&Value::Bool(true), &Value::Bool(false)));
}

#[test]
fn parts_behind_the_minutes_are_skipped_and_not_wrong() {
    let report = report("--minutes 0.0001", &[]);
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.iter().filter(|row| row["what"] == "all of it").count() >= 10, "{rows:#?}");
    for row in rows.iter().filter(|row| row["state"] == "skipped") {
        assert_eq!(row["found"], "skipped: no time left (--minutes)");
    }
    assert_eq!((&report["correct"], &report["minutes"]), (&Value::Bool(true), &Value::from(0.0001)));
}

#[test]
fn part_that_runs_when_the_minutes_are_over_is_ended() {
    // Its first case stands still for longer than that.
    let report =
        report("--part locks --minutes 0.1 --case-seconds 600", &[("SIDELANE_FAKE_CUDA_LOCKS", "1")]);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(states(rows), [("to its end", "skipped")]);
    assert_eq!(report["correct"], true);
}

/// Runs the parts costs and rates with these options; the status, and the file.
fn calibrated(parts: &str, variables: &[(&str, &str)]) -> (Ended, Option<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpu.json");
    let line = format!("--quick --size 128 --part {parts} --calibrate");
    let ended = run(gpu_check(&line, variables).arg(&file));
    let simulate = "simulate --nodes 1 --tokens 16 --hidden 128 --hardware";
    let simulated = run(sidelane(simulate).arg(&file));
    assert_eq!(simulated.code == Some(0), file.exists(), "{simulated:?}");
    (ended, file.exists().then(|| read(&file)))
}

#[test]
fn calibration_on_fake_driver_says_so_in_its_sources() {
    let (ended, hardware) = calibrated("costs,rates", &[]);
    let hardware = hardware.unwrap_or_else(|| panic!("{ended:?}"));
    let engines = &hardware["engines"];
    for place in ["host", "own"] {
        let steps: Vec<_> =
            engines[place].as_array().unwrap().iter().map(|step| step["from_bytes"].as_u64()).collect();
        assert_eq!(steps, [0, 16 << 10, 28 << 10, 921_600].map(Some), "{hardware:#}");
    }
    // What one GPU does not show is as in the file that the rest is from.
    assert_eq!(engines["peer"][0]["rate"], 380_000);
    let sources = hardware["sources"].as_array().unwrap();
    assert_eq!(sources[0]["source"], "measured: gpu-check on the fake driver, so it means nothing");
    let of = |figure: &str| {
        let names = |source: &&Value| source["figures"].as_array().unwrap().contains(&figure.into());
        sources.iter().filter(names).count()
    };
    assert_eq!((of("engines.host"), of("engines.per_word"), of("nic.rate")), (1, 1, 1));
}

#[test]
fn calibration_without_needed_part_or_row_is_refused() {
    let (ended, hardware) = calibrated("costs", &[]);
    ended.refused(&["--calibrate needs the part rates"]);
    assert_eq!(hardware, None);
    // Without batches there is no price of a copy in one.
    let (ended, hardware) = calibrated("costs,rates", &[("SIDELANE_FAKE_CUDA_DRIVER", "12060")]);
    assert_eq!((ended.code, hardware), (Some(1), None), "{}", ended.err);
    assert_words(&ended.err, &["a copy of 4 KiB to the host, in a batch of 255 (part costs)"]);
}
