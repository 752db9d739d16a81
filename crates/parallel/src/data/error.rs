//! Errors of data parallelism, with data in fields.

use sidelane::Error;

use super::checkpoint::CheckpointError;

/// Why a layout, a pass or a checkpoint was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A layout without parameters, or a layer without any.
    #[error("{what} has no parameters")]
    NoParameters {
        /// The layout, or the layer.
        what: String,
    },
    /// A parameter without elements.
    #[error("parameter {parameter} has no elements")]
    NoElements {
        /// The parameter.
        parameter: usize,
    },
    /// More elements than memory has addresses for.
    #[error("the parameters up to {parameter} have too many elements to be counted")]
    TooLarge {
        /// The parameter at which the count overflows.
        parameter: usize,
    },
    /// A number that cannot be used.
    #[error("{setting} = {seen}: expected {expected}")]
    BadSetting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        seen: f64,
        /// Description of a right value.
        expected: &'static str,
    },
    /// A slice of the wrong length.
    #[error("{what}: {seen} elements, expected {expected}")]
    WrongLength {
        /// Which slice.
        what: String,
        /// Elements found.
        seen: usize,
        /// Elements expected.
        expected: usize,
    },
    /// A gradient of a parameter that the layout does not have.
    #[error("a gradient of parameter {parameter}: the layout has {parameters} parameters")]
    UnknownParameter {
        /// The parameter.
        parameter: usize,
        /// Parameters of the layout.
        parameters: usize,
    },
    /// A second gradient of a parameter in a backward pass.
    #[error("the gradient of parameter {parameter} comes twice")]
    GradientTwice {
        /// The parameter.
        parameter: usize,
    },
    /// A backward pass that ended without a gradient.
    #[error("the backward pass has ended without the gradient of parameter {parameter}")]
    GradientMissing {
        /// The parameter.
        parameter: usize,
    },
    /// A step of the optimizer without a backward pass before it.
    #[error("there are no gradients: a complete backward pass comes before each step")]
    NoGradients,
    /// A communicator of another group than the one that this was built for.
    #[error("built for rank {rank} of {ranks}, but the communicator is of rank {seen_rank} of {seen_ranks}")]
    OtherGroup {
        /// This rank.
        rank: u32,
        /// Ranks of the group.
        ranks: u32,
        /// Rank of the communicator.
        seen_rank: u32,
        /// Ranks of the communicator.
        seen_ranks: u32,
    },
    /// A checkpoint that cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A collective call failed, or the caller's code did. If another rank was refused, it is
    /// [`PeerRefused`](sidelane::error::CallError::PeerRefused). If ranks chose differently, it is
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer).
    #[error(transparent)]
    Call(#[from] Error),
}
