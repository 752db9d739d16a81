//! Errors of the rows room.

/// An instruction set was asked for by name and cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum SimdError {
    /// No set has this name.
    #[error("no instruction set is called {name:?}: portable, avx2 and avx512 are")]
    Unknown {
        /// The name as given.
        name: String,
    },
    /// The set exists, but not on this CPU.
    #[error("the instruction set {name} was asked for, but this CPU lacks {needs}")]
    Missing {
        /// The set.
        name: &'static str,
        /// The CPU features it needs.
        needs: &'static str,
    },
}
