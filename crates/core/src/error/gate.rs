//! Bad input of a router.

use crate::dtype::Dtype;

/// What a gate refuses: a configuration, a call, or the arrays of one. Then the gate decides
/// nothing and writes nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum GateError {
    /// A logit that is not finite.
    #[error("token {token}, expert {expert}: the logit is {seen}")]
    NotFinite {
        /// The token.
        token: u32,
        /// The expert.
        expert: u32,
        /// What was found.
        seen: f32,
    },
    /// An array has the wrong number of elements.
    #[error("{what}: {seen} elements, expected {rows} x {columns}")]
    WrongShape {
        /// Which array.
        what: &'static str,
        /// Elements found.
        seen: usize,
        /// Rows expected.
        rows: usize,
        /// Elements per row.
        columns: usize,
    },
    /// A number that cannot be used.
    #[error("{parameter} = {seen}: {expected}")]
    BadNumber {
        /// The parameter.
        parameter: &'static str,
        /// Its value.
        seen: f64,
        /// What would be right.
        expected: &'static str,
    },
    /// Two settings that exclude each other.
    #[error("{one} and {other} cannot both be set: {why}")]
    Conflict {
        /// The first.
        one: &'static str,
        /// The second.
        other: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// A recorded choice that cannot be replayed.
    #[error(
        "token {token}, choice {k}: expert {expert} was recorded, but there are 0..{experts}, and each at most once"
    )]
    BadReplay {
        /// The token.
        token: u32,
        /// Which of its choices.
        k: u32,
        /// The id found.
        expert: i32,
        /// Number of experts.
        experts: u32,
    },
    /// Rows of bytes, where numbers are needed.
    #[error("there is no arithmetic on rows of {dtype}")]
    NoArithmetic {
        /// The type.
        dtype: Dtype,
    },
    /// A choice of an expert that does not exist, or a second choice of the same one.
    #[error("token {token}, choice {k}: expert {expert} is not among 0..{experts}, or chosen twice")]
    BadChoice {
        /// The token.
        token: u32,
        /// Which of its choices.
        k: u32,
        /// The id found.
        expert: i32,
        /// Number of experts.
        experts: u32,
    },
    /// An element of an array that is not finite.
    #[error("{what}, row {row}, column {column}: {seen}")]
    BadElement {
        /// Which array.
        what: &'static str,
        /// The row.
        row: usize,
        /// The column.
        column: usize,
        /// What was found.
        seen: f32,
    },
}
