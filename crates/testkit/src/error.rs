//! Failures of the kit itself, and of checks of a device. What calls give instead of the expected
//! is a [`Difference`](crate::difference::Difference), and no error.

use std::time::Duration;

use sidelane::error::{DeviceError, GateError, PlanError};

/// A failure while a case is played or a device is checked.
#[derive(Debug, thiserror::Error)]
pub enum TestError {
    /// The library reports an error.
    #[error(transparent)]
    Library(#[from] sidelane::Error),

    /// A wait has lasted too long.
    #[error("{what} did not end within {waited:?}")]
    Stuck {
        /// Subject of the wait.
        what: String,
        /// Time so far.
        waited: Duration,
    },

    /// A call of a case needs something that is not there.
    #[error("{0}")]
    Lacks(&'static str),

    /// A device gives another result than the expected.
    #[error("{0}")]
    Wrong(String),

    /// A rank of a world of threads panicked.
    #[error("a rank panicked")]
    Panicked,
}

impl From<PlanError> for TestError {
    fn from(error: PlanError) -> Self {
        TestError::Library(error.into())
    }
}

impl From<GateError> for TestError {
    fn from(error: GateError) -> Self {
        TestError::Library(error.into())
    }
}

impl From<DeviceError> for TestError {
    fn from(error: DeviceError) -> Self {
        TestError::Library(error.into())
    }
}
