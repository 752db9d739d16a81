//! `sidelane doctor` on the machine that runs the tests: it always reports and always succeeds.

use serde_json::Value;

use crate::program::{assert_words, run, sidelane};

/// Findings about `what` with the fake driver in place of a real one.
fn fake_driver(variables: &[(&str, &str)]) -> impl Fn(&str) -> (String, String) {
    let library = fake_cuda::install().unwrap().join("libcuda.so.1");
    let mut doctor = sidelane("doctor --json");
    doctor.env("SIDELANE_CUDA_LIBRARY", library).envs(variables.iter().copied());
    let report: Value = serde_json::from_str(&run(&mut doctor).well()).unwrap();
    move |what| {
        let findings = report["findings"].as_array().unwrap();
        let found = findings.iter().find(|finding| finding["what"] == what);
        let found = found.unwrap_or_else(|| panic!("no {what} in {findings:#?}"));
        (found["level"].as_str().unwrap().to_owned(), found["found"].as_str().unwrap().to_owned())
    }
}

/// First words of a row of the table.
const LEVELS: [&str; 3] = ["ok", "note", "warn"];

#[test]
fn the_table_names_what_every_machine_has() {
    let text = run(&mut sidelane("doctor")).well();
    // A row begins with a level, and the lines below it that belong to it do not.
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let rows: Vec<_> = rows.filter(|row| row.len() > 2 && LEVELS.contains(&row[0])).collect();
    for what in ["kernel", "cores", "memory", "/dev/shm", "libibverbs", "CUDA"] {
        let about = rows.iter().filter(|row| row[1].trim_end_matches(':') == what).count();
        assert!(about > 0, "no row of {what} in\n{text}");
    }
}

#[test]
fn json_findings_have_meaning_and_problems_have_advice() {
    let report: Value = serde_json::from_str(&run(&mut sidelane("doctor --json")).well()).unwrap();
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.len() >= 10);
    for finding in findings {
        assert!(finding["meaning"].as_str().is_some_and(|text| !text.is_empty()), "{finding}");
        assert_eq!(finding["advice"].is_null(), finding["level"] == "ok", "{finding}");
    }
}

#[test]
fn a_drivers_abilities_are_found_by_asking_it() {
    let found = fake_driver(&[
        ("SIDELANE_FAKE_CUDA_DEVICES", "3"),
        ("SIDELANE_FAKE_CUDA_PEERS", "0,1|2"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("CUDA_MODULE_LOADING", "EAGER"),
    ]);
    let (level, driver) = found("CUDA: driver");
    assert!(level == "note" && driver.starts_with("fake driver for CUDA 12.8 ("), "{driver}");
    assert!(found("GPU 2").1.contains("compute capability"));
    assert_eq!(found("CUDA: peers"), ("note".into(), "not 0-2, 1-2".into()));
    assert_eq!(found("CUDA: queues"), ("note".into(), "1".into()));
    assert_eq!(found("CUDA: kernel loading"), ("ok".into(), "eager".into()));
    assert_eq!(found("CUDA: flags"), ("ok".into(), "yes".into()));
    assert_eq!(found("CUDA: dma-buf"), ("note".into(), "no".into()));
}

#[test]
fn doctor_names_limits_of_old_driver_and_driver_without_gpu() {
    let found = fake_driver(&[("SIDELANE_FAKE_CUDA_DRIVER", "12040"), ("CUDA_MODULE_LOADING", "LAZY")]);
    assert_eq!(found("CUDA: device heap"), ("warn".into(), "refused".into()));
    assert_eq!(found("CUDA: batched copies"), ("note".into(), "none".into()));
    assert_eq!(found("CUDA: kernel loading"), ("note".into(), "lazy".into()));
    let (level, text) = fake_driver(&[("SIDELANE_FAKE_CUDA_DRIVER", "11080")])("CUDA: start");
    assert!(level == "warn" && text.contains("12.0") && text.contains("11.8"), "{text}");
    let (level, text) = fake_driver(&[("SIDELANE_FAKE_CUDA_DEVICES", "0")])("CUDA: start");
    assert!(level == "warn" && text.contains("cuInit failed with 100 (CUDA_ERROR_NO_DEVICE)"), "{text}");
}

#[test]
fn doctor_lists_a_misspelt_variable_and_succeeds() {
    let text = run(sidelane("doctor").env("SIDELANE_NETT", "tcp")).well();
    assert_words(&text, &["SIDELANE_NETT (SIDELANE_NET?)"]);
}

#[test]
fn a_library_that_is_no_driver_is_reported() {
    let text = run(sidelane("doctor").env("SIDELANE_CUDA_LIBRARY", "libc.so.6")).well();
    assert_words(&text, &["cuInit"]);
}

#[test]
fn doctor_of_nics_says_only_which_nic_each_rank_takes() {
    let report: Value = serde_json::from_str(&run(&mut sidelane("doctor --nics --json")).well()).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let names = findings.iter().map(|finding| finding["what"].as_str().unwrap());
    let wanted = |name: &str| name.starts_with("NIC of rank ") || name.ends_with(", choice");
    assert!(!findings.is_empty() && names.clone().all(wanted), "{:?}", names.collect::<Vec<_>>());
}
