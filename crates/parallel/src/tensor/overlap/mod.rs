//! Products of sequence parallel layers next to their transfers, token chunk by token chunk.
//!
//! Each rank cuts its tokens into the same number of chunks. One collective call moves a chunk of
//! every rank, next to the products of another:
//!
//! ```text
//!   ColumnForward    transfer   compare  gather 0    gather 1    gather 2
//!   (RowBackward)    compute    own rows           multiply 0  multiply 1  multiply 2  (weights)
//!
//!   RowForward       transfer   compare            reduce 0    reduce 1    reduce 2
//!                    compute    multiply 0  multiply 1  multiply 2
//!
//!   ColumnBackward   transfer   compare  gather 0  gather 1  gather 2  reduce 0  reduce 1  reduce 2
//!                    compute    multiply 0  multiply 1  multiply 2     weights
//! ```
//!
//! **Order of chunks.** TransformerEngine's chunks are the tokens of a rank, ours are a part of the
//! tokens of every rank:
//!
//! | | TransformerEngine, on rank `r` of `P` | here, on every rank |
//! |---|---|---|
//! | all-gather and product | `split_overlap_ag`, a ring: chunks of ranks r, r-1, .. r+1; its aggregate mode takes two at once, for even `P` | own tokens, then chunks 0, 1, .. of all other ranks |
//! | product and reduce-scatter | `split_overlap_rs`, point to point: chunks for ranks r+1, r+2, .. r; own first in the sum, then by arrival | chunks 0, 1, .. for all ranks; sums by ascending rank |
//! | gather next to the gradient of inputs, reduce-scatter next to that of weights | bulk overlap: one transfer each | `gather` and `reduce` in chunks |
//!
//! So the number of chunks and their size do not depend on the number of ranks, a transfer is one
//! step between any two ranks instead of `P - 1` steps of a ring, and every chunk is a collective
//! call, on which all ranks agree.
//!
//! **Bits.** A row of a product depends on its row alone, sums over ranks are by ascending rank,
//! and gradients of weights are one product of all tokens. So chunks change no bit.
//!
//! **Time.** [`Plan::times`] has the time of a plan from that of each step, as `sidelane simulate`
//! predicts it.
//!
//! **Proof.** A [`Plan`] is a function of the pass and the number of chunks. [`Plan::prove`] walks
//! it for every rank of a group.

mod plan;
mod prove;
mod run;
mod time;

pub use plan::{LinearPass, Plan, Step, Work};
pub use prove::Cell;
pub(super) use run::{Pass, Rows, first_call};
