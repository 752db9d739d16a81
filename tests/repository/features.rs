//! The table of features in docs/from-rust.md, which is `ep::Feature`; the few files that
//! distinguish layouts and orders; and the diffs that CONTRIBUTING.md shows.

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

/// Lines of library code in a file, without its tests.
fn code(path: &std::path::Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Files of the library whose code has one of these words.
fn files_with(words: &[&str]) -> Vec<String> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut folders, mut named) = (vec![root.join("src"), root.join("crates/core/src")], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            let is_test = name.ends_with("tests.rs") || name.contains("/tests/");
            match path.is_dir() {
                true => folders.push(path),
                false if name.ends_with(".rs") && !is_test => {
                    let code = code(&path);
                    if words.iter().any(|word| code.contains(word)) {
                        named.push(name);
                    }
                }
                _ => {}
            }
        }
    }
    named.sort();
    named
}

#[test]
fn few_files_tell_layouts_and_orders_apart() {
    let variants = ["RowLayout::ExpertMajor", "RowLayout::RankMajor"];
    let orders = ["Order::Expert", "Order::Rank", "Order::Node"];
    let named = files_with(&[variants.as_slice(), &orders].concat());
    assert!(named.len() <= 5, "{named:?}");
}

#[test]
fn files_that_ask_for_the_layout_are_those_of_contributing() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/CONTRIBUTING.md")).unwrap();
    let (_, list) = page.split_once("has to look at each of them:").expect("the list is there");
    let (list, _) = list.split_once("So rank-major rows").expect("the list ends");
    let mut listed: Vec<_> = list.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    listed.sort();
    assert_eq!(listed, files_with(&["is_per_rank(", "laid_apart("]));
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
