//! What can go wrong.

use std::path::PathBuf;

/// Any error of the trainer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Exchange between ranks.
    #[error(transparent)]
    Sidelane(#[from] sidelane::Error),
    /// Tensors.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    /// Ranks that do not make the mesh.
    #[error(transparent)]
    Mesh(#[from] sidelane_parallel::MeshError),
    /// A strategy that does not fit together.
    #[error(transparent)]
    Strategy(#[from] crate::mesh::StrategyError),
    /// The pipeline's plan, or a step of it.
    #[error(transparent)]
    Pipeline(#[from] sidelane_parallel::PipelineError),
    /// Data parallelism.
    #[error(transparent)]
    Data(#[from] sidelane_parallel::data::DataError),
    /// A backward pass before its forward pass.
    #[error("microbatch {microbatch} comes backward before it has come forward")]
    NoForward {
        /// The microbatch.
        microbatch: u32,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("{path}: {source}", path = path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A page without a body.
    #[error("{path} has no <main>", path = path.display())]
    NoBody {
        /// Which.
        path: PathBuf,
    },
    /// No text was given, and the toolchain has no page.
    #[error(
        "no text was given, and rustc could not say where its book lies (rustup component add rust-docs)"
    )]
    NoText,
    /// Too little text.
    #[error("{seen} tokens, at least {needed} are needed")]
    TooShort {
        /// Tokens of the text.
        seen: usize,
        /// Held-out ones and two windows.
        needed: usize,
    },
    /// Numbers that do not go together.
    #[error("{what}: {seen} is not a multiple of {of}")]
    NotMultiple {
        /// What.
        what: &'static str,
        /// The number.
        seen: usize,
        /// A divisor of the size, which is not zero.
        of: usize,
    },
    /// A number that is too small for anything to be learned.
    #[error("{what}: {seen}, at least {least} are needed")]
    TooFew {
        /// What.
        what: &'static str,
        /// The number.
        seen: usize,
        /// The smallest that will do.
        least: usize,
    },
    /// A number that is too large.
    #[error("{what}: {seen}, at most {most} are allowed")]
    TooMany {
        /// What.
        what: &'static str,
        /// The number.
        seen: u128,
        /// The largest that will do.
        most: u128,
    },
    /// A coefficient with which nothing can be learned.
    #[error("{what}: {seen} is not a number from 0 on")]
    NotANumber {
        /// Which.
        what: &'static str,
        /// The number.
        seen: f64,
    },
    /// A process that plays all ranks is one of several.
    #[error("--reference plays all ranks in one process, and this is one of {ranks}")]
    NotAlone {
        /// Processes.
        ranks: usize,
    },
    /// A checkpoint of a run with other settings.
    #[error("{path} is of another run: {what} differs", path = path.display())]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        what: &'static str,
    },
    /// A checkpoint lacks a tensor, or has it in another size.
    #[error("{path} has no {name} of {values} values", path = path.display())]
    Missing {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its size.
        values: usize,
    },
    /// A checkpoint has a tensor in two files.
    #[error("{path} has {name} again", path = path.display())]
    Twice {
        /// The second file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// Another rank cannot go on.
    #[error("rank {rank}: {said}")]
    Elsewhere {
        /// The first that cannot.
        rank: usize,
        /// Why.
        said: String,
    },
    /// A rank has written a file, and the first rank does not see it.
    #[error("{path} was written by a rank and is not here: --out must be one folder for all ranks", path = path.display())]
    NotShared {
        /// The file.
        path: PathBuf,
    },
    /// Ranks would go on from different checkpoints.
    #[error(
        "rank {rank} would go on from {seen:?}, rank 0 from {expected:?}: --out must be one folder for all ranks"
    )]
    OtherCheckpoint {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The names that it found; empty if none.
        seen: String,
        /// What rank 0 found; empty if nothing.
        expected: String,
    },
    /// Experts were on lost ranks alone, and their copies, too.
    #[error("no rank has expert {expert} any more: go on from the last checkpoint (--resume)")]
    NoCopy {
        /// The first of them.
        expert: usize,
    },
    /// Survivors of different worlds: one was lost when only some of its ranks had gone on.
    #[error("ranks were lost while the others met: go on from the last checkpoint (--resume)")]
    WorldsDiffer,
    /// A loss that is NaN or infinite: weights have grown too large, or the learning rate is too
    /// high.
    #[error("{what} is {loss}, after {steps} steps")]
    NotFinite {
        /// Which.
        what: &'static str,
        /// The loss.
        loss: f32,
        /// Steps that were made.
        steps: usize,
    },
    /// There is no checkpoint to go on from, or none that has all its files.
    #[error("{path} has no whole checkpoint", path = path.display())]
    NoCheckpoint {
        /// Where it was looked for.
        path: PathBuf,
    },
}

/// Result of the trainer.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// For `map_err`, with the file's path.
    pub fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::File { path, source }
    }

    /// For `map_err`, with the file's path.
    pub fn malformed(path: impl Into<PathBuf>) -> impl FnOnce(serde_json::Error) -> Error {
        let path = path.into();
        move |source| Error::Malformed { path, source }
    }
}
