//! `sidelane simulate` and `sidelane plan-bench` as a user sees them: lines, files and refusals.

use std::process::{Command, Output};

use serde_json::Value;

fn sidelane(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    command.args(line.split_whitespace()).current_dir(std::env::temp_dir()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn file(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("sidelane-simulate-{}-{name}", std::process::id()))
}

/// The report of these options.
fn report(line: &str, name: &str) -> Value {
    let json = file(name);
    let output = sidelane(&format!("simulate {line} --json {}", json.display()));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    std::fs::remove_file(json).unwrap();
    report
}

fn ways(report: &Value) -> Vec<&str> {
    report["groups"][0]["variants"]
        .as_array()
        .unwrap()
        .iter()
        .map(|way| way["name"].as_str().unwrap())
        .collect()
}

const SMALL: &str = "--nodes 2 --ranks-per-node 2 --tokens 32 --hidden 128";

#[test]
fn what_is_left_open_is_compared_and_what_is_asked_for_is_not() {
    let all = report(SMALL, "all");
    let found = ways(&all);
    assert_eq!(found.len(), 12);
    for way in
        ["expert-major, direct", "rank-major, pxn, rank sums in f32", "rank-major, pxn, node sums in bf16"]
    {
        assert!(found.contains(&way), "{way} in {found:?}");
    }
    let one = "--route pxn --sum-order node --partial-dtype bf16 --layout rank-major --relay-parts 1,4";
    let some = report(&format!("{SMALL} {one}"), "one");
    assert_eq!(
        ways(&some),
        ["rank-major, pxn, node sums in bf16, 1 parts", "rank-major, pxn, node sums in bf16"]
    );
}

#[test]
fn a_machine_may_be_described_by_a_file_and_faster_cards_take_less_time() {
    let mut known = report(SMALL, "known");
    let path = file("hardware.json");
    known["hardware"]["nic"]["rate"] = 1_000.into();
    std::fs::write(&path, known["hardware"].to_string()).unwrap();
    let slow = report(&format!("{SMALL} --hardware {}", path.display()), "slow");
    std::fs::remove_file(path).unwrap();
    let time = |report: &Value| report["groups"][0]["variants"][0]["dispatch"]["ns"].as_u64().unwrap();
    assert!(time(&slow) > time(&known));
}

#[test]
fn a_machine_that_would_divide_by_zero_is_refused_as_a_wrong_command_line() {
    let mut known = report(SMALL, "whole");
    let path = file("nothing.json");
    known["hardware"]["nic"]["message_bytes"] = 0.into();
    std::fs::write(&path, known["hardware"].to_string()).unwrap();
    let output = sidelane(&format!("simulate {SMALL} --hardware {}", path.display()));
    std::fs::remove_file(path).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("nic.message_bytes = 0"), "{}", text(&output.stderr));
}

#[test]
fn groups_of_more_than_64_ranks_are_one_node_for_all_and_the_picture_has_them() {
    let svg = file("picture.svg");
    let line = format!("{SMALL} --route direct --layout rank-major --svg {} --max-ranks 256", svg.display());
    let report = report(&line, "large");
    let groups = report["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 8, "1 to 128 nodes");
    let last = &groups[7]["variants"][0]["dispatch"];
    assert_eq!((groups[7]["ranks"].as_u64(), last["simulated_ranks"].as_u64()), (Some(256), Some(2)));
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    std::fs::remove_file(svg).unwrap();
}

#[test]
fn slots_are_seven_copies_and_phases_are_told() {
    let output = sidelane("simulate --mode slots --nodes 1 --tokens 128");
    let told = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!told.contains("routing"), "slots are full whatever the routing:\n{told}");
    for words in ["slots: dispatch", "slots: combine", "pack ", "move ", "not measured", "8 on one node"] {
        assert!(told.contains(words), "{words:?} in\n{told}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_as_a_wrong_command_line() {
    for (line, said) in [
        ("simulate --nodes 0", "--nodes"),
        ("simulate --nodes 4096", "4096"),
        ("simulate --experts 0", "--experts"),
        ("simulate --experts 2000000", "--experts"),
        ("simulate --hardware abacus", "h100-cx7"),
        ("simulate --mode slots", "--nodes 1"),
        ("simulate --mode slots --nodes 1 --svg unwritten.svg", "--svg"),
        ("simulate --mode slots --nodes 1 --layout rank-major", "--layout"),
        ("simulate --mode slots --nodes 1 --metadata-with rows", "--metadata-with"),
        ("simulate --mode slots --nodes 1 --routing uniform", "--routing"),
        ("simulate --hidden 7", "a multiple of 16"),
        ("simulate --route relay", "pxn"),
        ("simulate --model gpt", "deepseek_v3"),
        ("simulate --relay-parts 0", "--relay-parts"),
        ("simulate --tflops 300", "--token-chunks"),
        ("simulate --tokens 16 --token-chunks 1,17", "--token-chunks"),
        ("simulate --nodes 1 --partial-dtype f32", "--partial-dtype"),
        ("simulate --sum-order expert --partial-dtype bf16", "--partial-dtype"),
        ("simulate --route direct --relay-parts 4", "--relay-parts"),
        ("simulate --tokens 1048576 --experts 16384", "--tokens x --experts"),
        ("simulate --tokens 1048576 --top-k 8 --nodes 512 --all-ranks", "--top-k of all ranks"),
        ("plan-bench --ranks 12", "--ranks 12"),
        ("plan-bench --top-k 300", "--top-k"),
    ] {
        let output = sidelane(line);
        assert_eq!(output.status.code(), Some(2), "{line}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(said), "{line}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn plan_bench_has_a_line_for_each_group_and_route() {
    let output = sidelane("plan-bench --ranks 8,16 --tokens 64 --rounds 3");
    let told = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(
        told.lines().filter(|line| line.contains(" direct ") || line.contains(" pxn ")).count(),
        4,
        "{told}"
    );
}

#[test]
fn a_layer_in_chunks_takes_less_time_than_in_turn_and_no_less_than_its_longer_half() {
    let large = "--nodes 2 --ranks-per-node 2 --tokens 2048 --hidden 4096 --layout rank-major --route direct";
    let report = report(&format!("{large} --token-chunks 1,4 --tflops 300"), "layer");
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
fn cores_that_copy_are_no_machine_for_chunks() {
    let output = sidelane("simulate --ranks-per-node 2 --tokens 32 --mode slots --nodes 1 --token-chunks 2");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("whose copies take no core"), "{}", text(&output.stderr));
}
