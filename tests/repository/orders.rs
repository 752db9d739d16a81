//! Orders between threads: fences and sequentially consistent accesses lie in `src/sync`, whose
//! files `tests/atomics` checks with loom.

use std::fs;
use std::path::Path;

use crate::module_layering::sources;

/// Files with the machine's own fences, and what each is for.
const MACHINE: [(&str, &str); 2] = [
    ("lane/flag.rs", "the full fence that `FlagWords::raise` is given"),
    ("rows/mod.rs", "ends stores that bypass the caches, before a signal"),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn fences_lie_where_loom_checks_them() {
    let (library, mut paths) = (root().join("src"), Vec::new());
    sources(&library, &mut paths);
    let mut found = Vec::new();
    for path in paths {
        let file = path.strip_prefix(&library).unwrap().to_str().unwrap().to_owned();
        let text = fs::read_to_string(&path).unwrap();
        let has_fence = text.contains("SeqCst") || text.contains("fence(Ordering");
        if has_fence && !file.starts_with("sync/") {
            found.push(file);
        }
    }
    found.sort();
    assert_eq!(found, MACHINE.map(|(file, _)| file), "move the protocol to src/sync, and write its model");
}

#[test]
fn each_protocol_is_compiled_for_loom_and_has_a_model() {
    let package = root().join("tests/atomics");
    let compiled = fs::read_to_string(package.join("src/sync/mod.rs")).unwrap();
    let mut models = Vec::new();
    sources(&package.join("tests/models"), &mut models);
    let models: String = models.iter().map(|model| fs::read_to_string(model).unwrap()).collect();
    let mut protocols = 0;
    for entry in fs::read_dir(root().join("src/sync")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if ["mod.rs", "primitives.rs"].contains(&&*name) {
            continue;
        }
        protocols += 1;
        assert!(compiled.contains(&format!("src/sync/{name}")), "{name} is not compiled for loom");
        assert!(models.contains(&format!("\"src/sync/{name}\"")), "no model proves {name}");
    }
    assert!(protocols > 4, "the protocols were read: {protocols}");
}

/// Lines before an access in which its reason stands.
const NEAR: usize = 4;

/// Accesses of atomics without a comment at or before them, by line; tests at the end have none.
fn unexplained(text: &str) -> Vec<usize> {
    const ORDERS: [&str; 5] = ["Relaxed", "Acquire", "Release", "AcqRel", "SeqCst"];
    let lines: Vec<&str> = text.lines().take_while(|line| *line != "#[cfg(test)]").map(str::trim).collect();
    let is_access = |line: &str| {
        !line.starts_with("//") && ORDERS.iter().any(|order| line.contains(&format!("Ordering::{order}")))
    };
    let is_reason =
        |line: &&str| line.contains("// ") && !line.starts_with("//!") && !line.starts_with("///");
    let accesses = lines.iter().enumerate().filter(|(_, line)| is_access(line)).map(|(at, _)| at);
    accesses
        .filter(|&at| !lines[at.saturating_sub(NEAR)..=at].iter().any(is_reason))
        .map(|at| at + 1)
        .collect()
}

#[test]
fn each_order_of_an_atomic_has_its_reason() {
    let (library, mut paths) = (root().join("src"), Vec::new());
    sources(&library, &mut paths);
    let mut found = Vec::new();
    for path in paths {
        let file = path.strip_prefix(&library).unwrap().to_str().unwrap().to_owned();
        if file.contains("/tests") || file.contains("/fake/") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        found.extend(unexplained(&text).into_iter().map(|line| format!("{file}:{line}")));
    }
    assert_eq!(found, Vec::<String>::new(), "say why this order suffices");
}

#[test]
fn an_order_without_a_reason_is_found_and_a_doc_is_none() {
    let bare = "/// Counts.\nfn f() {\n    COUNT.fetch_add(1, Ordering::Relaxed);\n}";
    assert_eq!(unexplained(bare), [3]);
    let explained = bare.replace("    COUNT", "    // Relaxed: a figure.\n    COUNT");
    assert_eq!(unexplained(&explained), Vec::<usize>::new());
}
