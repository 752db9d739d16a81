//! The architecture as a test: which room may use which, and where unsafe code may live.
//!
//! Rooms are the folders and files right under `src/`. A room may use those above it in this list, never those below.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// From those that know nothing to those that use them all; rooms of one line do not use each other.
const ROOMS: [&[&str]; 14] = [
    &["dtype"],
    &["error", "topology"],
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

/// Uses them all.
const TOP: [&str; 1] = ["bin"];

/// Rooms that may contain unsafe code, of this package and of the C face.
const UNSAFE: [&str; 5] = ["device", "memory", "rows", "lane", "ffi"];

/// Rooms that compute and do nothing else: no file, no socket, no clock, no thread.
const PURE: [&str; 3] = ["gate", "plan", "schedule"];

/// The C face is a package of its own: who writes Rust neither builds it nor exports its symbols.
const PACKAGES: [&str; 2] = ["src", "bindings/c/src"];

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The room of each source file of a package, with its text; documentation and comments left out.
fn files(package: &str) -> Vec<(String, PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(package);
    let mut paths = Vec::new();
    sources(&root, &mut paths);
    let room_of = |path: &Path| {
        let first = path.strip_prefix(&root).unwrap().iter().next().unwrap().to_str().unwrap().to_owned();
        first.trim_end_matches(".rs").to_owned()
    };
    let code = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let lines = text.lines().map(|line| line.split("//").next().unwrap());
        lines.collect::<Vec<_>>().join("\n")
    };
    paths.into_iter().map(|path| (room_of(&path), path.clone(), code(&path))).collect()
}

fn height(room: &str) -> Option<usize> {
    ROOMS.iter().position(|line| line.contains(&room))
}

#[test]
fn no_room_uses_one_below_it() {
    let mut edges = BTreeSet::new();
    for (room, path, code) in files(PACKAGES[0]) {
        // A conformance suite builds worlds to test a lane in.
        if room == "lib" || TOP.contains(&room.as_str()) || path.iter().any(|part| part == "conformance") {
            continue;
        }
        let own = height(&room).unwrap_or_else(|| panic!("{room} has no place in the list"));
        for used in code.split("crate::").skip(1) {
            let used: String = used.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            if used == room || used.is_empty() || used.starts_with(char::is_uppercase) {
                continue;
            }
            let Some(other) = height(&used) else {
                assert!(!TOP.contains(&used.as_str()), "{} uses {used}", path.display());
                continue;
            };
            assert!(other < own, "{} of room {room} uses {used}, which is not above it", path.display());
            edges.insert((room.clone(), used));
        }
    }
    assert!(edges.len() > 20, "the files were read: {edges:?}");
}

#[test]
fn pure_rooms_ask_nothing_of_the_system() {
    let mut read = 0;
    for (_, path, code) in files(PACKAGES[0]).into_iter().filter(|(room, ..)| PURE.contains(&room.as_str())) {
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
    assert!(read > 60, "the files were read: {read}");
}

#[test]
fn unsafe_code_lives_in_its_rooms_only() {
    let mut seen = BTreeSet::new();
    for (room, path, code) in PACKAGES.into_iter().flat_map(files) {
        let words = code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        if words.into_iter().any(|word| word == "unsafe") {
            assert!(UNSAFE.contains(&room.as_str()), "{} holds unsafe code", path.display());
            seen.insert(room);
        }
    }
    assert!(
        ["device", "lane", "rows", "ffi"].iter().all(|room| seen.contains(*room)),
        "the files were read: {seen:?}"
    );
}
