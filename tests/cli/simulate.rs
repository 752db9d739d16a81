//! `sidelane simulate` and `sidelane plan-bench` as a user sees them: lines, files and refusals.

use serde_json::Value;

use crate::program::{assert_words, report, run, sidelane};

fn ways(report: &Value) -> Vec<&str> {
    report["groups"][0]["variants"]
        .as_array()
        .unwrap()
        .iter()
        .map(|way| way["name"].as_str().unwrap())
        .collect()
}

const SMALL: &str = "simulate --nodes 2 --ranks-per-node 2 --tokens 32 --hidden 128";

#[test]
fn one_number_of_ranks_is_one_node_unless_nodes_are_given() {
    let nodes = |line: &str| report(line)["config"]["nodes"].as_u64();
    assert_eq!(nodes("simulate --ranks-per-node 2 --tokens 8 --hidden 128"), Some(1));
    assert_eq!(nodes(SMALL), Some(2));
}

#[test]
fn simulate_compares_open_options_and_keeps_given_ones() {
    let all = report(SMALL);
    let found = ways(&all);
    assert_eq!(found.len(), 12);
    for way in
        ["expert-major, direct", "rank-major, pxn, rank sums in f32", "rank-major, pxn, node sums in bf16"]
    {
        assert!(found.contains(&way), "{way} in {found:?}");
    }
    let one = "--route pxn --sum-order node --partial-dtype bf16 --layout rank-major --relay-parts 1,4";
    let some = report(&format!("{SMALL} {one}"));
    assert_eq!(
        ways(&some),
        ["rank-major, pxn, node sums in bf16, 1 parts", "rank-major, pxn, node sums in bf16, 4 parts"]
    );
}

/// A file that describes the machine of a report.
fn hardware(report: &Value) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, report["hardware"].to_string()).unwrap();
    file
}

#[test]
fn simulate_reads_machine_file_and_faster_nics_take_less_time() {
    let mut known = report(SMALL);
    known["hardware"]["nic"]["rate"] = 1_000.into();
    let file = hardware(&known);
    let slow = report(&format!("{SMALL} --hardware {}", file.path().display()));
    let time = |report: &Value| report["groups"][0]["variants"][0]["dispatch"]["ns"].as_u64().unwrap();
    assert!(time(&slow) > time(&known));
}

#[test]
fn machine_file_with_zero_divisor_is_refused_as_wrong_usage() {
    let mut known = report(SMALL);
    known["hardware"]["nic"]["message_bytes"] = 0.into();
    let file = hardware(&known);
    let line = format!("{SMALL} --hardware {}", file.path().display());
    run(&mut sidelane(&line)).refused(&["nic.message_bytes = 0"]);
}

#[test]
fn groups_beyond_64_ranks_simulate_one_node_and_are_in_picture() {
    let svg = tempfile::NamedTempFile::new().unwrap();
    let path = svg.path().display();
    let report = report(&format!("{SMALL} --route direct --layout rank-major --svg {path} --max-ranks 256"));
    let groups = report["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 8, "1 to 128 nodes");
    let last = &groups[7]["variants"][0]["dispatch"];
    assert_eq!((groups[7]["ranks"].as_u64(), last["simulated_ranks"].as_u64()), (Some(256), Some(2)));
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
}

#[test]
fn slots_are_seven_copies_and_phases_are_told() {
    let told = run(&mut sidelane("simulate --mode slots --nodes 1 --tokens 128")).well();
    assert!(!told.contains("routing"), "slots are full for any routing:\n{told}");
    let words = ["slots: dispatch", "slots: combine", "pack ", "move ", "not measured", "8 on one node"];
    assert_words(&told, &words);
}

#[test]
fn plan_bench_has_a_line_for_each_group_and_route() {
    let told = run(&mut sidelane("plan-bench --ranks 8,16 --tokens 64 --rounds 3")).well();
    assert_eq!(
        told.lines().filter(|line| line.contains(" direct ") || line.contains(" pxn ")).count(),
        4,
        "{told}"
    );
}

#[test]
fn chunked_layer_takes_at_most_sequence_at_least_longer_half() {
    let large = "simulate --nodes 2 --ranks-per-node 2 --tokens 2048 --hidden 4096 --layout rank-major --route direct";
    let report = report(&format!("{large} --token-chunks 1,4 --tflops 300"));
    let ways = report["layer"]["variants"].as_array().unwrap();
    let passes: Vec<_> = ways.iter().map(|way| way["pass"].as_str().unwrap()).collect();
    assert_eq!(passes, ["forward", "backward", "forward", "backward"]);
    for way in ways {
        let of = |key: &str| way[key].as_u64().unwrap();
        assert!(of("overlapped_ns") <= of("sequential_ns"), "{way}");
        assert!(of("overlapped_ns") >= of("experts_ns").max(of("transfers_ns")), "{way}");
    }
    // In one chunk only the shared expert overlaps with a transfer.
    assert!(ways[0]["hidden_share"].as_f64() < ways[2]["hidden_share"].as_f64(), "{ways:?}");
}

#[test]
fn more_chunks_of_tensor_parallel_layers_hide_no_less() {
    let node = "simulate --nodes 1 --ranks-per-node 4 --tokens 512 --model mixtral-8x7b --token-chunks 1,4";
    let report = report(&format!("{node} --tensor-ffn 16384"));
    let passes = report["tensor"]["passes"].as_array().unwrap();
    let names: Vec<_> = passes.iter().map(|pass| pass["pass"].as_str().unwrap()).collect();
    let of_each = ["column forward", "column backward", "row forward", "row backward"];
    assert_eq!(names, [of_each, of_each].concat());
    for (whole, cut) in passes[..4].iter().zip(&passes[4..]) {
        assert!(whole["hidden_share"].as_f64() <= cut["hidden_share"].as_f64(), "{whole} {cut}");
    }
}
