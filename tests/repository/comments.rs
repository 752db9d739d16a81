//! Prose in comments is at most 100 columns wide, so that two files fit next to each other.

use std::fs;
use std::path::Path;

/// Folders and files with comments.
const SOURCES: [&str; 11] = [
    ".ci",
    ".github",
    "Cargo.toml",
    "benches",
    "bindings",
    "build.rs",
    "crates",
    "cuda",
    "examples",
    "src",
    "tests",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// How a language marks its comments: at the start of a line, the longest mark first.
fn marks(path: &str) -> Option<&'static [&'static str]> {
    let ending = Path::new(path).extension().and_then(|ending| ending.to_str());
    match ending {
        Some("rs" | "c" | "h" | "cu" | "cuh") => Some(&["///", "//!", "//", "/*", "* "]),
        Some("py" | "toml" | "sh" | "yml") => Some(&["#"]),
        _ if path.starts_with(".ci/") => Some(&["#"]),
        _ => None,
    }
}

/// Lines of prose in comments that are too wide. Code, tables and drawings may be wide, and a link
/// cannot be broken.
fn wide(text: &str, marks: &[&str]) -> Vec<String> {
    let mut in_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        let Some(prose) = marks.iter().find_map(|mark| line.trim_start().strip_prefix(mark)) else {
            in_code = false;
            continue;
        };
        let prose = prose.trim();
        in_code ^= prose.starts_with("```");
        let free = in_code || prose.starts_with('|') || prose.contains("  ") || prose.contains("http");
        if !free && line.chars().count() > 100 {
            found.push(line.to_owned());
        }
    }
    found
}

/// Reads the files at and below a path. Returns their number, and the lines that are too wide.
fn read(path: &str) -> (usize, Vec<String>) {
    let at = root().join(path);
    if path.ends_with("/target") {
        return (0, Vec::new());
    }
    if at.is_dir() {
        let entries = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name());
        let files = entries.map(|name| read(&format!("{path}/{}", name.to_str().unwrap())));
        return files
            .fold((0, Vec::new()), |(seen, found), (more, lines)| (seen + more, [found, lines].concat()));
    }
    let Some(marks) = marks(path) else { return (0, Vec::new()) };
    let text = fs::read_to_string(at).unwrap();
    (1, wide(&text, marks).into_iter().map(|line| format!("{path}: {line}")).collect())
}

#[test]
fn prose_of_comments_is_at_most_100_columns_wide() {
    let files = SOURCES.map(read);
    let found: Vec<_> = files.iter().flat_map(|(_, found)| found.clone()).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
    let seen: usize = files.iter().map(|(seen, _)| seen).sum();
    assert!(seen > 500, "the sources were read: {seen}");
}

#[test]
fn wide_prose_is_found_and_wide_drawings_are_not() {
    let prose = format!("    /// {}", "word ".repeat(30));
    let drawing = format!("//!   a --{}-->  b", "-".repeat(100));
    let table = format!("/// | {} |", "word ".repeat(30));
    let code = format!("/// ```\n/// {}\n/// ```", "word ".repeat(30));
    let (rust, python) = (marks("a.rs").unwrap(), marks("a.py").unwrap());
    assert_eq!(wide(&prose, rust).len(), 1);
    assert_eq!(wide(&[drawing, table, code].join("\n"), rust), Vec::<String>::new());
    assert_eq!(wide(&prose.replace("///", "# "), python).len(), 1);
}
