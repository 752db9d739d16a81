//! `sidelane doctor` on whatever machine runs the tests: it always reports and always succeeds.
#![cfg(feature = "cli")]

use std::process::{Command, Output};

fn doctor(options: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sidelane")).arg("doctor").args(options).output().unwrap()
}

#[test]
fn the_table_names_what_every_machine_has() {
    let output = doctor(&[]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for what in ["kernel", "cores", "memory", "/dev/shm", "libibverbs", "CUDA"] {
        assert!(text.contains(what), "{what} in\n{text}");
    }
}

#[test]
fn each_finding_in_json_says_what_it_means_and_each_problem_what_to_do() {
    let output = doctor(&["--json"]);
    assert!(output.status.success());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.len() >= 10);
    for finding in findings {
        assert!(finding["meaning"].as_str().is_some_and(|text| !text.is_empty()), "{finding}");
        assert_eq!(finding["advice"].is_null(), finding["level"] == "ok", "{finding}");
    }
}
