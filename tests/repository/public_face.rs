//! The public face of the library, by `public-face.txt`: few items, of which those that may grow
//! say so. CI compares the text with what rustdoc shows (`.ci/public_face.py`).

use std::path::Path;

/// Items outside `error`, at most.
const MOST: usize = 120;

/// Enums, and structs with public fields, that callers may match and write in full, and why.
const CLOSED: [(&str, &str); 1] =
    [("plan::RowsByDistance", "a row stays at its rank, stays in its node, or leaves it")];

/// Names of the items and their lines.
fn items() -> Vec<(String, Vec<String>)> {
    let face = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/repository/public-face.txt");
    let face = std::fs::read_to_string(face).unwrap();
    let item = |text: &str| {
        let (name, lines) = text.trim_start_matches("## ").split_once('\n').expect("a name, and lines");
        (name.to_owned(), lines.lines().map(str::to_owned).collect())
    };
    face.split("\n\n").map(item).collect()
}

/// Whether callers in other crates could match or write the item in full.
fn is_open_to_literals(lines: &[String]) -> bool {
    let is_enum = lines.iter().any(|line| line.starts_with("pub enum "));
    let has_fields = lines.iter().any(|line| line.starts_with("    pub ") && line.ends_with(','));
    (is_enum || has_fields) && !lines.iter().any(|line| line == "#[non_exhaustive]")
}

#[test]
fn few_items_are_public_outside_errors() {
    let items = items();
    let outside = items.iter().filter(|(name, _)| !name.starts_with("error::")).count();
    assert!(outside > 100, "the face was read: {outside} items");
    assert!(outside <= MOST, "{outside} public items outside `error`, at most {MOST}");
}

#[test]
fn items_that_may_grow_are_non_exhaustive() {
    let items = items();
    let open = items.iter().filter(|(_, lines)| is_open_to_literals(lines)).map(|(name, _)| name.as_str());
    assert_eq!(open.collect::<Vec<_>>(), CLOSED.map(|(name, _)| name));
}

#[test]
fn item_with_fields_or_variants_is_told_from_others() {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    assert!(is_open_to_literals(&lines("pub enum A {\n    B,\n}")));
    assert!(is_open_to_literals(&lines("pub struct A {\n    pub b: u32,\n}\n    impl Clone")));
    assert!(!is_open_to_literals(&lines("#[non_exhaustive]\npub enum A {\n    B,\n}")));
    assert!(!is_open_to_literals(&lines(
        "pub struct A { /* private fields */ }\n    pub fn b(&self) -> u32"
    )));
}
