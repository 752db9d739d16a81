//! The routing that `sidelane bench` measures, and its report of it; and every layout, mode and
//! type of rows.

use crate::program::{Ended, assert_words, run, sidelane};

/// A small measurement.
fn bench(options: &str) -> Ended {
    run(&mut sidelane(&format!("bench --ranks-per-node 2 --tokens 16 --hidden 64 --rounds 2 {options}")))
}

#[test]
fn without_options_the_recording_is_replayed_wherever_the_program_runs() {
    let ended = bench("");
    assert!(!ended.err.contains("routing is"), "{}", ended.err);
    assert_words(&ended.well(), &["routing   recorded, 64 experts, top-8", "bit-exact"]);
}

#[test]
fn routing_that_is_drawn_because_the_recording_does_not_fit_is_announced() {
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
fn every_layout_mode_and_type_of_rows_is_verified_there_and_back() {
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

#[test]
fn a_budget_that_is_too_small_is_refused_before_anything_starts() {
    bench("--mode budget --budget 0.5").refused(&["has room for all", "--on-overflow drop"]);
}

#[test]
fn a_lane_that_was_asked_for_and_cannot_be_had_is_an_error_that_says_what_is_missing() {
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
