//! `sidelane copy-engines` as a user sees it: a line for each way, files and refusals.

use std::process::{Command, Output};

use serde_json::Value;

fn engines(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    command.arg("copy-engines").args(line.split_whitespace()).current_dir(std::env::temp_dir());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The report of these conditions.
fn report(line: &str, file: &str) -> Value {
    let json = std::env::temp_dir().join(format!("sidelane-engines-{}-{file}.json", std::process::id()));
    let output = engines(&format!("{line} --json {}", json.display()));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    std::fs::remove_file(json).unwrap();
    report
}

fn most(report: &Value, way: &str, figure: &str) -> f64 {
    let ways = report["variants"].as_array().unwrap();
    let way = ways.iter().find(|found| found["name"] == way).unwrap_or_else(|| panic!("{way} in {ways:?}"));
    way["max"][figure].as_f64().unwrap()
}

#[test]
fn slots_of_eight_ranks_are_seven_copies_and_a_list() {
    let report = report("--nodes 1 --tokens 128 --experts 256 uniform", "slots");
    let figures = ["copies", "batches", "memory_ops", "memory_op_batches", "nic_bytes"];
    for way in ["slots: dispatch", "slots: combine"] {
        assert_eq!(figures.map(|figure| most(&report, way, figure)), [7.0, 1.0, 21.0, 1.0, 0.0], "{way}");
    }
    // A row of header, for ids and weights of 128 tokens; partial rows have none.
    assert_eq!(most(&report, "slots: dispatch", "bytes"), 7.0 * 129.0 * 7168.0 * 2.0);
    assert_eq!(most(&report, "slots: combine", "bytes"), 7.0 * 128.0 * 7168.0 * 2.0);
}

#[test]
fn rows_by_expert_are_a_copy_for_each_expert_and_rows_by_rank_one_for_each_rank() {
    let report = report("--nodes 1 --tokens 512 --experts 256 --hidden 64 uniform", "one-node");
    let figures = ["copies", "batches", "memory_ops"];
    let by_expert = figures.map(|figure| most(&report, "expert-major, direct", figure));
    assert_eq!(by_expert, [7.0 * 32.0, 1.0, 14.0]);
    let by_rank = figures.map(|figure| most(&report, "rank-major, direct", figure));
    assert_eq!(by_rank, [7.0, 1.0, 14.0]);
}

#[test]
fn spans_are_fewer_copies_of_the_same_bytes() {
    let report = report("--tokens 2048 --experts 256 --hidden 64 uniform", "spans");
    let [rows, spans] = ["rank-major, pxn, token order", "rank-major, pxn, relay order"];
    assert_eq!(most(&report, rows, "bytes"), most(&report, spans, "bytes"));
    assert_eq!(most(&report, rows, "nic_bytes"), most(&report, spans, "nic_bytes"));
    assert!(most(&report, rows, "copies") > 10.0 * most(&report, spans, "copies"));
}

#[test]
fn the_text_has_a_line_for_each_way_and_says_what_was_not_measured() {
    let output = engines("--tokens 64");
    let told = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for words in ["16 on 2 nodes (8 + 8)", "rank-major, pxn, relay order", "not measured", "NICs"] {
        assert!(told.contains(words), "{words:?} in\n{told}");
    }
    assert!(!told.contains("slots"), "slots are for one node:\n{told}");
}

#[test]
fn what_makes_no_sense_is_refused_as_a_wrong_command_line() {
    for (line, said) in [
        ("--tokens 0", "--tokens"),
        ("--copy-gbps 0", "above 0"),
        ("--hidden 7 --nodes 1", "a multiple of 16"),
        ("/nowhere/routing.jsonl", "/nowhere/routing.jsonl"),
    ] {
        let output = engines(line);
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(text(&output.stderr).contains(said), "{line}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty());
    }
}
