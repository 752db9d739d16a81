//! The program as its callers see it: exit status, report.

use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
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
fn rank_0_without_descriptors_is_named_or_goes_on() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let done = faults(&["--only", "emfile", "bootstrap", "shm", "--victim", "0", "--json", path]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    let report: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    // At the moment of the fault rank 0 may have all descriptors that a world needs.
    assert_eq!((&report["cells"][0]["victim"], &report["counts"]["WRONG"]), (&0.into(), &0.into()));
}

/// Namespaces of a process of this program.
fn namespaces(process: u32) -> usize {
    let all = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let prefix = format!("faults{process}-");
    all.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).count()
}

#[test]
fn run_that_a_signal_ends_leaves_no_namespace() {
    let mut run = Command::new(env!("CARGO_BIN_EXE_faults"));
    let run = run.args(["--only", "loss", "dispatch", "tcp"]).stdout(Stdio::piped());
    let mut run = run.spawn().expect("the program starts");
    while namespaces(run.id()) == 0 {
        if run.try_wait().unwrap().is_some() {
            let output = run.wait_with_output().unwrap();
            assert!(String::from_utf8_lossy(&output.stdout).contains("1 not applicable"), "{output:?}");
            return;
        }
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&run), Signal::TERM).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(128 + Signal::TERM.as_raw()));
    assert_eq!(namespaces(run.id()), 0);
}

#[test]
fn unknown_fault_is_wrong_usage() {
    assert_eq!(faults(&["--only", "earthquake"]).status.code(), Some(2));
}
