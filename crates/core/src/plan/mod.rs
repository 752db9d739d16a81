//! From routing and counts to placement: where every row goes, by arithmetic alone.
//!
//! ```text
//!   routing (mine)  --SortedRouting-->  rows by bin, counts[bins]     before anything is known of others
//!                                   |
//!                                   v  exchanged: sums of counts
//!   below[bins], total[bins]  --DispatchLayout-->  runs per destination, blocks per relay, terms per token, sizes of every rank
//! ```
//!
//! A *bin* is the unit that rows are counted by: an *expert slot*, one copy of an expert at one
//! rank, or, rank-major, a rank. Bins are numbered rank by rank. A sender needs two numbers per bin
//! from the others: the rows that lower ranks send there, and the rows of all. The visible order of
//! rows at a rank is (local expert, source rank, token) or (source rank, token), on every route.

mod bins;
mod buffers;
mod counts;
mod dispatch_layout;
mod expert_map;
mod group_routing;
mod modes;
mod partial_sums;
mod relay_order;
mod relay_plan;
mod row_layout;
mod sorted_routing;
mod traffic;

pub use bins::Bins;
pub use buffers::{LINE, RowBuffer, RowSizes, SlotHead, SlotShape};
pub use counts::{Counts, ReceiveSizes};
pub use dispatch_layout::{DispatchLayout, PlanContext, RowRun, Summand};
pub use expert_map::ExpertMap;
pub use group_routing::{GroupRouting, LocalPermutation, RankRouting};
pub use modes::{Overflow, ReceiveMode, Strategy, SumOrder};
pub use partial_sums::{NodeSums, PulledSums, RankSums};
pub use relay_order::{RankSets, RelayOrder, RelayPermutation, RelaySorter, first_of};
pub use relay_plan::{Block, Partials, RelayPlan, Segment};
pub use row_layout::{RowLayout, RowMetadata};
pub use sorted_routing::SortedRouting;
pub use traffic::{InterNodeRows, RowsByDistance, Traffic};

/// Bytes that a table has taken from the allocator.
pub fn vec_memory_usage<T>(table: &Vec<T>) -> usize {
    table.capacity() * size_of::<T>()
}

/// Sets a table to `len` equal entries without giving its memory back.
///
/// This pays even where each entry is written next, in another order: the rows of the last call
/// have pushed the table out of the caches. To fill it reads it back in sequence, while scattered
/// writes would each wait for a line: `SortedRouting::fill` would take twice as long in a call.
fn refill<T: Copy>(table: &mut Vec<T>, len: usize, value: T) {
    table.clear();
    table.resize(len, value);
}
