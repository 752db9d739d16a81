//! The program as its callers see it. It boots nothing here.
//!
//! These tests also make cargo build the program with those of all other packages, so that it
//! shares their libraries.

use std::process::{Command, Output};

fn testbed(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_testbed")).args(words).output().expect("the program starts")
}

#[test]
fn help_names_the_steps() {
    let output = testbed(&["--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && help.contains("conformance:"), "{help}");
}

#[test]
fn unknown_step_is_refused_before_anything_is_fetched() {
    let output = testbed(&["--only", "conformity"]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("conformance") && output.stdout.is_empty(), "{errors}");
}
