//! What a check can come to, other than right.

use std::time::Duration;

use sidelane::error::{DeviceError, PlanError};

use crate::error::CliError;

/// Why a check is not right.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The driver, or the library's face of it.
    #[error(transparent)]
    Device(#[from] DeviceError),

    /// The library.
    #[error(transparent)]
    Library(#[from] sidelane::Error),

    /// Bytes that are not what they must be.
    #[error("{what}: byte {at} of {len} is {seen:#04x} and must be {expected:#04x}")]
    Differs { what: String, at: usize, len: usize, seen: u8, expected: u8 },

    /// A number that is not what it must be.
    #[error("{what} is {seen} and must be {expected}")]
    Other { what: String, seen: u64, expected: u64 },

    /// Something that did not come to its end.
    #[error("{what} did not end within {waited:?}")]
    Late { what: String, waited: Duration },

    /// Ranks that are processes of their own.
    #[error("{0}")]
    Ranks(String),

    /// Rows could not be told.
    #[error("{0}")]
    Told(Box<CliError>),
}

impl From<CliError> for CheckError {
    fn from(error: CliError) -> Self {
        CheckError::Told(Box::new(error))
    }
}

impl From<PlanError> for CheckError {
    fn from(error: PlanError) -> Self {
        CheckError::Library(error.into())
    }
}

/// Compares bytes.
pub fn same(what: impl Into<String>, seen: &[u8], expected: &[u8]) -> Result<(), CheckError> {
    equal("bytes", seen.len() as u64, expected.len() as u64)?;
    match seen.iter().zip(expected).position(|(seen, expected)| seen != expected) {
        None => Ok(()),
        Some(at) => Err(CheckError::Differs {
            what: what.into(),
            at,
            len: seen.len(),
            seen: seen[at],
            expected: expected[at],
        }),
    }
}

/// Compares numbers.
pub fn equal(what: impl Into<String>, seen: u64, expected: u64) -> Result<(), CheckError> {
    if seen == expected { Ok(()) } else { Err(CheckError::Other { what: what.into(), seen, expected }) }
}
