//! Failures of the kit itself. What calls give instead of the expected is a
//! [`Difference`](crate::difference::Difference), and no error.

use std::time::Duration;

use sidelane::error::{DeviceError, PlanError};

/// A failure while a case is played.
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

    /// A rank of a world of threads panicked.
    #[error("a rank panicked")]
    Panicked,
}

impl From<PlanError> for TestError {
    fn from(error: PlanError) -> Self {
        TestError::Library(error.into())
    }
}

impl From<DeviceError> for TestError {
    fn from(error: DeviceError) -> Self {
        TestError::Library(error.into())
    }
}
