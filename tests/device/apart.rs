//! Tests that need another driver than the usual one: the stand-in reads its settings once in a process.

use std::env;
use std::process::Command;

const CHILD: &str = "SIDELANE_TEST_APART";

/// Runs the body in a process of its own with these variables. `test` is the test's full name.
pub fn apart(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    let said = format!("ran {test} to its end");
    if env::var(CHILD).is_ok_and(|child| child == test) {
        body();
        println!("{said}");
        return;
    }
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, test)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains(&said), "{variables:?}: {child:?}");
}
