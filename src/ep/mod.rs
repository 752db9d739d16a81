//! Expert parallelism: dispatch, combine, and their gradients.
//!
//! ```text
//!   tokens [T, H] --dispatch--> rows of my experts --experts--> outputs --combine--> tokens [T, H]
//!                     |                                            ^
//!                     +--> Handle: the placement ------------------+   combine, cached dispatch, both backwards
//! ```
//!
//! One [`ExpertParallel`] has its rows on the host or on a device ([`Place`]), by a setting of its
//! builder. The calls, their handles, outputs, reports and errors are the same; what carries them
//! out differs ([`CallExecutor`]), and so does, for now, what they can do ([`Feature`]).
//!
//! [`prepare`](ExpertParallel::prepare) makes the layout alone, before there are tokens; a cached
//! dispatch then brings the rows.
//!
//! [`RowCollective`] is all-gather and reduce-scatter by the same programs, and [`TokenSlices`]
//! uses them for a tensor-parallel group. A dispatch may itself go out by all-gather
//! ([`Strategy::Gather`](crate::plan::Strategy)).
//!
//! | forward | backward |
//! |---|---|
//! | [`dispatch`](ExpertParallel::dispatch) | [`dispatch_backward`](ExpertParallel::dispatch_backward): sum of row gradients, row-weight gradients to `[T, K]` |
//! | [`combine`](ExpertParallel::combine) | [`combine_backward`](ExpertParallel::combine_backward): token gradients to rows along the cached layout |
//! | weighted combine | the same, times the row weight; weight gradients `<y, g>` to `[T, K]` |
//! | dropped choice, pad row | zero |
//!
//! All calls of one [`ExpertParallel`] are collective over its group and come in the same order on
//! all ranks. A rank whose input is refused still enters the call, so that all ranks get an error
//! and nothing moves anywhere.
//!
//! | module | subject |
//! |---|---|
//! | `builder`, `features` | settings, and what serves them |
//! | `expert_parallel`, `tensor` | the calls, checked and handed to a place |
//! | `handle`, `rows`, `report` | what calls return |
//! | `state`, `call_agreement`, `relay`, `row_metadata` | of both places: what never changes, tags and counts of all ranks, rows that a rank copies for its node, words behind the rows |
//! | `host`, `device` | the two places |
//! | `row_collective` | all-gather and reduce-scatter of rows |
//! | `floor_bench` | the same bytes, moved by bare loops |
//! | `footprints` | tests: accesses of real calls next to those of the proof |

mod builder;
mod call_agreement;
mod device;
mod expert_parallel;
mod features;
mod floor_bench;
#[cfg(test)]
mod footprints;
mod handle;
mod host;
mod relay;
mod report;
mod row_collective;
mod row_metadata;
mod rows;
mod state;
mod tensor;

pub use builder::{ExpertParallelBuilder, Graphs};
pub(crate) use device::HeapLoad;
pub use device::{DeviceHeapReport, HeapAllocator};
pub use expert_parallel::ExpertParallel;
pub use features::Feature;
pub use row_collective::{RowCollective, RowCollectiveBuilder, RowPartition, TokenSlices};
// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub use floor_bench::FloorBench;
pub use handle::{Handle, PendingCombine, PendingDispatch};
#[doc(hidden)]
pub use report::MAX_KERNELS;
pub use report::{CallExecutor, LaneUse, Report, Status};
pub use row_metadata::{RowIndex, Strided};
pub use rows::{CombineInput, ExpertOutput, ExpertRows, TokenBuffer};
pub use tensor::{Choices, Place, Tensor, TensorMut};
