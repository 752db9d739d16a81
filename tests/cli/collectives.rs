//! `sidelane collectives`: between real processes, verified, on one node and on two; baselines
//! compute the same bits.

use std::process::Command;

use serde_json::Value;

fn run(words: &[&str]) -> (Option<i32>, Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    command.arg("collectives").args(words).arg("--json").arg(&json).env("TMPDIR", folder.path());
    let output = command.output().unwrap();
    let told = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    let report =
        std::fs::read_to_string(&json).map_or(Value::Null, |text| serde_json::from_str(&text).unwrap());
    (output.status.code(), report, told)
}

#[test]
fn every_collective_is_right_between_processes_of_one_node_and_of_two() {
    for shape in
        [&["--ranks-per-node=3"][..], &["--ranks-per-node=2,1"], &["--ranks-per-node=2,1", "--net=tcp"]]
    {
        let (code, report, told) = run(&[shape, &["--sizes=48,3145728", "--rounds=2"]].concat());
        assert_eq!((code, &report["verified"]), (Some(0), &Value::Bool(true)), "{told}");
        let runs = report["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 12);
        assert!(runs.iter().all(|run| run["rounds"] == 2 && run["p50_us"].as_f64() > Some(0.0)), "{told}");
    }
}

/// Without `SIDELANE_NEED_BASELINES` only those that are there are asked.
#[test]
fn others_that_are_installed_have_the_same_bits() {
    let needed = std::env::var_os("SIDELANE_NEED_BASELINES").is_some();
    let (code, report, told) = run(&["--ranks-per-node=2", "--sizes=4K,512K", "--rounds=3", "--baselines"]);
    assert_eq!(code, Some(0), "{told}");
    let absent = report["unavailable"].as_array().unwrap().len();
    assert!(absent == 0 || !needed, "{told}");
    for run in report["runs"].as_array().unwrap() {
        let baselines = run["baselines"].as_array().unwrap();
        assert_eq!(baselines.len(), 2 - absent, "{told}");
        assert!(baselines.iter().all(|one| one["bitwise_equal"] == true), "{told}");
    }
}

#[test]
fn sizes_that_make_no_equal_parts_are_refused_before_anything_starts() {
    let (code, _, told) = run(&["--ranks-per-node=3", "--sizes=4K"]);
    assert!(code == Some(2) && told.contains("equal parts"), "{told}");
}
