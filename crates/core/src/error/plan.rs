//! Bad input of a call, found before anything moves.

use crate::dtype::Dtype;

/// The input of a call is wrong. Every rank of the group gets an error for that call, nothing is
/// moved, and the world stays usable.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum PlanError {
    /// An expert id that does not exist.
    #[error("token {token}, choice {k}: expert {expert} is out of range (0..{experts}, or -1 for dropped)")]
    ExpertOutOfRange {
        /// The token.
        token: u32,
        /// Which of its choices.
        k: u32,
        /// The id found.
        expert: i32,
        /// Number of experts.
        experts: u32,
    },
    /// A token names an expert twice.
    #[error("token {token} names expert {expert} twice")]
    ExpertTwice {
        /// The token.
        token: u32,
        /// The expert.
        expert: i32,
    },
    /// A routing weight that is not a number.
    #[error("token {token}, choice {k}: the weight is not a number")]
    NanWeight {
        /// The token.
        token: u32,
        /// Which of its choices.
        k: u32,
    },
    /// More tokens than the group was built for.
    #[error("{tokens} tokens, but at most {max} were promised: raise max_tokens")]
    TooManyTokens {
        /// Tokens in the call.
        tokens: u32,
        /// The promise.
        max: u32,
    },
    /// More rows than there are slots for, and none may be dropped.
    #[error("{rows} rows for bin {bin}, but only {slots} slots: raise the slots, or let rows be dropped")]
    SlotsFull {
        /// The expert slot or, rank-major, the rank.
        bin: u32,
        /// Rows for it.
        rows: u32,
        /// Slots of each source in each bin.
        slots: u32,
    },
    /// A tensor has the wrong number of elements.
    #[error("{what}: {seen} elements, expected {rows} rows x {columns}")]
    WrongShape {
        /// Which tensor.
        what: &'static str,
        /// Elements found.
        seen: usize,
        /// Rows expected.
        rows: usize,
        /// Elements per row.
        columns: usize,
    },
    /// A tensor has the wrong element type.
    #[error("{what}: elements are {seen}, the group was built for {expected}")]
    WrongDtype {
        /// Which tensor.
        what: &'static str,
        /// Type found.
        seen: Dtype,
        /// Type expected.
        expected: Dtype,
    },
    /// A tensor, handle or query that belongs to the other kind of memory: host instead of device,
    /// or the reverse.
    #[error("{what}: of {seen}, expected of {expected}")]
    WrongPlace {
        /// The tensor, or the query.
        what: &'static str,
        /// Its place.
        seen: &'static str,
        /// The place it should be in.
        expected: &'static str,
    },
    /// A feature that instances of this place do not have yet.
    #[error("not available on {place} ({executor}): {feature}")]
    NotAvailable {
        /// The feature.
        feature: &'static str,
        /// The place of the instance.
        place: &'static str,
        /// The executor that serves its settings there.
        executor: &'static str,
    },
    /// Rows of this type cannot be summed.
    #[error("rows of type {dtype} can be dispatched but not summed")]
    NoArithmetic {
        /// The type.
        dtype: Dtype,
    },
    /// A parameter that cannot be used.
    #[error("{parameter} = {seen}: {expected}")]
    BadParameter {
        /// The parameter.
        parameter: &'static str,
        /// Its value.
        seen: u64,
        /// What would be right.
        expected: &'static str,
    },
    /// This rank's caller gave something that was refused before the call was laid out.
    #[error("the input was refused where the call was made")]
    RefusedHere,
    /// A thread of an instance could not be started.
    #[error("no thread could be started that watches what a stream awaits")]
    NoWatch,
    /// A thread that waits for memory was asked to end (`bootstrap::interruptible`).
    #[error("the wait for memory was interrupted by its caller")]
    Interrupted,
    /// The expert map does not fit the group.
    #[error("expert map: {problem} (expert {expert}, rank {rank})")]
    BadMap {
        /// The reason.
        problem: &'static str,
        /// The expert.
        expert: u32,
        /// The rank.
        rank: u32,
    },
}
