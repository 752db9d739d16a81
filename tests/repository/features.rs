//! The table of features in docs/from-rust.md, which is `ep::Feature`, and the diffs that
//! CONTRIBUTING.md shows.

use sidelane::ep::{CallExecutor, Feature};
use sidelane::plan::{Overflow, ReceiveMode};

#[test]
fn documented_table_is_the_table_of_the_library() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/from-rust.md");
    let page = std::fs::read_to_string(page).unwrap();
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let mut lines = page.lines().skip_while(|line| !line.starts_with("| feature |"));
    let head = cells(lines.next().expect("the table is there"));
    let slots = ReceiveMode::Slots { rows: 1, overflow: Overflow::Error };
    let budget = ReceiveMode::Budget { rows: 1, overflow: Overflow::Error };
    let columns = [
        ("host-stepper", CallExecutor::HostStepper, ReceiveMode::Exact),
        ("enqueuer", CallExecutor::Enqueuer, ReceiveMode::Exact),
        ("constant-program, slots", CallExecutor::ConstantProgram, slots),
        ("constant-program, budget", CallExecutor::ConstantProgram, budget),
    ];
    assert_eq!(head[1..], columns.map(|(name, ..)| name.to_owned()));
    let rows: Vec<_> = lines.skip(1).take_while(|line| line.starts_with('|')).map(cells).collect();
    let served = |served| if served { "yes" } else { "no" };
    let expected: Vec<_> = Feature::ALL
        .into_iter()
        .map(|feature| {
            let cells = columns.map(|(_, executor, mode)| served(feature.is_served_in(executor, mode)));
            [feature.name()].into_iter().chain(cells).map(str::to_owned).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(rows, expected);
}

#[test]
fn diffs_in_contributing_are_lines_of_the_code() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let (mut in_diff, mut file, mut lines) = (false, String::new(), 0);
    let mut files = std::collections::BTreeSet::new();
    for line in page.lines() {
        match line.split_once(' ') {
            _ if line.starts_with("```") => {
                assert!(files.len() <= 4, "a diff has more than four files: {files:?}");
                files.clear();
                in_diff = line == "```diff";
            }
            Some(("#", rest)) if in_diff => {
                let path = rest.split(':').next().unwrap();
                files.insert(path.to_owned());
                file =
                    std::fs::read_to_string(root.join(path)).unwrap_or_else(|_| panic!("{path} is no file"));
            }
            _ => {
                if let Some(added) = line.strip_prefix('+').filter(|_| in_diff) {
                    assert!(file.lines().any(|code| code == added), "not a line of its file: {line}");
                    lines += 1;
                }
            }
        }
    }
    assert!(lines > 40, "the diffs were read: {lines} lines");
}
