//! `sidelane gpu-check` on the stand-in driver: everything runs to its end and is right, and nothing is claimed about a GPU.
#![cfg(feature = "cli")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn gpu_check(options: &[&str], variables: &[(&str, &str)]) -> Output {
    let library = stand_in_cuda::install().unwrap().join("libcuda.so.1");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    command.arg("gpu-check").args(options).env("SIDELANE_CUDA", library);
    command.envs(variables.iter().copied()).output().unwrap()
}

fn rows<'r>(report: &'r Value, part: &str) -> Vec<&'r Value> {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().filter(|row| row["part"] == part).collect()
}

fn state<'r>(rows: &[&'r Value], what: &str) -> &'r str {
    let row = rows.iter().find(|row| row["what"].as_str().unwrap().starts_with(what));
    row.unwrap_or_else(|| panic!("no {what} in {rows:#?}"))["state"].as_str().unwrap()
}

#[test]
fn everything_runs_to_its_end_on_the_stand_in_and_nothing_is_claimed_about_a_gpu() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/all.cu");
    let kernels = stand_in_cuda::kernels(&source).unwrap();
    let file = std::env::temp_dir().join(format!("sidelane-gpu-check-{}.json", std::process::id()));
    let output = gpu_check(
        &["--quick", "--size", "128", "--json", file.to_str().unwrap()],
        &[("SIDELANE_STAND_IN_KERNELS", kernels.to_str().unwrap()), ("SIDELANE_STAND_IN_DEVICES", "1")],
    );
    let text = String::from_utf8_lossy(&output.stdout);
    let json = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let report: Value = serde_json::from_str(&json).unwrap();
    std::fs::remove_file(&file).unwrap();

    let wrong: Vec<&Value> =
        report["rows"].as_array().unwrap().iter().filter(|row| row["state"] == "wrong").collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(report["stand_in"], true);
    assert_eq!(report["correct"], true);
    // The controls of the audit must fail here: no multiprocessor is held.
    assert_eq!((&report["audited"], &report["holds"]), (&Value::Bool(false), &Value::Bool(false)));
    assert_eq!(output.status.code(), Some(1), "a stand-in shows nothing about a GPU");
    assert!(text.contains("No GPU was here: nothing is shown about one."), "{text}");

    let driver = rows(&report, "driver");
    for what in
        ["modules", "copies and flags", "waits of 32", "waits of 64", "lists", "events", "batches", "graphs"]
    {
        assert_eq!(state(&driver, what), "right", "{what}");
    }
    assert_eq!(state(&driver, "memory by descriptor"), "right");
    let kernels = rows(&report, "kernels");
    assert_eq!(kernels.iter().filter(|row| row["what"].as_str().unwrap().starts_with("sum ")).count(), 5);
    assert_eq!((state(&kernels, "product"), state(&kernels, "copy by SMs")), ("right", "right"));
    let exchange = rows(&report, "exchange");
    for what in ["2 ranks", "4 ranks", "8 ranks", "8 ranks in a graph", "two exchanges in turns"] {
        assert_eq!(state(&exchange, what), "right", "{what}");
    }
    let processes = rows(&report, "processes");
    assert_eq!((state(&processes, "2 ranks"), state(&processes, "4 ranks")), ("right", "right"));

    let audit = rows(&report, "audit");
    for what in [
        "control: a kernel",
        "control: plain copy",
        "4 ranks, 0.9 MB to pinned",
        "4 ranks, 0.9 MB to the same",
    ] {
        assert_eq!(state(&audit, what), "void", "{what}");
    }
    for row in &audit {
        let (found, control) =
            (row["found"].as_str().unwrap(), row["what"].as_str().unwrap().starts_with("control"));
        assert!(!control || found.contains("the control does not hold here"), "{row}");
    }
    for part in ["interference", "costs"] {
        let rows = rows(&report, part);
        assert!(rows.len() >= 3, "{part}: {rows:#?}");
        for row in rows {
            assert_eq!(row["state"], "measured", "{row}");
            assert!(row["time"]["p50_us"].as_f64().unwrap() > 0.0, "{row}");
            assert_eq!(row["shows"], "nothing: the stand-in's times are not a GPU's");
        }
    }
}

#[test]
fn what_is_missing_is_said_and_nothing_runs() {
    for (options, variables, code, words) in [
        (&[][..], ("SIDELANE_CUDA", "no-such-library.so"), 1, "cannot load no-such-library.so"),
        (&[], ("SIDELANE_CUDA", "libc.so.6"), 1, "libc.so.6 has no cuInit"),
        (&[], ("SIDELANE_STAND_IN_DEVICES", "0"), 1, "CUDA_ERROR_NO_DEVICE"),
        (&[], ("SIDELANE_STAND_IN_DRIVER", "12040"), 1, "gpu-check needs a driver for CUDA 12.5"),
        (&["--device", "3"], ("SIDELANE_STAND_IN_DEVICES", "2"), 1, "no device 3: the driver shows 2"),
        (&["--size", "100"], ("SIDELANE_STAND_IN_DEVICES", "1"), 2, "not a multiple of 128"),
    ] {
        let output = gpu_check(options, &[variables]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(words), "{words:?} in {said}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_part_that_dies_costs_its_own_rows_alone() {
    // Without kernels nothing that needs one can run; the driver's own rows do.
    let file = std::env::temp_dir().join(format!("sidelane-gpu-check-none-{}.json", std::process::id()));
    let output = gpu_check(
        &["--quick", "--size", "128", "--json", file.to_str().unwrap()],
        &[("SIDELANE_STAND_IN_DEVICES", "1"), ("SIDELANE_STAND_IN_KERNELS", "")],
    );
    let json = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let report: Value = serde_json::from_str(&json).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!((output.status.code(), &report["correct"]), (Some(1), &Value::Bool(false)));
    assert_eq!(state(&rows(&report, "driver"), "modules"), "wrong");
    assert_eq!(state(&rows(&report, "driver"), "batches"), "right");
    for part in ["kernels", "audit", "interference"] {
        assert_eq!(state(&rows(&report, part), "to its end"), "wrong", "{part}");
    }
    assert!(String::from_utf8_lossy(&output.stdout).contains("NOT RIGHT"));
}
