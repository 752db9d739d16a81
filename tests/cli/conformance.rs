//! `sidelane conformance`: the table between processes, on the host and on the fake driver.

use std::process::Command;

use serde_json::Value;
use sidelane::ep::{CallExecutor, Feature};

use crate::program::{assert_words, on_fake_cuda, run, run_with_report, sidelane};

fn conformance(words: &[&str]) -> Command {
    let mut command = sidelane("conformance");
    command.args(words);
    command
}

/// Feature, executor, state and number of equal runs of each cell.
fn cells(report: &Value) -> Vec<(&str, &str, &str, u64)> {
    let cells = report["cells"].as_array().unwrap_or_else(|| panic!("{report}")).iter();
    cells
        .map(|cell| {
            let [feature, executor, state] =
                ["feature", "executor", "state"].map(|key| cell[key].as_str().unwrap());
            (feature, executor, state, cell["equal"].as_u64().unwrap())
        })
        .collect()
}

/// Holds cells against the library's own table.
fn assert_cells(report: &Value, told: &str) {
    for (name, executor, state, equal) in cells(report) {
        let feature = Feature::ALL.into_iter().find(|feature| feature.name() == name).unwrap();
        let executor = CallExecutor::ALL.into_iter().find(|one| one.name() == executor).unwrap();
        match state {
            "equal" => assert!(feature.is_served_by(executor) && equal > 0, "{name}: {told}"),
            "refused" => assert!(!feature.is_served_by(executor) && equal == 0, "{name}: {told}"),
            other => assert!(other == "not-run" && equal == 0, "{name} is {other}: {told}"),
        }
    }
}

#[test]
fn every_feature_of_the_host_is_equal_between_processes() {
    let (ended, report) = run_with_report(&mut conformance(&["--place", "host", "--seed", "3"]));
    let told = ended.well();
    assert_eq!(report["correct"], true, "{told}");
    assert_eq!((&report["seed"], &report["device"]), (&Value::from(3), &Value::Null));
    assert_cells(&report, &told);
    let equal: Vec<_> = cells(&report).into_iter().filter(|cell| cell.2 == "equal").collect();
    let served = |feature: &Feature| feature.is_served_by(CallExecutor::HostStepper);
    assert_eq!(equal.len(), Feature::ALL.into_iter().filter(served).count(), "{told}");
}

#[test]
fn features_of_devices_are_equal_or_refused_on_the_fake_driver() {
    let enqueued = [
        "expert-major rows",
        "gradients",
        "rank-major rows",
        "dispatch in fp8",
        "another expert map",
        "a rank mask",
        "token buffers",
    ];
    let constant =
        ["release without combine", "a receive budget", "partial sums in bf16", "aligned segments"];
    let only = enqueued.into_iter().chain(constant);
    let only = only.flat_map(|feature| ["--only", feature]);
    let (ended, report) = run_with_report(on_fake_cuda(conformance(&["--place", "device"]).args(only)));
    let told = ended.well();
    assert_eq!(
        (&report["correct"], &report["device"]["fake_driver"]),
        (&true.into(), &true.into()),
        "{told}"
    );
    assert!(told.contains("the fake driver: no GPU is here"), "{told}");
    assert_cells(&report, &told);
    let of = |feature: &str, executor: &str| {
        cells(&report).into_iter().find(|cell| (cell.0, cell.1) == (feature, executor)).unwrap().2.to_owned()
    };
    for feature in enqueued {
        assert_eq!(of(feature, "enqueuer"), "equal", "{told}");
    }
    for feature in constant.into_iter().chain(["rank-major rows", "expert-major rows", "a rank mask"]) {
        assert_eq!(of(feature, "constant-program"), "equal", "{told}");
    }
    assert_eq!(of("gradients", "constant-program"), "refused", "{told}");
}

#[test]
fn missing_driver_is_reported_and_error_if_device_is_requested() {
    let without = |words: &[&str]| {
        run_with_report(conformance(words).env("SIDELANE_CUDA_LIBRARY", "no-such-library.so"))
    };
    let (ended, report) = without(&["--only", "token buffers"]);
    assert_words(&ended.well(), &["not run: ", "no-such-library.so"]);
    let states: Vec<&str> = cells(&report).into_iter().map(|cell| cell.2).collect();
    assert_eq!(states, ["equal", "not-run", "not-run"]);
    let (ended, report) = without(&["--place", "device"]);
    assert_eq!((ended.code, report), (Some(1), Value::Null), "{}", ended.err);
    assert_words(&ended.err, &["no-such-library.so"]);
}

#[test]
fn unknown_feature_or_place_is_a_wrong_command_line() {
    for words in [["--only", "gradient"], ["--place", "gpu"], ["--seed", "x"]] {
        assert_eq!(run_with_report(&mut conformance(&words)).0.code, Some(2), "{words:?}");
    }
}

#[test]
fn help_lists_features_one_a_line() {
    let help = run(&mut sidelane("conformance --help")).well();
    let names: Vec<_> = help.lines().filter_map(|line| line.trim().strip_prefix("- ")).collect();
    assert!(names.len() > 20 && names.contains(&"token buffers"), "{help}");
}
