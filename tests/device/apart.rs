//! Tests that need another driver than the usual one: the stand-in reads its settings once in a process.
#![allow(dead_code, reason = "each test program uses a part of this")]

use std::env;
use std::process::Command;

const CHILD: &str = "SIDELANE_TEST_APART";

/// Runs the body in a process of its own with these variables. `test` is the test's full name.
pub fn apart(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    each(test, &[variables], body);
}

/// Runs the body once for each list of variables, in a process of its own.
pub fn each(test: &str, runs: &[&[(&str, &str)]], body: impl FnOnce()) {
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
