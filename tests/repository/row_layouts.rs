//! Layouts of rows and orders of sums are descriptors: few files of the library ask which one there
//! is, and all others take their values.

use std::path::Path;

use crate::call_kinds::{code, tells_apart};
use crate::module_layering::sources;

/// Files of the library that may ask for a layout, an order, or the metadata of rows, and why.
const MAY_ASK: [(&str, &str); 5] = [
    ("crates/core/src/plan/modes.rs", "the descriptors of orders"),
    ("crates/core/src/plan/row_layout.rs", "the descriptors of layouts and metadata"),
    ("crates/core/src/plan/sorted_routing.rs", "writes the metadata of each entry"),
    ("src/ep/features.rs", "the table of features"),
    ("src/ep/row_metadata.rs", "reads the metadata of rows on the host"),
];

/// Whether this code matches a layout, an order or metadata, compares it, or asks it what it is.
fn asks(code: &str) -> bool {
    let types = ["RowLayout", "SumOrder", "RowMetadata"];
    code.contains(".is_per_rank(") || types.iter().any(|of| tells_apart(code, of))
}

#[test]
fn few_files_ask_which_layout_or_order_there_is() {
    let (root, mut paths) = (Path::new(env!("CARGO_MANIFEST_DIR")), Vec::new());
    ["src", "crates/core/src"].iter().for_each(|folder| sources(&root.join(folder), &mut paths));
    let mut asking = Vec::new();
    for path in paths {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        let is_test = name.contains("/tests/") || name.ends_with("tests.rs");
        if !is_test && asks(&code(&path)) {
            asking.push(name);
        }
    }
    asking.sort();
    assert_eq!(asking, MAY_ASK.map(|(file, _)| file), "give the layout a value, and take that");
}

#[test]
fn questions_are_distinguished_from_values() {
    for question in [
        "if spec.layout.is_per_rank() { 1 } else { 2 }",
        "match layout { RowLayout::RankMajor => 1, _ => 2 }",
        "let several = layout != RowLayout::RankMajor;",
        "matches!(notes, RowMetadata::Choices | RowMetadata::Indexed)",
        "if order == SumOrder::Node {}",
    ] {
        assert!(asks(question), "{question}");
    }
    for value in [
        "let bin = spec.layout.bin_of(map, slot);",
        "Self::of_layout(RowLayout::ExpertMajor, map, order, nodes)",
        "if self.gathers { RowMetadata::Gathered } else { RowMetadata::of(layout, mode, spans) }",
    ] {
        assert!(!asks(value), "{value}");
    }
}
