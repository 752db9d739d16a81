//! Failures of the program, and their exit statuses.

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

use sidelane::error::{DeviceError, GateError, PlanError};
use sidelane_testkit::TestError;

/// Any error that ends the program. A command words its errors itself, by `usage!`, `wrong!` and
/// `failed!`, so that a new command adds nothing here.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// Options or conditions that cannot be met: status 2, as clap has it.
    #[error("{0}")]
    Usage(String),

    /// The same, and the first rank of this machine says it for all.
    #[error("said by another rank")]
    Said,

    /// A wrong result: status 1.
    #[error("{0}")]
    Wrong(String),

    /// Something that the program needs did not work: status 1.
    #[error("{0}")]
    Failed(String),

    /// The library reports an error: status 1.
    #[error(transparent)]
    Library(#[from] sidelane::Error),

    /// A rank could not be started; those already running were killed. Status 127 for a command
    /// that does not exist and 126 for one that cannot be run, as shells have it.
    #[error("cannot start rank {rank}: {program:?}: {source}")]
    Spawn { rank: u32, program: OsString, source: io::Error },
}

macro_rules! usage {
    ($($message:tt)*) => { $crate::error::CliError::Usage(format!($($message)*)) };
}

macro_rules! wrong {
    ($($message:tt)*) => { $crate::error::CliError::Wrong(format!($($message)*)) };
}

macro_rules! failed {
    ($($message:tt)*) => { $crate::error::CliError::Failed(format!($($message)*)) };
}

pub(crate) use {failed, usage, wrong};

impl CliError {
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CliError::Usage(_) | CliError::Said => 2,
            CliError::Spawn { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            CliError::Spawn { .. } => 126,
            CliError::Wrong(_) | CliError::Failed(_) | CliError::Library(_) => 1,
        })
    }

    pub fn prepare(what: &str) -> impl Fn(io::Error) -> CliError {
        move |source| failed!("cannot {what}: {source}")
    }

    pub fn told(source: serde_json::Error) -> CliError {
        failed!("what a rank tells is not what `sidelane` writes: {source}")
    }
}

/// Sizes that options name and that cannot be planned.
impl From<PlanError> for CliError {
    fn from(error: PlanError) -> Self {
        CliError::Usage(error.to_string())
    }
}

/// A gate or a capacity that options name and that cannot be.
impl From<GateError> for CliError {
    fn from(error: GateError) -> Self {
        CliError::Usage(error.to_string())
    }
}

/// The test kit names the library's errors, and waits that do not end.
impl From<TestError> for CliError {
    fn from(error: TestError) -> Self {
        match error {
            TestError::Library(error) => CliError::Library(error),
            TestError::Wrong(found) => CliError::Wrong(found),
            other => CliError::Failed(other.to_string()),
        }
    }
}

/// The library words refusals of a GPU's driver.
impl From<DeviceError> for CliError {
    fn from(error: DeviceError) -> Self {
        CliError::Library(error.into())
    }
}
