//! Tests that need another driver than the usual one: the stand-in reads its settings once in a
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
    let said = format!("ran {test} to its end");
    if env::var(CHILD).is_ok_and(|child| child == test) {
        body();
        println!("{said}");
        return;
    }
    for variables in runs {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, test)
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && text.contains(&said), "{variables:?}: {child:?}");
    }
}

/// As [`each`], with the stand-in driver's kernels, which are built for the CPU.
pub fn each_with_kernels(test: &str, runs: &[Settings<'_>], body: impl FnOnce()) {
    let (library, driver) = (stand_in_cuda::all_kernels().unwrap(), stand_in_cuda::install().unwrap());
    let usual = [
        ("LD_LIBRARY_PATH", driver.to_str().unwrap()),
        ("SIDELANE_FAKE_CUDA_KERNELS", library.to_str().unwrap()),
    ];
    let runs: Vec<_> = runs.iter().map(|settings| [&usual, *settings].concat()).collect();
    each(test, &runs.iter().map(Vec::as_slice).collect::<Vec<_>>(), body);
}
