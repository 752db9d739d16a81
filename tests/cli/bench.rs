//! The routing that `sidelane bench` measures, and its report of it; and every layout, mode and
//! type of rows.

use serde_json::{Value, json};

use crate::program::{Ended, assert_words, read, report, run, run_with_report, sidelane};

/// A small measurement.
fn bench(options: &str) -> Ended {
    run(&mut sidelane(&format!("bench --ranks-per-node 2 --tokens 16 --hidden 64 --rounds 2 {options}")))
}

#[test]
fn bench_without_options_replays_recording_wherever_it_runs() {
    let ended = bench("");
    assert_eq!(ended.err, "sidelane: all ranks met; 2 rounds to time\n");
    assert_words(&ended.well(), &["routing   recorded, 64 experts, top-8", "bit-exact"]);
}

#[test]
fn drawn_routing_is_announced_if_recording_does_not_fit() {
    let ended = bench("--experts 16 --top-k 2");
    assert_words(&ended.err, &["routing is zipf:1.0: the recorded one has 64 experts, top-8"]);
    assert_words(&ended.well(), &["routing   zipf:1.0, 16 experts, top-2"]);
}

#[test]
fn routing_that_was_asked_for_is_not_announced() {
    let ended = bench("--experts 16 --top-k 2 --routing uniform");
    assert!(!ended.err.contains("routing is"), "{}", ended.err);
    assert_words(&ended.well(), &["routing   uniform, 16 experts, top-2"]);
}

#[test]
fn bench_verifies_every_layout_mode_and_row_type_both_ways() {
    const DROP: &str = "--mode budget --budget 0.5 --on-overflow drop";
    for options in [
        "--layout rank-major",
        "--dtype fp8",
        DROP,
        "--layout rank-major --dtype fp8 --mode slots --slots 3 --on-overflow drop",
    ] {
        let out = bench(&format!("{options} --nodes 2 --backward")).well();
        assert!(out.contains("verified: ") && out.contains("combine backward"), "{options}: {out}");
        let dropped = !out.contains(" 0 choices dropped") && out.contains(" choices dropped");
        assert_eq!(dropped, options.contains("drop"), "{options}: {out}");
    }
}

/// Chains are four of 129 pairs, of which 17 do not count.
const COUNTED: usize = 4 * (129 - 17);

#[test]
fn chains_end_with_exact_bits_of_their_pairs_on_1_and_2_nodes() {
    for options in [
        "--nodes 1",
        "--nodes 1 --layout rank-major --dtype f32 --mode slots --slots 3 --on-overflow drop",
        "--nodes 2 --sum-order node --partial-dtype bf16 --mode budget --budget 0.5 --on-overflow drop",
        "--nodes 2 --layout rank-major --coalesce-relays --backward",
    ] {
        let out = bench(&format!("{options} --chained")).well();
        let words = ["chained: ", "a pair, p50 ", "4 chains of 129 pairs, ends bit-exact", "bit-exact"];
        assert_words(&out, &words);
    }
}

#[test]
fn rows_are_compared_before_and_after_chains_and_never_within() {
    for (nodes, ranks) in [(1, 2), (2, 4)] {
        let line = format!("bench --nodes {nodes} --ranks-per-node 2 --tokens 16 --hidden 64 --rounds 2");
        let rows = |options: &str| report(&format!("{line} {options}"))["rows_verified"].as_u64().unwrap();
        let (ends, again) = (4 * 16 * ranks, 16 * 8 * ranks + 16 * ranks);
        assert_eq!(rows("--chained") - rows(""), ends + again, "{nodes} nodes");
    }
}

#[test]
fn the_report_of_chains_is_theirs_and_a_case_of_collectivex() {
    let folder = tempfile::tempdir().unwrap();
    for (nodes, scope, transport) in [(1, "scale-up", "shm"), (2, "scale-out", "shm-loopback")] {
        let path = folder.path().join(format!("case-{nodes}.json"));
        let line =
            format!("bench --nodes {nodes} --ranks-per-node 2 --tokens 16 --hidden 64 --rounds 2 --chained");
        let (ended, report) = run_with_report(sidelane(&line).arg("--collectivex").arg(&path));
        ended.well();
        let (chain, case) = (&report["chain"], read(&path));
        assert_eq!(report["config"]["chained"], true);
        assert_eq!(
            [&chain["verified"], &chain["pairs"], &chain["fill"]],
            [&json!(true), &json!(129), &json!(17)]
        );
        // In each pair the shortest dispatch and combine of a rank are parts of longer pairs.
        let us = |figure: &str, key: &str| chain[figure][key].as_f64().unwrap();
        for part in ["dispatch_least", "combine_least"] {
            assert!((f64::MIN_POSITIVE..=us("pair", "p50_us")).contains(&us(part, "p50_us")), "{chain}");
        }
        assert!(us("period", "min_us") > 0.0 && us("pair", "p50_us") <= us("pair", "p99_us"), "{chain}");

        assert_eq!([&case["version"], &case["record_type"]], [&json!(1), &json!("case-attempt")]);
        assert_eq!(case["outcome"], json!({ "reasons": [], "status": "success" }));
        assert_eq!([&case["topology"]["scope"], &case["topology"]["transport"]], [scope, transport]);
        let row = &case["measurement"]["rows"][0];
        let period = &row["components"]["pair_period"];
        assert_eq!([&period["origin"], &period["sample_count"]], [&json!("chained-median"), &json!(COUNTED)]);
        let percentiles = ["p50", "p90", "p95", "p99"].map(|of| period["percentiles_us"][of].clone());
        assert_eq!(percentiles, ["p50_us", "p90_us", "p95_us", "p99_us"].map(|of| chain["pair"][of].clone()));
        assert_eq!(row["components"]["roundtrip"]["percentiles_us"], Value::Null);
        assert_eq!([&row["tokens_per_rank"], &row["global_tokens"]], [&json!(16), &json!(16 * 2 * nodes)]);
        assert_eq!(
            [&row["correctness"]["passed"], &row["correctness"]["chain_last_output_passed"]],
            [true, true]
        );
    }
    let plain = report("bench --nodes 1 --ranks-per-node 2 --tokens 16 --hidden 64 --rounds 2");
    assert_eq!((&plain["chain"], &plain["config"]["chained"]), (&Value::Null, &json!(false)));
}

#[test]
fn a_budget_that_is_too_small_is_refused_before_anything_starts() {
    bench("--mode budget --budget 0.5").refused(&["has room for all", "--on-overflow drop"]);
}

#[test]
fn requested_lane_that_is_unavailable_is_error_with_reason() {
    let library = "cannot load /nowhere/libibverbs.so";
    for (net, name, value, words) in [
        ("verbs", "SIDELANE_IBVERBS_LIBRARY", "/nowhere/libibverbs.so", &[library][..]),
        ("verbs", "SIDELANE_VERBS_CHUNK", "banana", &["SIDELANE_VERBS_CHUNK", "banana"]),
        ("tcp", "SIDELANE_TCP_ADDRESS", "no-such-interface", &["SIDELANE_TCP_ADDRESS"]),
    ] {
        let line = "bench --nodes 2 --ranks-per-node 1 --tokens 16 --hidden 64 --rounds 2 --net";
        let ended = run(sidelane(line).arg(net).env(name, value));
        assert_ne!(ended.code, Some(0), "{net}");
        assert_words(&ended.err, words);
    }
}
