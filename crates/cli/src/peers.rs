//! Others that are measured beside us: what can go wrong with them, and what is said of one that cannot run.

use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};

use serde::{Deserialize, Serialize};

/// A peer that does not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Its software is not there.
    #[error("there is no {program}")]
    Missing { program: String },

    /// A program that should start it or make it could not run.
    #[error("cannot run {program}: {source}")]
    Run { program: String, source: io::Error },

    /// It ended before it was told to.
    #[error("{program} ended with {status}: {last}")]
    Ended { program: String, status: ExitStatus, last: String },

    /// Not all of its processes have come.
    #[error("{came} of {ranks} processes of {program} have come after {seconds} s")]
    Late { program: String, came: usize, ranks: usize, seconds: u64 },

    /// It has not ended.
    #[error("{program} has not ended after {seconds} s")]
    Slow { program: String, seconds: u64 },

    /// What one of its processes says is not what it should say.
    #[error("process {rank} of {program} does not answer as it should: {source}; its last words: {last}")]
    Answer { program: String, rank: usize, source: io::Error, last: String },

    /// What it prints is not what it used to print.
    #[error("{program} printed {printed:?}, where figures should be")]
    Figures { program: String, printed: String },

    /// The folder by which it is told what to do.
    #[error("cannot {what} {path:?}: {source}")]
    Folder { what: &'static str, path: PathBuf, source: io::Error },
}

/// One that could not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    pub name: String,
    pub why: String,
    pub install: String,
}

impl Unavailable {
    /// The peer of this name, which could be had in this way.
    pub fn new(name: &str, why: &PeerError, install: &str) -> Self {
        Unavailable { name: name.into(), why: why.to_string(), install: install.into() }
    }

    /// As people read it.
    pub fn text(&self) -> String {
        let Unavailable { name, why, install } = self;
        format!("{name} did not run: {why}; to have it: {install}")
    }
}

/// Starts a program; a missing one is told apart.
pub fn start(command: &mut Command) -> Result<Child, PeerError> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.spawn().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => PeerError::Missing { program },
        _ => PeerError::Run { program, source },
    })
}
