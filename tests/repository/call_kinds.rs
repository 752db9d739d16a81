//! Kinds of calls and stages are data: few files tell them apart, and all others read their tables.

use std::path::Path;

use crate::module_layering::sources;

/// Files that may match a kind of call or compare it with one, and why.
const OF_KINDS: [(&str, &str); 1] =
    [("crates/core/src/schedule/call_properties.rs", "the table of kinds, which programs are chosen by")];

/// Files that may do so with a stage.
const OF_STAGES: [(&str, &str); 3] = [
    ("crates/core/src/schedule/call_program.rs", "the programs"),
    ("crates/core/src/schedule/skeleton.rs", "the table of stages"),
    ("crates/verify/src/value_flow.rs", "the proof's table of what each step needs and gives"),
];

const FOLDERS: [&str; 4] = ["src", "crates", "bindings/c/src", "bindings/python/src"];

fn tells_kinds_apart(code: &str) -> bool {
    tells_apart(code, "CallKind")
}

/// Whether this code matches a value of a type or compares it, rather than names the one that it
/// means.
pub fn tells_apart(code: &str, of: &str) -> bool {
    let imports = ["::{", "::*", " as "];
    imports.iter().any(|import| code.contains(&format!("{of}{import}")))
        || code.match_indices(&format!("{of}::")).any(|(at, name)| {
            let (before, after) = (code[..at].trim_end(), &code[at + name.len()..]);
            let before = before.strip_suffix("error::").unwrap_or(before);
            let before = before.strip_suffix("crate::").unwrap_or(before).trim_end();
            compared(before) || leads_to_arm(after)
        })
}

/// Whether the code before a kind compares or matches it.
fn compared(before: &str) -> bool {
    let words = ["==", "!=", " let", "\nlet"];
    let inside = before.rsplit_once("matches!(").is_some_and(|(_, inside)| {
        let mut open = 1;
        inside.chars().all(|c| {
            open += i32::from(c == '(') - i32::from(c == ')');
            open > 0
        })
    });
    inside || words.iter().any(|word| before.ends_with(word))
}

/// Whether a kind, with the tuples and lists that it stands in, is the pattern of an arm, an
/// alternative of one, or compared with what follows.
fn leads_to_arm(after: &str) -> bool {
    let mut rest = after.trim_start_matches(|c: char| c.is_ascii_alphanumeric()).trim_start();
    loop {
        let signs = ["=>", "==", "!=", "| ", "if ", ".contains("];
        if signs.iter().any(|sign| rest.starts_with(sign)) {
            return true;
        }
        let mut depth = 0;
        let end = rest.char_indices().find(|&(_, c)| {
            depth += i32::from("([{".contains(c)) - i32::from(")]}".contains(c));
            depth < 0 || (depth == 0 && c == ';')
        });
        match end {
            Some((at, ')' | ']')) => rest = rest[at + 1..].trim_start(),
            _ => return false,
        }
    }
}

/// Code of a file, without its tests and comments.
pub fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// Files of the library and its crates, without tests, that tell values of a type apart.
fn files(of: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut paths, mut found) = (Vec::new(), Vec::new());
    FOLDERS.iter().for_each(|folder| sources(&root.join(folder), &mut paths));
    for path in paths {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        let is_test = name.contains("/tests/") || name.ends_with("tests.rs");
        if !is_test && tells_apart(&code(&path), of) {
            found.push(name);
        }
    }
    found.sort();
    found
}

#[test]
fn kinds_of_calls_are_told_apart_in_one_table() {
    let permitted = OF_KINDS.map(|(file, _)| file);
    assert_eq!(files("CallKind"), permitted, "add a column to the table of kinds, and read that");
}

#[test]
fn stages_are_told_apart_by_programs_and_tables_alone() {
    let permitted = OF_STAGES.map(|(file, _)| file);
    assert_eq!(files("StageId"), permitted, "add a column beside `StageId::name`, and read that");
}

#[test]
fn patterns_and_comparisons_are_distinguished_from_calls() {
    for branch in [
        "match kind { CallKind::Prepare => 0, _ => 1 }",
        "match (kind, handle) { (CallKind::Combine | CallKind::Dispatch, Some(handle)) => 0 }",
        "match call { (CallKind::Combine, _) if weighted => 0 }",
        "if kind == CallKind::Combine {}",
        "if kind != crate::error::CallKind::Combine {}",
        "if CallKind::Combine == kind {}",
        "matches!(kind, CallKind::Combine)",
        "matches!(of(kind), Some(CallKind::Combine))",
        "if let CallKind::Combine = kind {}",
        "[CallKind::Combine, CallKind::Dispatch].contains(&kind)",
        "use crate::error::CallKind::{Combine, Dispatch};",
    ] {
        assert!(tells_kinds_apart(branch), "{branch}");
    }
    for call in [
        "let call = self.offer((CallKind::Combine, 0), handle, unfit)?;",
        "if matches!(at, Place::Host) { self.refuse(CallKind::Combine) }",
        "match summed { true => CallKind::AllReduce, false => CallKind::Broadcast }",
        "Flight { tag: Tag { kind: CallKind::Unknown, ..tag }, parts }",
        "if refused { return Err(self.refuse(CallKind::Combine, None, error)); }",
        "(self == Activations::Replicated).then_some(CallKind::AllGather)",
    ] {
        assert!(!tells_kinds_apart(call), "{call}");
    }
}
