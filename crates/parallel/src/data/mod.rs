//! Data parallelism: ranks train one model on different parts of a batch.
//!
//! ```text
//!   a rank holds            parameters   gradients   optimizer states
//!   plain (DP)              whole        whole       whole              DataParallel, Sharding::None
//!   ZeRO-1                  whole        whole       its part           DataParallel, Sharding::OptimizerStates
//!   ZeRO-2                  whole        its part    its part           DataParallel, Sharding::Gradients
//!   ZeRO-3, FSDP            its part     its part    its part           FullySharded
//! ```
//!
//! A [`Checkpoint`] has all shards in one process, for ranks whose parameters lie in another order.
//!
//! Parameters lie in a row ([`Layout`]) and travel in buckets. A rank's part of a bucket is one of
//! equal parts, so each bucket is padded for itself, and one call moves it.
//!
//! **Bits.** A mean of gradients is the sum over the ranks by ascending rank from +0
//! ([`AllReduceAlgorithm::Direct`](sidelane::collective::AllReduceAlgorithm)), and one division.
//! [`Adam`] has a fixed order of operations for each element. So all strategies give the parameters
//! of one process that does the same, to the bit, after any number of steps.
//!
//! **Microbatches.** `accumulate` takes those of a step that are not the last, and `backward` the
//! last one. Sums over microbatches ascend: on each rank before they are summed over the ranks, or
//! behind that for [`FullySharded`], which holds no more than its part.
//!
//! **Types.** All is `f32`. On the way parameters and gradients may be bf16 ([`Wire`]).
//!
//! **Overlap.** A [`Communicator`](sidelane::collective::Communicator) blocks in its calls. Passes
//! are graphs of [`sidelane::overlap`], which makes the calls on a stream of its own, next to the
//! compute of the caller. Without overlap, the same graph runs on the caller's thread, to the same
//! bits.
//!
//! **Errors.** A rank that is refused, or whose code fails, refuses the next call of the pass, if
//! one is left: the others get [`PeerRefused`](sidelane::error::CallError::PeerRefused), no
//! parameter changes, and the next pass works.

mod adam;
mod buckets;
mod checkpoint;
mod data_parallel;
mod error;
mod fully_sharded;
mod memory;
mod pass;
mod whole_checkpoint;
mod wire_dtype;

pub use adam::Adam;
pub use buckets::Layout;
pub use data_parallel::{Backward, DataParallel, Sharding};
pub use error::{CheckpointError, DataError};
pub use fully_sharded::FullySharded;
pub use memory::MemoryUsage;
pub use whole_checkpoint::Checkpoint;
pub use wire_dtype::{Wire, WireDtype};
