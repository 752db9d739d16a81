//! A command: its interface, its reports, and what all commands write and draw.
//!
//! ```text
//!   main.rs: one line a command
//!      | Command::run                         Command::rank: this program, started again with a task
//!      v                                                           |
//!   arguments --> task --> files are claimed --> (ranks::start) ---+--> Report --> text, --json, exit status
//! ```
//!
//! A page of `docs` describes the JSON of a report. Tests compare its keys and types with reports
//! that have every key. Pages made by schemars would cost six crates and 5.9 s of the first build,
//! as types of four other crates are in reports, and no crate has features.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::error::{CliError, failed, usage};
use crate::table;

pub trait Command: clap::Args {
    const NAME: &'static str;

    fn run(self) -> Result<ExitCode, CliError>;

    /// Runs one of the processes that the command has started, with the task it was given as JSON.
    fn rank(_task: &str) -> Result<ExitCode, CliError> {
        Err(usage!("{} starts no ranks", Self::NAME))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Program {
    pub version: &'static str,
    pub commit: &'static str,
    pub target: &'static str,
}

impl Program {
    pub const HERE: Program = Program {
        version: env!("CARGO_PKG_VERSION"),
        commit: env!("SIDELANE_COMMIT"),
        target: env!("SIDELANE_TARGET"),
    };

    pub fn text(self) -> String {
        let Program { version, commit, target } = self;
        format!("sidelane {version} ({commit}) for {target}")
    }
}

/// Result of a command. A page of `docs` describes its JSON.
pub trait Report: Serialize {
    /// Version of the JSON: it grows when a key changes its meaning or goes.
    const SCHEMA: u32 = 1;

    fn text(&self) -> String;

    fn is_right(&self) -> bool {
        true
    }

    fn json(&self) -> String {
        #[derive(Serialize)]
        struct Versioned<'a, R: ?Sized> {
            schema: u32,
            #[serde(flatten)]
            report: &'a R,
        }
        pretty(&Versioned { schema: Self::SCHEMA, report: self })
    }
}

/// JSON as people read it.
pub fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("strings, numbers and lists are always JSON")
}

/// Prints a report and writes its JSON if that was asked for; the status says whether it is right.
/// JSON that goes to standard output is printed instead of the report.
pub fn finish(report: &impl Report, json: &Option<PathBuf>) -> Result<ExitCode, CliError> {
    if json.as_deref().is_some_and(is_stdout) {
        print(&report.json())?;
    } else {
        print(&table::fitted(&report.text()))?;
        draw(json, || report.json() + "\n")?;
    }
    Ok(if report.is_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub fn draw(path: &Option<PathBuf>, text: impl FnOnce() -> String) -> Result<(), CliError> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, text()).map_err(|source| failed!("cannot write {path:?}: {source}"))
}

/// Writes to standard output, which may be a pipe: a reader that has seen enough is not an error.
pub fn print(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(failed!("cannot write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}

/// Says on standard error what went wrong, at once: ranks share it.
pub fn complain(text: &str) {
    let _ = io::stderr().lock().write_all(format!("{text}\n").as_bytes());
}

/// `-` is standard output, as for many programs.
fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// Checks that files can be written and that no two are the same, before there are results to lose.
/// New files are removed again. JSON alone may go to standard output.
pub fn claim<'p>(
    json: &'p Option<PathBuf>,
    others: impl IntoIterator<Item = &'p PathBuf>,
) -> Result<(), CliError> {
    let mut claimed = BTreeSet::new();
    for path in json.iter().filter(|path| !is_stdout(path)).chain(others) {
        if is_stdout(path) {
            return Err(usage!("- is no file: JSON alone can be written to standard output"));
        }
        let file = std::path::absolute(path).map_err(|source| failed!("cannot write {path:?}: {source}"))?;
        if !claimed.insert(file) {
            return Err(usage!(
                "{path:?} is given for two files: the second would be written over the first"
            ));
        }
        let there = path.exists();
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
        opened.map_err(|source| failed!("cannot write {path:?}: {source}"))?;
        if !there {
            // A file that cannot be removed is written over.
            let _ = std::fs::remove_file(path);
        }
    }
    Ok(())
}

/// A progress bar over this much work, drawn by rank 0 on standard error if that is a terminal:
/// logs and pipes get none.
pub fn progress(rank: u32, work: u64) -> ProgressBar {
    if rank != 0 || !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}, {eta} left")
        .expect("the template is constant and valid");
    ProgressBar::new(work).with_style(style)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    use std::collections::BTreeMap;

    use clap::{Args, Parser};
    use serde_json::Value;

    #[derive(Parser)]
    struct Line<A: Args> {
        #[command(flatten)]
        args: A,
    }

    /// The arguments of a command line.
    pub fn parsed<A: Args>(line: &str) -> Result<A, clap::Error> {
        let words = std::iter::once("command").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line: Line<A>| line.args)
    }

    pub fn assert_words(text: &str, words: &[&str]) {
        for words in words {
            assert!(text.contains(words), "{words:?} in\n{text}");
        }
    }

    /// The text of a page of `docs`.
    pub fn page(name: &str) -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/");
        std::fs::read_to_string(format!("{path}{name}")).unwrap()
    }

    /// Asserts that a page names exactly the keys of these reports, a line each between backquotes,
    /// with their types.
    pub fn assert_page(name: &str, reports: &[impl Report]) {
        assert_page_with(name, reports, |key| Some(key.to_owned()));
    }

    /// The same; `shared` maps a key to its name on the page, or to none where another page has it.
    pub fn assert_page_with(name: &str, reports: &[impl Report], shared: impl Fn(&str) -> Option<String>) {
        let mut written = BTreeSet::new();
        for report in reports {
            collect(&serde_json::from_str(&report.json()).unwrap(), "", &mut written);
        }
        let page = page(name);
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
        let documented: BTreeMap<&str, &str> =
            rows.map(|(key, row)| (key, row.split(" | ").next().unwrap())).collect();
        let written: BTreeSet<_> =
            written.into_iter().filter_map(|(key, kind)| Some((shared(&key)?, kind))).collect();
        let keys: BTreeSet<&str> = written.iter().map(|(key, _)| &key[..]).collect();
        assert_eq!(documented.keys().copied().collect::<BTreeSet<_>>(), keys);
        for (key, kind) in &written {
            assert!(documented[&key[..]].contains(kind), "{key} is {kind}, not {}", documented[&key[..]]);
        }
    }

    /// Dotted paths of all keys, with the types of their values; elements of a list share theirs.
    fn collect(value: &Value, path: &str, into: &mut BTreeSet<(String, &'static str)>) {
        value.as_array().into_iter().flatten().for_each(|element| collect(element, path, into));
        for (key, value) in value.as_object().into_iter().flatten() {
            collect(value, &format!("{path}{key}."), into);
            let kind = match value {
                Value::Null => "null",
                Value::Bool(_) => "boolean",
                Value::Number(number) if number.is_f64() => "number",
                Value::Number(_) => "integer",
                Value::String(_) => "string",
                Value::Array(_) => "list",
                Value::Object(_) => "object",
            };
            into.insert((format!("{path}{key}"), kind));
        }
    }
}
