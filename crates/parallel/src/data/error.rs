//! Errors of data parallelism, with data in fields.

use std::io;

use sidelane::Error;

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
    /// A parameter that the layout does not have.
    #[error("no parameter {parameter}: the layout has {parameters} parameters")]
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
    /// A checkpoint that cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A collective call failed, or the caller's code did. If another rank was refused, it is
    /// [`PeerRefused`](sidelane::error::CallError::PeerRefused). If ranks chose differently, it is
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer).
    #[error(transparent)]
    Call(#[from] Error),
}

/// Why a checkpoint cannot be written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The writer failed, or a reader did, for example because a shard ends early.
    #[error("shard {shard}: {message}")]
    Io {
        /// Rank that writes, or position of the reader.
        shard: usize,
        /// Kind of the failure.
        kind: io::ErrorKind,
        /// Its message.
        message: String,
    },
    /// The bytes do not begin as a shard does.
    #[error("reader {reader} is not of a shard")]
    NotAShard {
        /// Position of the reader.
        reader: usize,
    },
    /// A shard of another model.
    #[error("reader {reader} is of a model of {seen} elements, this one has {expected}")]
    OtherModel {
        /// Position of the reader.
        reader: usize,
        /// Elements of its model.
        seen: u64,
        /// Elements of this model.
        expected: u64,
    },
    /// Shards of different checkpoints.
    #[error("reader {reader} is of another checkpoint than the first: {what} = {seen}, not {expected}")]
    OtherCheckpoint {
        /// Position of the reader.
        reader: usize,
        /// Which number differs.
        what: &'static str,
        /// Its value.
        seen: u64,
        /// Its value in the first shard.
        expected: u64,
    },
    /// A run that lies outside the parameters, or not behind the one before it.
    #[error("reader {reader}: a run of {len} elements from {first} is out of order or out of range")]
    BadRun {
        /// Position of the reader.
        reader: usize,
        /// First element.
        first: u64,
        /// Elements.
        len: u64,
    },
    /// A digest that differs.
    #[error("reader {reader}: the digest is {seen:#x}, that of the bytes is {expected:#x}")]
    Damaged {
        /// Position of the reader.
        reader: usize,
        /// The digest in the shard.
        seen: u64,
        /// The digest of its bytes.
        expected: u64,
    },
    /// Another number of shards than ranks wrote.
    #[error("{seen} shards of a checkpoint of {ranks}")]
    Shards {
        /// Shards that were given.
        seen: usize,
        /// Ranks that wrote the checkpoint.
        ranks: u64,
    },
    /// An element that two shards have, or none.
    #[error("element {element} is in {} shards", if *.twice { "two" } else { "no" })]
    NotOnce {
        /// The element.
        element: usize,
        /// Whether it comes twice.
        twice: bool,
    },
}
