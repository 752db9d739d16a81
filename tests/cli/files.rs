//! Where results cannot be written: found before anything is measured.

use std::process::Command;

#[test]
fn a_file_that_cannot_be_written_is_named_before_anything_is_measured() {
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
        "plan-bench --svg",
        "routing --json",
        "routing --svg",
        "simulate --json",
        "simulate --svg",
        "simulate --calibrate",
        "copy-engines --json",
    ];
    for line in lines {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
        let ended = command.args(line.split_whitespace()).arg("/nowhere/file").output().unwrap();
        let (said, told) = (String::from_utf8_lossy(&ended.stderr), String::from_utf8_lossy(&ended.stdout));
        assert_eq!(ended.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains("/nowhere/file") && !said.contains("rank"), "{line}: {said}");
        assert_eq!(told, "", "{line}");
    }
}

/// A line that is refused as soon as the layer is resolved, which is before experts are timed.
#[test]
fn files_of_a_layer_are_claimed_before_it_is_resolved() {
    for option in ["--json", "--trace-out", "--svg"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
        let ended = command.args(["layer", "--experts", "3", option, "/nowhere/file"]).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(1) && said.contains("cannot write"), "{option}: {said}");
    }
}

#[test]
fn one_path_for_two_files_is_refused() {
    let name = format!("sidelane-twice-{}", std::process::id());
    for line in [
        "routing --json FILE --svg FILE",
        "routing --json FILE --svg ./FILE",
        "simulate --json FILE --svg FILE",
        "bench --json FILE --trace-out FILE",
        "layer --json FILE --svg FILE",
        "trace --out FILE --svg FILE",
        "put-bench put-lat --json FILE --svg FILE",
    ] {
        let line = line.replace("FILE", &name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
        let command = command.args(line.split_whitespace()).current_dir(std::env::temp_dir());
        let ended = command.output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(2), "{line}: {said}");
        assert!(said.contains(&name) && said.contains("is given for two files"), "{line}: {said}");
        assert!(!std::env::temp_dir().join(&name).exists(), "{line}");
    }
}

#[test]
fn asking_whether_a_file_can_be_written_leaves_none_behind() {
    let file = std::env::temp_dir().join(format!("sidelane-files-{}.json", std::process::id()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    let ended = command.args(["copy-engines", "--top-k", "9999", "--json"]).arg(&file).output().unwrap();
    assert!(!ended.status.success() && !file.exists());
}
