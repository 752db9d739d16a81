//! `sidelane collectives`: between real processes, verified, on one node and on two; baselines
//! compute the same bits.

use serde_json::Value;

use crate::program::{Ended, run_with_report, sidelane};

fn run(options: &str) -> (Ended, Value) {
    run_with_report(&mut sidelane(&format!("collectives {options}")))
}

#[test]
fn every_collective_is_right_across_processes_on_1_and_2_nodes() {
    for shape in ["--ranks-per-node=3", "--ranks-per-node=2,1", "--ranks-per-node=2,1 --net=tcp"] {
        let (ended, report) = run(&format!("{shape} --sizes=48,3145728 --rounds=2"));
        let told = ended.well();
        assert_eq!(report["verified"], true, "{told}");
        let runs = report["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 12);
        assert!(runs.iter().all(|run| run["rounds"] == 2 && run["p50_us"].as_f64() > Some(0.0)), "{told}");
    }
}

/// Without `SIDELANE_NEED_BASELINES` only those that are there are asked.
#[test]
fn others_that_are_installed_have_the_same_bits() {
    let needed = std::env::var_os("SIDELANE_NEED_BASELINES").is_some();
    let (ended, report) = run("--ranks-per-node=2 --sizes=4K,512K --rounds=3 --baselines");
    let told = ended.well();
    let absent = report["unavailable"].as_array().unwrap().len();
    assert!(absent == 0 || !needed, "{told}");
    for run in report["runs"].as_array().unwrap() {
        let baselines = run["baselines"].as_array().unwrap();
        assert_eq!(baselines.len(), 2 - absent, "{told}");
        assert!(baselines.iter().all(|one| one["bitwise_equal"] == true), "{told}");
    }
}

#[test]
fn sizes_without_equal_parts_are_refused_before_start() {
    run("--ranks-per-node=3 --sizes=4K").0.refused(&["equal parts"]);
}
