//! The table of CONTRIBUTING.md, by which the quick gate chooses parts of the full run.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Output of a function of `.ci/steps.sh`.
fn steps(script: &str) -> String {
    let script = format!("source .ci/steps.sh; {script}");
    let output = Command::new("bash").arg("-c").arg(script).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn words(script: &str) -> BTreeSet<String> {
    steps(script).split_whitespace().map(str::to_owned).collect()
}

#[test]
fn table_names_paths_that_exist_and_all_parts() {
    let table = steps("table");
    let mut asked = BTreeSet::new();
    for line in table.lines() {
        let mut words = line.split_whitespace().map(str::to_owned);
        let path = words.next().unwrap();
        assert!(root().join(&path).exists(), "{path} is not there");
        asked.extend(words);
    }
    assert_eq!(asked, words("printf '%s\\n' \"${PARTS[@]}\""));
}

#[test]
fn each_part_has_a_function_and_an_estimate() {
    let parts = words("printf '%s\\n' \"${PARTS[@]}\"");
    assert_eq!(parts, words("declare -F | sed -n 's/^declare -f part_//p'"));
    assert_eq!(parts, words("printf '%s\\n' \"${!PART_SECONDS[@]}\""));
}

#[test]
fn changed_path_asks_for_parts_of_each_prefix() {
    let parts =
        steps("printf '%s\\n' src/lane/flag.rs docs/design.md crates/core/src/gate/config.rs | parts_of");
    assert_eq!(parts, "worlds\ntestbed\noracles\n");
    assert_eq!(steps("echo README.md | parts_of"), "");
}
