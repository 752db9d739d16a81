//! Tests that need another driver than the usual one: the fake driver reads its settings once in a
//! process.
#![allow(dead_code, reason = "each test program uses a part of this")]

use std::env;
use std::process::Command;

const CHILD: &str = "SIDELANE_TEST_APART";

/// Variables of a process.
pub type Settings<'a> = &'a [(&'a str, &'a str)];

/// Runs the body in a process of its own with these variables. `test` is the test's full name.
pub fn apart(test: &str, variables: Settings<'_>, body: impl FnOnce()) {
    each(test, &[variables], body);
}

/// Runs the body once for each list of variables, in a process of its own.
pub fn each(test: &str, runs: &[Settings<'_>], body: impl FnOnce()) {
    if !is_apart(test) {
        return start(test, runs);
    }
    body();
    println!("{}", ended(test));
}

/// As [`each`], with the fake driver's kernels, which are built for the CPU.
pub fn each_with_kernels(test: &str, runs: &[Settings<'_>], body: impl FnOnce()) {
    match is_apart(test) {
        true => each(test, runs, body),
        false => start_with_kernels(test, runs),
    }
}

/// Whether this process was started for this test.
fn is_apart(test: &str) -> bool {
    env::var(CHILD).is_ok_and(|child| child == test)
}

/// Line of a process whose body has ended.
fn ended(test: &str) -> String {
    format!("ran {test} to its end")
}

/// Runs the processes of a test. The compiler makes a copy of [`each`] for each of a hundred
/// bodies, and one of this.
fn start(test: &str, runs: &[Settings<'_>]) {
    for variables in runs {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, test)
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && text.contains(&ended(test)), "{variables:?}: {child:?}");
    }
}

fn start_with_kernels(test: &str, runs: &[Settings<'_>]) {
    let (library, driver) = (fake_cuda::all_kernels().unwrap(), fake_cuda::install().unwrap());
    let usual = [
        ("LD_LIBRARY_PATH", driver.to_str().unwrap()),
        ("SIDELANE_FAKE_CUDA_KERNELS", library.to_str().unwrap()),
    ];
    let runs: Vec<_> = runs.iter().map(|settings| [&usual, *settings].concat()).collect();
    start(test, &runs.iter().map(Vec::as_slice).collect::<Vec<_>>());
}
