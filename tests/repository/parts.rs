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

/// Folders that ask for no part, with the reason.
const EXEMPT: [(&str, &str); 23] = [
    ("crates/cli/src/chart", "the quick gate compares the picture of `plan`"),
    ("crates/cli/src/commands", "the quick gate tests all commands; those that parts play with have lines"),
    ("crates/model/src/parallel", "the quick gate runs all tests of models"),
    ("crates/model/src/time", "the quick gate runs all tests of models"),
    ("crates/parallel/src/context", "the quick gate runs all of `tests/parallel`"),
    ("crates/parallel/src/data", "the quick gate runs all of `tests/parallel`"),
    ("crates/parallel/src/pipeline", "the quick gate runs all of `tests/parallel`"),
    ("crates/parallel/src/tensor", "the quick gate runs all of `tests/parallel`"),
    ("crates/testkit/src/conformance", "the quick gate runs the whole suite"),
    ("crates/testkit/src/device", "the quick gate runs all checks of a device on the fake driver"),
    ("crates/testkit/src/timing", "the quick gate runs its tests"),
    ("src/error", "types alone"),
    ("tests/atomics", "the quick gate runs all models"),
    ("tests/cli", "the quick gate runs all of its cases; baselines have lines of their own"),
    ("tests/collective", "the quick gate runs all of its cases"),
    ("tests/cupti-abi", "the quick gate compares all declarations"),
    ("tests/no_allocation", "the quick gate runs all of its cases"),
    ("tests/fuzz", "the quick gate plays its corpus again; campaigns are no part"),
    ("tests/parallel", "the quick gate runs all of its cases"),
    ("tests/repository", "the quick gate runs all of its cases"),
    ("tests/verbs-abi", "the quick gate compares all declarations"),
    ("tests/gate", "the quick gate runs all of its cases; `oracles` has a line"),
    ("tests/rows", "the quick gate runs all of its cases"),
];

/// Folders in this one.
fn folders(of: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root().join(of)).unwrap().map(|entry| entry.unwrap());
    let folders = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    folders.map(|entry| format!("{of}/{}", entry.file_name().to_str().unwrap())).collect()
}

#[test]
fn every_folder_asks_for_a_part_or_has_a_reason_not_to() {
    let mut all: Vec<String> = ["src", "tests"].into_iter().flat_map(folders).collect();
    all.extend(folders("crates").iter().flat_map(|package| folders(&format!("{package}/src"))));
    let table = steps("table");
    let asks = |folder: &str| {
        let prefixes = table.lines().filter_map(|line| line.split_whitespace().next());
        prefixes.into_iter().any(|prefix| format!("{folder}/").starts_with(prefix))
    };
    let silent: BTreeSet<&str> = all.iter().map(String::as_str).filter(|folder| !asks(folder)).collect();
    let exempt: BTreeSet<&str> = EXEMPT.into_iter().map(|(folder, _)| folder).collect();
    assert_eq!(silent, exempt, "folders without a line in CONTRIBUTING.md, and those with a reason");
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
