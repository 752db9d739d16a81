//! Others that are measured beside us: what can go wrong with them, and what is said of one that cannot run.

use std::io;
use std::process::{Child, Command};

use serde::{Deserialize, Serialize};

use crate::error::{CliError, failed};

/// One that could not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    pub name: String,
    pub why: String,
    pub install: String,
}

impl Unavailable {
    /// The peer of this name, which could be had in this way.
    pub fn new(name: &str, why: &CliError, install: &str) -> Self {
        Unavailable { name: name.into(), why: why.to_string(), install: install.into() }
    }

    /// As people read it.
    pub fn text(&self) -> String {
        let Unavailable { name, why, install } = self;
        format!("{name} did not run: {why}; to have it: {install}")
    }
}

/// Starts a program; a missing one is told apart.
pub fn start(command: &mut Command) -> Result<Child, CliError> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.spawn().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => failed!("there is no {program}"),
        _ => failed!("cannot run {program}: {source}"),
    })
}
