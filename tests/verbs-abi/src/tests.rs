//! The comparison, and that nothing was left out of it.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::table::{Row, rows};

/// The library's own source.
const SOURCE: &str = include_str!("../../../src/lane/net/verbs/ffi.rs");

#[test]
fn every_number_is_that_of_rdma_sys() {
    let differ = |row: &&Row| row.theirs.is_some_and(|theirs| theirs != row.ours);
    let all = rows();
    let wrong: Vec<String> = all
        .iter()
        .filter(differ)
        .map(|Row { what, ours, theirs }| format!("{what}: {ours}, rdma-sys {theirs:?}"))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    eprintln!("{} numbers compared", all.iter().filter(|row| row.theirs.is_some()).count());
}

#[test]
fn every_number_is_that_of_the_system_s_headers() {
    let mut text = "#include <stddef.h>\n#include <infiniband/verbs.h>\n".to_owned();
    for Row { what, ours, .. } in rows() {
        writeln!(text, "_Static_assert({what} == {ours}, \"{what} is not {ours}\");").unwrap();
    }
    // Names are left over from another declaration, or the headers are missing: the compiler
    // reports which.
    let compiler = ["-std=gnu11", "-fsyntax-only", "-x", "c", "-"];
    let mut cc = Command::new("cc").args(compiler).stdin(Stdio::piped()).spawn().unwrap();
    cc.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(cc.wait().unwrap().success());
}

/// Every declaration of the source has its row: constants by name, structures by size or, if only
/// used by pointer, by their fields, and each used field.
#[test]
fn nothing_is_left_out() {
    let rows = rows();
    let has = |what: &str| rows.iter().any(|row| row.what == what);
    let (mut missing, mut seen, mut of) = (Vec::new(), 0, "");
    for line in SOURCE.lines() {
        let mut words = line.trim().split([' ', ':', '<']);
        let (Some("pub"), Some(word), name) = (words.next(), words.next(), words.next().unwrap_or("")) else {
            continue;
        };
        let what = match word {
            "const" => name.to_owned(),
            // Parts of a work request and of an event: compared by path.
            "struct" | "union" => {
                of = name;
                continue;
            }
            field if field.starts_with("unused") || field == "remote_srqn" => continue,
            field => format!("offsetof(struct {of}, {field})"),
        };
        let by_path = ["ibv_send_target", "ibv_send_rdma", "ibv_send_atomic", "ibv_gid", "ibv_async_element"];
        if word != "const" && by_path.contains(&of) {
            continue;
        }
        seen += 1;
        if !has(&what) {
            missing.push(what);
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(seen > 150, "the source was read: {seen}");
}
