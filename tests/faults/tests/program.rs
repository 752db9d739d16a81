//! The program as its callers see it: exit status, report.

use std::process::{Command, Output};

use serde_json::Value;

fn faults(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_faults")).args(words).output().expect("the program starts")
}

#[test]
fn killed_rank_is_named_and_the_report_says_so() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let done = faults(&["--only", "sigkill", "dispatch", "shm", "tcp", "--json", path]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    let report: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(report["schema"], 1);
    assert_eq!((&report["counts"]["named"], &report["counts"]["WRONG"]), (&2.into(), &0.into()));
    for cell in report["cells"].as_array().unwrap() {
        let note = cell["note"].as_str().unwrap();
        assert!(note.contains("3 Lost") && note.contains("3 ranks rebuilt"), "{note}");
    }
}

#[test]
fn unknown_fault_is_wrong_usage() {
    assert_eq!(faults(&["--only", "earthquake"]).status.code(), Some(2));
}
