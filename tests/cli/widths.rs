//! Reports of all commands fit into the terminal, however narrow it is, and into a pipe.

use std::process::Output;

use crate::program;

/// A command line for each command that reports. Those that need a GPU have no driver here.
const COMMANDS: [&str; 13] = [
    "bench --nodes 2 --ranks-per-node 1 --tokens 16 --hidden 64 --rounds 2 --sum-order node",
    "collectives --ranks-per-node 2 --sizes 64 --rounds 2",
    "conformance --place host --only gradients",
    "copy-engines --nodes 2 --ranks-per-node 2 --tokens 64",
    "doctor",
    "layer --tokens 48 --hidden 64 --ffn 32 --experts 6 --top-k 2 --token-chunks 5 --rounds 2 --backward",
    "plan --model olmoe-1b-7b --devices 16 --tokens 1M",
    "plan-bench --ranks 8,16 --tokens 64 --rounds 3",
    "put-bench put-lat --sizes 8,4K --iterations 20",
    "put-bench put-bw --nodes 3 --pairs all --sizes 8 --iterations 20",
    "routing",
    "simulate --nodes 2 --ranks-per-node 4 --tokens 64",
    "trace --ranks-per-node 2,1 --tokens 8 --hidden 64 --experts 6 --top-k 2 --routing uniform",
];

fn sidelane(line: &str, columns: Option<u32>) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program::sidelane(line);
    command.current_dir(folder.path()).env_remove("COLUMNS");
    if line.starts_with("trace") {
        command.args(["--out", "t.json"]);
    }
    command.envs(columns.map(|columns| ("COLUMNS", columns.to_string()))).output().unwrap()
}

fn lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn no_line_of_a_report_is_wider_than_terminal_or_pipe() {
    for line in COMMANDS {
        for (columns, width) in [(None, 80), (Some(60), 60), (Some(40), 40)] {
            let output = sidelane(line, columns);
            let told = lines(&output);
            assert!(output.status.success() && told.len() > 3, "{line}: {output:?}");
            // A command to copy is not broken.
            let wide = told.iter().filter(|told| !told.starts_with("As root: "));
            let wide = wide.filter(|told| told.chars().count() > width);
            assert_eq!(wide.count(), 0, "{line}, {width} columns:\n{}", told.join("\n"));
        }
    }
}

#[test]
fn every_figure_of_a_wide_table_is_in_a_narrow_one() {
    let line = "simulate --nodes 2 --ranks-per-node 4 --tokens 64";
    let words = |columns| {
        let told = lines(&sidelane(line, columns)).join(" ");
        told.split_whitespace().map(str::to_owned).collect::<std::collections::BTreeSet<_>>()
    };
    let (wide, narrow) = (words(Some(300)), words(Some(60)));
    let lost: Vec<_> = wide.difference(&narrow).filter(|word| !word.contains('─')).collect();
    assert!(lost.is_empty(), "{lost:?}");
}
