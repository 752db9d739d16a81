//! `sidelane copy-engines` as a user sees it: a line for each way, files and refusals.

use serde_json::Value;

use crate::program::{self, assert_words, run, sidelane};

fn report(line: &str) -> Value {
    program::report(&format!("copy-engines {line}"))
}

fn most(report: &Value, way: &str, figure: &str) -> f64 {
    let ways = report["variants"].as_array().unwrap();
    let way = ways.iter().find(|found| found["name"] == way).unwrap_or_else(|| panic!("{way} in {ways:?}"));
    way["max"][figure].as_f64().unwrap()
}

#[test]
fn slots_of_eight_ranks_are_seven_copies_and_a_list() {
    let report = report("--nodes 1 --tokens 128 --experts 256 uniform");
    let figures = ["copies", "batches", "memory_ops", "memory_op_batches", "nic_bytes"];
    for way in ["slots: dispatch", "slots: combine"] {
        assert_eq!(figures.map(|figure| most(&report, way, figure)), [7.0, 1.0, 21.0, 1.0, 0.0], "{way}");
    }
    // A row of header, for ids and weights of 128 tokens; partial rows have none.
    assert_eq!(most(&report, "slots: dispatch", "bytes"), 7.0 * 129.0 * 7168.0 * 2.0);
    assert_eq!(most(&report, "slots: combine", "bytes"), 7.0 * 128.0 * 7168.0 * 2.0);
}

#[test]
fn expert_major_rows_copy_per_expert_rank_major_per_rank() {
    let report = report("--nodes 1 --tokens 512 --experts 256 --hidden 64 uniform");
    let figures = ["copies", "batches", "memory_ops"];
    let by_expert = figures.map(|figure| most(&report, "expert-major, direct", figure));
    // 16, 32, 64 and 112 copies.
    assert_eq!(by_expert, [7.0 * 32.0, 4.0, 14.0]);
    let by_rank = figures.map(|figure| most(&report, "rank-major, direct", figure));
    assert_eq!(by_rank, [7.0, 1.0, 14.0]);
}

#[test]
fn spans_are_fewer_copies_of_the_same_bytes() {
    let report = report("--tokens 2048 --experts 256 --hidden 64 uniform");
    let [rows, spans] = ["rank-major, pxn, token order", "rank-major, pxn, relay order"];
    assert_eq!(most(&report, rows, "bytes"), most(&report, spans, "bytes"));
    assert_eq!(most(&report, rows, "nic_bytes"), most(&report, spans, "nic_bytes"));
    assert!(most(&report, rows, "copies") > 10.0 * most(&report, spans, "copies"));
}

#[test]
fn copy_engines_text_lists_each_way_and_names_unmeasured_parts() {
    let told = run(&mut sidelane("copy-engines --tokens 64")).well();
    assert_words(&told, &["16 on 2 nodes (8 + 8)", "rank-major, pxn, relay order", "not measured", "NICs"]);
    assert!(!told.contains("slots"), "slots are for one node:\n{told}");
}
