//! Prose in comments and docstrings is at most 100 columns wide, so that two files fit next to each
//! other.

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
        Some("py" | "pyi" | "toml" | "sh" | "yml") => Some(&["#"]),
        _ if path.starts_with(".ci/") => Some(&["#"]),
        _ => None,
    }
}

const QUOTES: &str = "\"\"\"";

/// Strings of several lines in Python: those that begin a line are docstrings.
#[derive(Default)]
struct Docstrings {
    /// Whether the string that the next line lies in is a docstring; none between strings.
    open: Option<bool>,
}

impl Docstrings {
    /// Whether the next line is of a docstring.
    fn holds(&mut self, line: &str) -> bool {
        let here = self.open.unwrap_or_else(|| line.trim_start().trim_start_matches('r').starts_with(QUOTES));
        if line.matches(QUOTES).count() % 2 == 1 {
            self.open = if self.open.is_none() { Some(here) } else { None };
        }
        here
    }
}

/// Lines of prose in comments, and in docstrings where the language has them, that are too wide.
/// Code, tables and drawings may be wide, and a link cannot be broken.
fn wide(text: &str, marks: &[&str], docstrings: bool) -> Vec<String> {
    let (mut in_code, mut strings) = (false, Docstrings::default());
    let mut found = Vec::new();
    for line in text.lines() {
        let comment = marks.iter().find_map(|mark| line.trim_start().strip_prefix(mark));
        let in_docstring = docstrings && strings.holds(line);
        let Some(prose) = comment.or(in_docstring.then_some(line)) else {
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
    let docstrings = path.ends_with(".py") || path.ends_with(".pyi");
    (1, wide(&text, marks, docstrings).into_iter().map(|line| format!("{path}: {line}")).collect())
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
    assert_eq!(wide(&prose, rust, false).len(), 1);
    assert_eq!(wide(&[drawing, table, code].join("\n"), rust, false), Vec::<String>::new());
    assert_eq!(wide(&prose.replace("///", "# "), python, true).len(), 1);
    let words = "word ".repeat(30);
    let docstring = format!("def f():\n    \"\"\"Word.\n\n    {words}\n    \"\"\"\n    x = \"{words}\"");
    assert_eq!(wide(&docstring, python, true).len(), 1);
    let text = format!("TEXT = \"\"\"\n{words}\n\"\"\"\nx = f(\"{words}\")");
    assert_eq!(wide(&text, python, true), Vec::<String>::new());
}
