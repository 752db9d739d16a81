//! Where results go: files, and standard output that may be a pipe: `sidelane doctor | head` is no error.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{CliError, failed};

/// Writes a report; a reader that has seen enough is not an error.
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

/// Finds out whether files can be written, before there is anything to lose. One that was not there is not there afterwards.
pub fn claim<'p>(paths: impl IntoIterator<Item = &'p PathBuf>) -> Result<(), CliError> {
    for path in paths {
        let there = path.exists();
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
        opened.map_err(|source| failed!("cannot write {path:?}: {source}"))?;
        if !there {
            // What cannot be taken away is written over.
            let _ = std::fs::remove_file(path);
        }
    }
    Ok(())
}

/// Writes a file.
pub fn write(path: &Path, text: &str) -> Result<(), CliError> {
    std::fs::write(path, text).map_err(|source| failed!("cannot write {path:?}: {source}"))
}
