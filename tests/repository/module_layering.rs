//! The architecture as a test: which module and which crate may use which, and where unsafe code
//! may live.
//!
//! Modules are the folders and files directly under `src/` of the library and of `crates/core`. A
//! module may use those above it in this list, never those below.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest to the highest; modules of one line do not use each other.
const MODULES: [&[&str]; 15] = [
    &["sync", "digest", "inputs"],
    &["dtype"],
    &["error", "nic_choice", "stripes", "topology"],
    &["config"],
    &["gate"],
    &["plan"],
    &["schedule"],
    &["bootstrap", "device", "rows"],
    &["memory"],
    &["lane"],
    &["exec"],
    &["world"],
    &["collective", "ep"],
    &["overlap"],
    &["layer"],
];

/// Modules that may contain unsafe code, of the library and of the bindings for C.
const UNSAFE: [&str; 5] = ["device", "memory", "rows", "lane", "ffi"];

/// The crate that computes and does nothing else: no file, no socket, no clock, no thread.
const CORE: &str = "crates/core/src";
const LIBRARY: &str = "src";
/// The bindings for C are a package of their own: users of Rust neither build it nor export its
/// symbols.
const C: &str = "bindings/c/src";
/// Crates above the library or next to it.
const OTHERS: [&str; 5] =
    ["crates/verify/src", "crates/model/src", "crates/testkit/src", "crates/parallel/src", "crates/cli/src"];

/// Crates of this repository that each crate may use in its code; tests may use more.
const CRATES: [(&str, &[&str]); 7] = [
    ("crates/core", &[]),
    (".", &["sidelane-core"]),
    ("crates/verify", &["sidelane-core"]),
    ("crates/model", &["sidelane-core"]),
    ("crates/testkit", &["sidelane", "sidelane-core", "sidelane-verify"]),
    (
        "crates/cli",
        &[
            "sidelane",
            "sidelane-core",
            "sidelane-model",
            "sidelane-parallel",
            "sidelane-testkit",
            "sidelane-verify",
        ],
    ),
    ("crates/parallel", &["sidelane"]),
];

pub fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The module of each source file of a package, with its text; documentation and comments left out.
fn files(package: &str) -> Vec<(String, PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(package);
    let mut paths = Vec::new();
    sources(&root, &mut paths);
    let module_of = |path: &Path| {
        let first = path.strip_prefix(&root).unwrap().iter().next().unwrap().to_str().unwrap().to_owned();
        first.trim_end_matches(".rs").to_owned()
    };
    let code = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let lines = text.lines().map(|line| line.split("//").next().unwrap());
        lines.collect::<Vec<_>>().join("\n")
    };
    paths.into_iter().map(|path| (module_of(&path), path.clone(), code(&path))).collect()
}

fn height(module: &str) -> Option<usize> {
    MODULES.iter().position(|line| line.contains(&module))
}

#[test]
fn no_module_uses_one_below_it() {
    let mut edges = BTreeSet::new();
    for (module, path, code) in files(CORE).into_iter().chain(files(LIBRARY)) {
        // The tests of lanes build worlds to test a lane in.
        if module == "lib" || path.parent().is_some_and(|folder| folder.ends_with("lane/tests")) {
            continue;
        }
        let own = height(&module).unwrap_or_else(|| panic!("{module} has no place in the list"));
        for used in code.split("crate::").skip(1) {
            let used: String = used.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            if used == module || used.is_empty() || used.starts_with(char::is_uppercase) {
                continue;
            }
            let Some(other) = height(&used) else { continue };
            assert!(other < own, "{} of module {module} uses {used}, which is not above it", path.display());
            edges.insert((module.clone(), used));
        }
    }
    assert!(edges.len() > 20, "the files were read: {edges:?}");
}

#[test]
fn crates_use_those_below_them_only() {
    for (package, allowed) in CRATES {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join(package).join("Cargo.toml");
        let text = fs::read_to_string(manifest).unwrap();
        let dependencies = text.lines().skip_while(|line| *line != "[dependencies]").skip(1);
        let names = dependencies
            .take_while(|line| !line.starts_with('['))
            .map(|line| line.split(['.', ' ', '=']).next().unwrap_or_default());
        let used: BTreeSet<_> = names.filter(|name| name.starts_with("sidelane")).collect();
        assert_eq!(used, allowed.iter().copied().collect(), "{package}");
    }
}

#[test]
fn core_asks_nothing_of_the_system() {
    let mut read = 0;
    for (_, path, code) in files(CORE) {
        read += 1;
        let asks = [
            "std::fs",
            "std::net",
            "std::io",
            "std::time",
            "std::thread",
            "std::process",
            "std::env",
            "rustix",
        ];
        let found = asks.into_iter().find(|asked| code.contains(asked));
        assert_eq!(found, None, "{}", path.display());
    }
    assert!(read > 40, "the files were read: {read}");
}

#[test]
fn unsafe_code_lives_in_its_modules_only() {
    let mut seen = BTreeSet::new();
    for (module, path, code) in [CORE, LIBRARY, C].into_iter().chain(OTHERS).flat_map(files) {
        let words = code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        if words.into_iter().any(|word| word == "unsafe") {
            assert!(UNSAFE.contains(&module.as_str()), "{} holds unsafe code", path.display());
            seen.insert(module);
        }
    }
    assert!(
        ["device", "lane", "rows", "ffi"].iter().all(|module| seen.contains(*module)),
        "the files were read: {seen:?}"
    );
}
