//! The routing that `sidelane bench` measures, and its report of it; and every layout, mode and
//! type of rows.

use std::process::Command;

/// Standard output and standard error of a small measurement, far from the repository.
fn bench(options: &[&str]) -> (String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_sidelane"))
        .args(["bench", "--ranks-per-node", "2", "--tokens", "16", "--hidden", "64", "--rounds", "2"])
        .args(options)
        .current_dir(std::env::temp_dir())
        .output()
        .unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "{err}");
    (out, err)
}

#[test]
fn without_options_the_recording_is_replayed_wherever_the_program_runs() {
    let (out, err) = bench(&[]);
    assert!(out.contains("routing   recorded, 64 experts, top-8"), "{out}");
    assert!(out.contains("bit-exact"), "{out}");
    assert!(!err.contains("routing is"), "{err}");
}

#[test]
fn routing_that_is_drawn_because_the_recording_does_not_fit_is_announced() {
    let (out, err) = bench(&["--experts", "16", "--top-k", "2"]);
    assert!(out.contains("routing   zipf:1.0, 16 experts, top-2"), "{out}");
    assert!(err.contains("routing is zipf:1.0: the recorded one has 64 experts, top-8"), "{err}");
}

#[test]
fn routing_that_was_asked_for_is_not_announced() {
    let (out, err) = bench(&["--experts", "16", "--top-k", "2", "--routing", "uniform"]);
    assert!(out.contains("routing   uniform, 16 experts, top-2"), "{out}");
    assert!(!err.contains("routing is"), "{err}");
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
        let mut words: Vec<&str> = options.split(' ').collect();
        words.extend(["--nodes", "2", "--backward"]);
        let (out, _) = bench(&words);
        assert!(out.contains("verified: ") && out.contains("combine backward"), "{options}: {out}");
        let dropped = !out.contains(" 0 choices dropped") && out.contains(" choices dropped");
        assert_eq!(dropped, options.contains("drop"), "{options}: {out}");
    }
}

#[test]
fn a_budget_that_is_too_small_is_refused_before_anything_starts() {
    let output = Command::new(env!("CARGO_BIN_EXE_sidelane"))
        .args(["bench", "--tokens", "16", "--hidden", "64", "--mode", "budget", "--budget", "0.5"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("has room for all") && told.contains("--on-overflow drop"), "{told}");
}

#[test]
fn a_lane_that_was_asked_for_and_cannot_be_had_is_an_error_that_says_what_is_missing() {
    let run = |net: &str, name: &str, value: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_sidelane"))
            .args(["bench", "--nodes", "2", "--ranks-per-node", "1", "--tokens", "16", "--hidden", "64"])
            .args(["--rounds", "2", "--net", net])
            .env(name, value)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let missing = run("verbs", "SIDELANE_IBVERBS_LIBRARY", "/nowhere/libibverbs.so");
    assert!(missing.contains("cannot load /nowhere/libibverbs.so"), "{missing}");
    let wrong = run("verbs", "SIDELANE_VERBS_CHUNK", "banana");
    assert!(wrong.contains("SIDELANE_VERBS_CHUNK") && wrong.contains("banana"), "{wrong}");
    let nowhere = run("tcp", "SIDELANE_TCP_ADDRESS", "no-such-interface");
    assert!(nowhere.contains("SIDELANE_TCP_ADDRESS"), "{nowhere}");
}
