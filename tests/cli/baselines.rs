//! Baselines: missing ones are named, and installed ones compute the same bits.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::program::{self, run_with_report, sidelane};

/// Runs the program with a search path; its report, and its text.
fn run(line: &str, path: Option<&str>) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = sidelane(line);
    command.arg("--baselines").env("TMPDIR", folder.path());
    if let Some(path) = path {
        command.env("PATH", path).env_remove("SIDELANE_PYTHON");
    }
    let (ended, report) = run_with_report(&mut command);
    assert_eq!(inside(folder.path()).len(), 0, "the folder of the peers is gone");
    (report, ended.well())
}

const BENCH: &str = "bench --tokens 16 --hidden 64 --rounds 3";
const PUT_BENCH: &str = "put-bench put-lat --sizes=8 --iterations=200 --warmup=20";

#[test]
fn missing_baseline_names_package_and_library_is_still_measured() {
    let (report, text) = run(&format!("{BENCH} --ranks-per-node=2"), Some("/nowhere"));
    assert_eq!(report["baselines"]["results"].as_array().unwrap().len(), 0);
    let absent =
        |nth: usize, key: &str| report["baselines"]["unavailable"][nth][key].as_str().unwrap().to_owned();
    assert_eq!((absent(0, "name"), absent(0, "reason")), ("mpi".into(), "there is no mpicc".into()));
    assert_eq!((absent(1, "name"), absent(1, "reason")), ("gloo".into(), "there is no python3".into()));
    assert!(report["verified"] == true && text.contains("openmpi-bin"), "{text}");
    let (report, text) = run(PUT_BENCH, Some("/nowhere"));
    assert_eq!(report["unavailable"]["reason"], "there is no ucx_perftest");
    assert!(report["verified"] == true && text.contains("ucx-utils"), "{text}");
}

/// Without `SIDELANE_NEED_BASELINES` only those that are there are asked.
#[test]
fn installed_baselines_have_same_bits_on_one_node_and_on_two() {
    let needed = std::env::var_os("SIDELANE_NEED_BASELINES").is_some();
    for shape in ["--ranks-per-node=2", "--ranks-per-node=1,1"] {
        let (report, text) = run(&format!("{BENCH} {shape}"), None);
        let ran = report["baselines"]["results"].as_array().unwrap();
        assert!(ran.len() == 2 || !needed, "{text}");
        for baseline in ran {
            assert_eq!(baseline["bitwise_equal"], true, "{text}");
            assert!(baseline["dispatch"]["speedup"]["value"].as_f64() > Some(0.0), "{text}");
        }
    }
    let (report, text) = run(PUT_BENCH, None);
    let baseline = &report["pairs"][0]["runs"][0]["baseline"];
    assert!(baseline.is_object() || !needed, "{text}");
    if baseline.is_object() {
        let turns = |key: &str| baseline[key].as_array().unwrap().len();
        assert_eq!((turns("ours_us"), turns("theirs_us")), (9, 9));
    }
}

#[test]
fn a_run_that_is_interrupted_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut command =
        sidelane("bench --tokens 16 --hidden 64 --rounds 1000000 --ranks-per-node 2 --baselines");
    command.env("TMPDIR", folder.path()).env("PATH", "/nowhere").env_remove("SIDELANE_PYTHON");
    let mut bench = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !inside(folder.path()).iter().any(|made| made.join("y.1").exists()) {
        assert!(Instant::now() < until && bench.try_wait().unwrap().is_none(), "nobody wrote for others");
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&bench), Signal::INT).unwrap();
    assert_eq!(bench.wait().unwrap().code(), Some(128 + 2));
    assert_eq!(inside(folder.path()).len(), 0, "the folder of the peers is gone");
}

fn inside(folder: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn options_without_baseline_equivalent_are_refused_before_start() {
    for (line, option) in [
        ("bench --layout rank-major", "--layout"),
        ("bench --dtype f32", "--dtype"),
        ("bench --sum-order node", "--sum-order"),
        ("bench --experts 60", "share evenly"),
        ("put-bench signal --ranks-per-node=2", "put-lat"),
    ] {
        program::run(sidelane(line).arg("--baselines")).refused(&[option]);
    }
}
