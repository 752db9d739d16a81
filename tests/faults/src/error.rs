//! Faults of this program itself: what it needs of the machine and does not get.

use std::io;

/// This program's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The machine does not let a fault be made, or a rank be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the kernel's, or of the caller's.
    #[error("{path}: {source}")]
    File {
        /// Where it is.
        path: String,
        /// The reason.
        source: io::Error,
    },
    /// A system call.
    #[error("{call}: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// A program that is needed does not start.
    #[error("{program} does not start: {source} (Debian: apt-get install {package})")]
    Tool {
        /// Its name.
        program: &'static str,
        /// The package that has it.
        package: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// A program failed.
    #[error("{line}: {stderr}")]
    Failed {
        /// Its command line.
        line: String,
        /// Its complaint.
        stderr: String,
    },
    /// The ranks did not come to the phase in which a fault was to strike.
    #[error("before any fault: {what}")]
    NotReady {
        /// What was seen instead.
        what: String,
    },
    /// A round of a soak ended in another error.
    #[error("{round}: {source}")]
    Round {
        /// The round, in words.
        round: String,
        /// The reason.
        source: Box<Error>,
    },
    /// Nothing is left to run.
    #[error("no cell is left of --only {words}: name faults, phases or lanes of one row of the table")]
    NoCell {
        /// The words of the caller.
        words: String,
    },
}

/// Gives an I/O error the call or the file that it is about.
pub trait About<T> {
    /// It came from this call.
    fn of_call(self, call: &'static str) -> Result<T>;
    /// It is about this file.
    fn of_file(self, path: impl Into<String>) -> Result<T>;
}

impl<T, E: Into<io::Error>> About<T> for Result<T, E> {
    fn of_call(self, call: &'static str) -> Result<T> {
        self.map_err(|source| Error::System { call, source: source.into() })
    }

    fn of_file(self, path: impl Into<String>) -> Result<T> {
        self.map_err(|source| Error::File { path: path.into(), source: source.into() })
    }
}
