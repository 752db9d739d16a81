//! `sidelane conformance`: the table between processes, on the host and on the fake driver.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use sidelane::ep::{CallExecutor, Feature};

/// Output, and the report.
fn conformance(words: &[&str], variables: &[(&str, &str)]) -> (Output, Value) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    command.arg("conformance").args(words).arg("--json").arg(&json);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let report =
        std::fs::read_to_string(&json).map_or(Value::Null, |text| serde_json::from_str(&text).unwrap());
    (output, report)
}

/// The same on the fake driver.
fn on_stand_in(words: &[&str]) -> (Output, Value) {
    let library = stand_in_cuda::install().unwrap().join("libcuda.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cuda/all_modules.cu");
    let kernels = stand_in_cuda::kernels(&source).unwrap();
    let variables = [
        ("SIDELANE_CUDA_LIBRARY", library.to_str().unwrap()),
        ("SIDELANE_FAKE_CUDA_KERNELS", kernels.to_str().unwrap()),
        ("SIDELANE_FAKE_CUDA_DRIVER", "13010"),
        ("SIDELANE_FAKE_CUDA_DEVICES", "1"),
    ];
    conformance(words, &variables)
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
    let (output, report) = conformance(&["--place", "host", "--seed", "3"], &[]);
    let told = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &report["correct"]), (Some(0), &Value::Bool(true)), "{told}");
    assert_eq!((&report["seed"], &report["device"]), (&Value::from(3), &Value::Null));
    assert_cells(&report, &told);
    let equal: Vec<_> = cells(&report).into_iter().filter(|cell| cell.2 == "equal").collect();
    let served = |feature: &Feature| feature.is_served_by(CallExecutor::HostStepper);
    assert_eq!(equal.len(), Feature::ALL.into_iter().filter(served).count(), "{told}");
}

#[test]
fn features_of_devices_are_equal_or_refused_on_the_stand_in() {
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
    let only: Vec<&str> = only.flat_map(|feature| ["--only", feature]).collect();
    let (output, report) = on_stand_in(&[&["--place", "device"][..], &only].concat());
    let told = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &report["correct"]), (Some(0), &Value::Bool(true)), "{told}");
    assert_eq!(report["device"]["stand_in"], true, "{told}");
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
fn missing_driver_is_said_and_is_an_error_where_a_device_was_asked_for() {
    let missing = [("SIDELANE_CUDA_LIBRARY", "no-such-library.so")];
    let (output, report) = conformance(&["--only", "token buffers"], &missing);
    let told = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(told.contains("not run: ") && told.contains("no-such-library.so"), "{told}");
    let states: Vec<&str> = cells(&report).into_iter().map(|cell| cell.2).collect();
    assert_eq!(states, ["equal", "not-run", "not-run"]);
    let (output, report) = conformance(&["--place", "device"], &missing);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), report), (Some(1), Value::Null), "{told}");
    assert!(told.contains("no-such-library.so"), "{told}");
}

#[test]
fn unknown_feature_or_place_is_a_wrong_command_line() {
    for words in [["--only", "gradient"], ["--place", "gpu"], ["--seed", "x"]] {
        let (output, _) = conformance(&words, &[]);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
    }
}
