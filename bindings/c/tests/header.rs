//! The header that is checked in is the one that the source gives, and C and C++ can read it.

use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = env!("CARGO_MANIFEST_DIR");

fn header() -> PathBuf {
    Path::new(PACKAGE).join("include/sidelane.h")
}

/// With SIDELANE_WRITE_HEADER=1 it is written instead.
#[test]
fn the_header_is_what_the_source_gives() {
    let bindings = cbindgen::generate(PACKAGE).expect("cbindgen reads the source");
    let mut fresh = Vec::new();
    bindings.write(&mut fresh);
    let fresh = String::from_utf8(fresh).expect("text");
    if std::env::var_os("SIDELANE_WRITE_HEADER").is_some() {
        std::fs::write(header(), &fresh).expect("a place for the header");
        return;
    }
    let stored = std::fs::read_to_string(header()).unwrap_or_default();
    assert!(
        stored == fresh,
        "include/sidelane.h is stale: SIDELANE_WRITE_HEADER=1 cargo test -p sidelane-c --test header"
    );
}

#[test]
fn c_and_cpp_compile_the_header_without_a_warning() {
    for (language, standard) in [("c", "-std=c99"), ("c", "-std=c11"), ("c++", "-std=c++11")] {
        let mut compiler = Command::new("cc");
        compiler.args([
            standard,
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-fsyntax-only",
            "-x",
            language,
        ]);
        let output = compiler.arg(header()).output().expect("cc runs");
        assert!(output.status.success(), "{language}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Every symbol of the shared library is declared, and everything that is declared is there.
#[test]
fn library_exports_exactly_symbols_declared_in_header() {
    let library = sidelane_c_library();
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output().expect("nm runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut exported: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    exported.sort_unstable();
    let header = std::fs::read_to_string(header()).expect("the header");
    let mut declared: Vec<&str> = header
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '(')
        .filter_map(|word| word.strip_suffix('(').or(word.split_once('(').map(|(name, _)| name)))
        .filter(|name| name.starts_with("sidelane_"))
        .collect();
    declared.sort_unstable();
    declared.dedup();
    assert!(declared.len() > 40, "the header was read: {declared:?}");
    assert_eq!(exported, declared);
}

/// Cargo puts it next to the tests.
fn sidelane_c_library() -> PathBuf {
    let test = std::env::current_exe().expect("a path");
    let library = test.with_file_name("libsidelane_c.so");
    assert!(library.exists(), "{} is built with the tests", library.display());
    library
}
