//! Slots on a stream: a dispatch and a combine that a CUDA stream runs alone, and that a graph can
//! hold.
//!
//! Every rank has a fixed slot at every other, rank-major. No rank counts or plans, so every
//! address, every size and every flag value is a constant. Kernels do the arithmetic. The caller
//! runs the experts. The program of a call ([`SlotCall`](crate::schedule::call::SlotCall)) states
//! when the others run:
//!
//! ```text
//!   rank s                                               rank d
//!   pack: rows -> send[d], own rows -> receive[s]
//!   Put      send[d]  ---------------------------------> receive[s]         dispatch: one batch of copies,
//!   Signal   landed[s] = 1  ---------------------------> landed[s]            then one list of memory operations
//!   Wait     landed[p] >= 1, of every p
//!   Signal   own landed[p] = 0
//!   experts: receive[p] -> partial[p]
//!   Put      partial[d]  ------------------------------> home[s]            combine: the same again
//!   Signal   home[s] = 1  -----------------------------> home[s]
//!   Wait     home[p] >= 1, of every p
//!   Signal   own home[p] = 0
//!   sum: own partial[s], home[p] -> tokens
//! ```
//!
//! Flags have a credit of one: a word is raised to 1, awaited, and reset by its owner. No other
//! words are needed: dispatch and combine alternate, so each signal grants the next write:
//!
//! ```text
//!   home of p, heard by s      p's experts have read receive[s]      s may put its next rows there
//!                              p has set its landed[s] back          s may raise it again
//!   landed of p, heard by s    p has summed what lay in home[s]      s may put its next partials there
//!                              p has set its home[s] back            s may raise it again
//! ```
//!
//! Between nodes a stream moves nothing: a host thread does, at the stream's request
//! ([`StreamProgram::across`]).
//!
//! A dispatch that no combine follows is ended by a release: the combine without its puts. Several
//! microbatches may be in flight, each with windows and flags of its own. **All ranks enqueue calls
//! in the same order.** Streams may share a hardware queue, where a blocked wait blocks later
//! operations: two ranks that enqueue two dispatches in different orders then wait for each other
//! forever.

mod across;
mod enqueue;
mod program;
mod slots;

pub use across::{ProxyProgram, RowPath};
pub use enqueue::{PeerCopy, Piece, WordOp};
pub use program::StreamProgram;
pub use slots::Slots;
