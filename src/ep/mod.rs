//! Expert parallelism: dispatch, combine, and their gradients.
//!
//! ```text
//!   tokens [T, H] --dispatch--> rows of my experts --experts--> outputs --combine--> tokens [T, H]
//!                     |                                            ^
//!                     +--> Handle: the placement ------------------+   combine, cached dispatch, both backwards
//! ```
//!
//! A dispatch on the host, in the caller's thread; a relay, where there are other nodes, plays its part in between:
//!
//! ```text
//!   start    release: peers have read what I offered last; announce free memory; publish counts; signal
//!   finish   everybody's counts are here: check that all make the same call, place, put rows, wait for mine
//! ```
//!
//! [`prepare`](ExpertParallel::prepare) makes the layout alone, before there are tokens; a cached dispatch then brings the rows.
//!
//! Beside it, [`Collective`] is all-gather and reduce-scatter by the same programs, [`TokenSlices`] what is made of them for
//! a tensor-parallel group; and a dispatch may itself go out by all-gather ([`Strategy::Gather`](crate::plan::Strategy)). On
//! GPUs, [`planned`] does dispatch and combine beside a stream.
//!
//! | forward | backward |
//! |---|---|
//! | [`dispatch`](ExpertParallel::dispatch) | [`dispatch_backward`](ExpertParallel::dispatch_backward): sum of row gradients, row-weight gradients to `[T, K]` |
//! | [`combine`](ExpertParallel::combine) | [`combine_backward`](ExpertParallel::combine_backward): token gradients to rows along the cached layout |
//! | weighted combine | the same, times the row weight; weight gradients `<y, g>` to `[T, K]` |
//! | dropped choice, pad row | zero |
//!
//! All calls of one [`ExpertParallel`] are collective over its group and come in the same order on all ranks. A rank
//! whose input is refused still enters the call, so that all ranks get an error and nothing moves anywhere.

mod agreement;
mod backward;
mod buffers;
mod builder;
mod collective;
mod combine;
mod dispatch;
mod fixed;
mod flight;
mod floor;
mod gather;
mod guard;
mod handle;
mod host_call;
mod index;
mod notes;
mod offload;
mod parallel;
mod passage;
pub mod planned;
mod prepare;
mod records;
mod refuse;
mod relay;
mod remap;
mod slices;
pub mod stream;
mod workspace;

pub use buffers::{Contribution, ExpertOutput, ExpertRows, TokenBuffer};
pub use builder::ExpertParallelBuilder;
pub use collective::{Collective, CollectiveBuilder, Shares};
pub use combine::PendingCombine;
pub use dispatch::PendingDispatch;
pub use floor::Yardstick;
pub use handle::{Handle, LaneUse, Report};
pub use index::RowIndex;
pub use parallel::ExpertParallel;
pub use records::Strided;
pub use slices::TokenSlices;
pub use stream::{StreamExchange, StreamExchangeBuilder, StreamReport, StreamTokens};
