//! Where results cannot be written: found before anything is measured.

use crate::program::{run, sidelane};

#[test]
fn unwritable_output_file_is_named_before_measurement() {
    let lines = [
        "bench --ranks-per-node 1 --json",
        "bench --ranks-per-node 1 --trace-out",
        "trace --ranks-per-node 1 --out t.json --svg",
        "trace --ranks-per-node 1 --out",
        "put-bench signal --json",
        "put-bench put-lat --svg",
        "collectives --ranks-per-node 1 --json",
        "layer --ranks-per-node 1 --json",
        "layer --ranks-per-node 1 --trace-out",
        "layer --ranks-per-node 1 --svg",
        "plan --json",
        "plan --svg",
        "plan-bench --svg",
        "routing --json",
        "routing --svg",
        "simulate --json",
        "simulate --svg",
        "simulate --calibrate",
        "copy-engines --json",
    ];
    for line in lines {
        let ended = run(sidelane(line).arg("/nowhere/file"));
        assert_eq!((ended.code, &ended.out[..]), (Some(1), ""), "{line}: {}", ended.err);
        assert!(
            ended.err.contains("cannot write \"/nowhere/file\"") && !ended.err.contains("rank"),
            "{line}: {}",
            ended.err
        );
    }
}

/// A line that is refused as soon as the layer is resolved, which is before experts are timed.
#[test]
fn files_of_a_layer_are_claimed_before_it_is_resolved() {
    for option in ["--json", "--trace-out", "--svg"] {
        let ended = run(&mut sidelane(&format!("layer --experts 3 {option} /nowhere/file")));
        assert!(ended.code == Some(1) && ended.err.contains("cannot write"), "{option}: {}", ended.err);
    }
}

#[test]
fn json_alone_can_be_written_to_standard_output() {
    let ended = run(&mut sidelane("copy-engines --tokens 8 --json -"));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    assert!(report["schema"].is_u64(), "{report}");

    let ended = run(&mut sidelane("routing --json - --svg -"));
    assert_eq!((ended.code, &ended.out[..]), (Some(2), ""), "{}", ended.err);
    assert!(ended.err.contains("- is no file"), "{}", ended.err);
}

#[test]
fn one_path_for_two_files_is_refused() {
    let name = format!("sidelane-twice-{}", std::process::id());
    for line in [
        "routing --json FILE --svg FILE",
        "routing --json FILE --svg ./FILE",
        "plan --json FILE --svg FILE",
        "simulate --json FILE --svg FILE",
        "bench --json FILE --trace-out FILE",
        "layer --json FILE --svg FILE",
        "trace --out FILE --svg FILE",
        "put-bench put-lat --json FILE --svg FILE",
    ] {
        let line = line.replace("FILE", &name);
        run(&mut sidelane(&line)).refused(&[&name, "is given for two files"]);
        assert!(!std::env::temp_dir().join(&name).exists(), "{line}");
    }
}

#[test]
fn asking_whether_a_file_can_be_written_leaves_none_behind() {
    let file = std::env::temp_dir().join(format!("sidelane-files-{}.json", std::process::id()));
    let ended = run(sidelane("copy-engines --top-k 9999 --json").arg(&file));
    assert!(ended.code != Some(0) && !file.exists());
}
