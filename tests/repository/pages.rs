//! Rules that the pages keep: links lead somewhere, the README is short and its comparison has
//! sources, the book has all pages, prose is 100 columns wide, every variable has a row in the
//! table of the environment, and CONTRIBUTING.md lists every folder of sources.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Pages for readers: those of the root and of `docs`.
fn pages() -> Vec<PathBuf> {
    let folders = [root().to_owned(), root().join("docs")];
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "md"))
        .collect()
}

/// Lines of a page outside of code blocks.
fn prose(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).unwrap();
    let mut in_code = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        match line.starts_with("```") {
            true => in_code = !in_code,
            false if !in_code => lines.push(line.to_owned()),
            false => {}
        }
    }
    lines
}

/// The anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn has_anchor(page: &Path, wanted: &str) -> bool {
    let id = format!("id=\"{wanted}\"");
    prose(page).iter().any(|line| line.starts_with('#') && anchor(line) == wanted || line.contains(&id))
}

#[test]
fn every_relative_link_of_a_page_leads_somewhere() {
    let mut seen = 0;
    for page in pages() {
        for line in prose(&page) {
            let links = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            for link in links.filter(|link| !link.starts_with("http")) {
                let (path, part) = link.split_once('#').unwrap_or((link, ""));
                let target = if path.is_empty() { page.clone() } else { page.parent().unwrap().join(path) };
                assert!(target.exists(), "{}: {link}", page.display());
                let found = part.is_empty() || has_anchor(&target, part);
                assert!(found, "{}: {link}", page.display());
                seen += 1;
            }
        }
    }
    assert!(seen > 50, "the pages were read: {seen}");
}

#[test]
fn readme_has_at_most_200_lines_and_row_per_comparison_cell() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let lines = readme.lines().count();
    assert!(lines <= 200, "README.md has {lines} lines");
    let sources = fs::read_to_string(root().join("docs/comparison.md")).unwrap();
    let mut notes = 0;
    for cell in readme.split("<sup>[").skip(1) {
        let (note, rest) = cell.split_once("](docs/comparison.md#").unwrap();
        let wanted = rest.split(')').next().unwrap();
        let mut sections = sources.split("\n## ");
        let section = sections.find(|section| anchor(section.lines().next().unwrap()) == wanted).unwrap();
        assert!(section.contains(&format!("\n| {note} | ")), "no row of note {note} in {wanted}");
        notes += 1;
    }
    assert_eq!(notes, 36, "six rows of six cells were read");
}

/// mdBook shows the pages that its table of contents names, and no others.
#[test]
fn table_of_contents_names_every_page_of_docs_once() {
    let docs = root().join("docs");
    let contents = prose(&docs.join("SUMMARY.md")).join("\n");
    let named = contents.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let mut named: Vec<_> = named.map(|page| docs.join(page)).collect();
    named.push(docs.join("SUMMARY.md"));
    named.sort();
    let mut there: Vec<_> = pages().into_iter().filter(|page| page.starts_with(&docs)).collect();
    there.sort();
    assert_eq!(named, there);
}

#[test]
fn every_row_of_a_json_page_has_a_type_and_a_meaning() {
    const TYPES: [&str; 8] = ["array", "boolean", "integer", "list", "null", "number", "object", "string"];
    let mut seen = 0;
    for page in pages().into_iter().filter(|page| page.to_str().is_some_and(|p| p.ends_with("-json.md"))) {
        for line in prose(&page).iter().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = line.trim_matches('|').splitn(3, '|').map(str::trim).collect();
            let of_type = cells.get(1).and_then(|cell| cell.split([' ', ',']).next());
            let typed = of_type.is_some_and(|word| TYPES.contains(&word));
            assert!(typed && cells.get(2).is_some_and(|cell| !cell.is_empty()), "{}: {line}", page.display());
            seen += 1;
        }
    }
    assert!(seen > 200, "the pages were read: {seen}");
}

/// Pages of folders that have one.
const READMES: [&str; 8] = [
    "benches/baselines",
    "bindings/python",
    "data",
    "examples/moe-lm",
    "tests/faults",
    "tests/gate/oracles",
    "tests/fake-cuda",
    "tests/testbed",
];

#[test]
fn prose_of_pages_is_at_most_100_columns_wide() {
    let readmes = READMES.map(|folder| root().join(folder).join("README.md"));
    for page in pages().into_iter().chain(readmes) {
        for line in prose(&page) {
            // A table row is one line, as is code, and a link or a word cannot be broken.
            let fixed = line.starts_with('|') || line.starts_with("    ");
            let free = !fixed && line.trim().contains(' ') && !line.contains("http");
            assert!(!free || line.chars().count() <= 100, "{}: {line}", page.display());
        }
    }
}

/// Names of variables of Sidelane's in the string literals of a text.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let literals = text.split('"').filter(|text| text.starts_with("SIDELANE_") && !text.ends_with('_'));
    literals.filter(|text| text.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
}

/// Variables of Sidelane's that the sources below a folder name.
fn variables(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            variables(&path, found);
        } else if name.ends_with(".rs") && !name.contains("tests") {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            found.extend(names(code).map(str::to_owned));
        }
    }
}

/// The library refuses names that are nearly one that it knows, so it must know all of them.
#[test]
fn every_variable_is_known_to_the_library_and_in_the_table_of_the_environment() {
    let mut found = BTreeSet::new();
    for folder in ["src", "bindings/python/src", "crates"] {
        variables(&root().join(folder), &mut found);
    }
    assert!(found.len() > 30, "the sources were read: {found:?}");
    // Variables of tests, and those that `build.rs` sets for the compiler.
    let others = ["SIDELANE_TEST_", "SIDELANE_FAKE_CUDA_", "SIDELANE_COMMIT", "SIDELANE_TARGET"];
    let other = |name: &str| others.iter().any(|other| name.starts_with(other));

    let page = fs::read_to_string(root().join("docs/environment.md")).unwrap();
    let (table, old) = page.split_once("## Old names").unwrap();
    let rows = |text: &str| -> BTreeSet<String> {
        let named = text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        named.filter(|name| name.starts_with("SIDELANE_") && !other(name)).map(str::to_owned).collect()
    };
    let sources = fs::read_to_string(root().join("src/config.rs")).unwrap();
    let lists = sources.split("const OF_").skip(1).map(|list| list.split("];").next().unwrap());
    let known: BTreeSet<_> = lists.flat_map(names).filter(|name| !other(name)).map(str::to_owned).collect();
    assert_eq!(rows(table), known);

    let renamed = rows(old);
    let unknown = |name: &&String| !other(name) && !known.contains(*name) && !renamed.contains(*name);
    let unknown: Vec<_> = found.iter().filter(unknown).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

/// Folders below `src/` of a package, with the package's own path in front.
fn source_folders(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    found.insert(folder.strip_prefix(root()).unwrap().to_owned());
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            source_folders(&path, found);
        }
    }
}

/// The list draws folders as a tree, two blanks a level.
#[test]
fn contributing_lists_every_folder_of_library_and_crates() {
    let text = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let list = text.split("## Where things go").nth(1).unwrap().split("```").nth(1).unwrap();
    let mut above: Vec<&str> = Vec::new();
    let mut listed = BTreeSet::new();
    for line in list.lines().skip(1) {
        let name = line.trim_start();
        let level = (line.len() - name.len()) / 2 - 1;
        above.truncate(level);
        above.push(name.split_whitespace().next().unwrap());
        let folder: PathBuf = above.iter().collect();
        if folder.iter().any(|part| part == "src") {
            assert!(name.contains("  "), "{line}: no subject");
            listed.insert(folder);
        }
    }
    let mut found = BTreeSet::new();
    source_folders(&root().join("src"), &mut found);
    for package in fs::read_dir(root().join("crates")).unwrap() {
        source_folders(&package.unwrap().path().join("src"), &mut found);
    }
    assert_eq!(listed, found);
}
