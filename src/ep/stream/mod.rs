//! Dispatch and combine on a CUDA stream: enqueued, not waited for, and the same in every call.
//!
//! ```text
//!   caller's stream    pack  | copies, signals | waits |  experts  | check | copies, signals | waits |  sum
//!                     kernel   ---- no kernel ----      (caller's)   kernel  ---- no kernel ----      kernel
//!                            '---- dispatch ------------'            '----- combine ------------------------'
//! ```
//!
//! Rank-major slots on one node ([`SlotShape`](crate::plan::SlotShape)): each rank has a place for every token that another
//! may send it, so nothing is counted, nothing is dropped, nobody plans, and sizes and addresses never change. What small
//! batches pay for it (full slots move, used or not) is less than a count exchange costs them; for large batches it is
//! not. A graph can hold both calls: their flags are constants (`schedule::stream` says why that is safe, and proves it).
//!
//! Between *packed* and *landed* there are copies by copy engines and memory operations of the stream, and nothing else.
//! What is computed lies before and behind, and [`StreamReport`] names it.
//!
//! All ranks make the same calls in the same order. An exchange has one dispatch under way; for more microbatches, make more
//! exchanges, and enqueue their calls in the same order on all ranks.

mod builder;
mod exchange;
mod places;
mod setup;
mod turn;

pub use builder::StreamExchangeBuilder;
pub use exchange::{StreamExchange, StreamReport, StreamTokens};
