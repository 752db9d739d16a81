//! From routing and counts to placement: where every row goes, by arithmetic alone.
//!
//! ```text
//!   routing (mine)  --SortedRouting-->  rows by bin, counts[bins]     before anything is known of others
//!                                   |
//!                                   v  exchanged: sums of counts
//!   below[bins], total[bins]  --Layout-->  runs per destination, blocks per relay, terms per token, sizes of every rank
//! ```
//!
//! A *bin* is the unit that rows are counted by: an *expert slot*, one copy of an expert at one
//! rank, or, rank-major, a rank. Bins are numbered rank by rank. A sender needs two numbers per bin
//! from the others: the rows that lower ranks send there, and the rows of all. The visible order of
//! rows at a rank is (local expert, source rank, token) or (source rank, token), on every route.

mod arrivals;
mod bins;
mod block;
mod chunk;
mod counts;
mod crossing;
mod everyone;
mod forward;
mod gathered;
mod layout;
mod map;
mod mode;
mod order;
mod pipeline;
mod regroup;
mod relay_order;
mod sizing;
mod slot;
mod sorted;
mod spans;
mod traffic;

pub use arrivals::RelayPermutation;
pub use arrivals::first_of;
pub use bins::Bins;
pub use block::{Block, Segment};
pub use chunk::RowBuffer;
pub use counts::{Counts, ReceiveSizes};
pub use crossing::InterNodeRows;
pub use everyone::{GroupRouting, RankRouting};
pub use forward::{Partials, RelayPlan};
pub use layout::{DispatchLayout, PlanContext, RowRun, Summand};
pub use map::ExpertMap;
pub use mode::{Overflow, ReceiveMode};
pub use order::SumOrder;
pub use pipeline::{Pipeline, PipelineStep};
pub use regroup::LocalPermutation;
pub use relay_order::{RankSets, RelayOrder};
pub use sizing::{RowLayout, RowMetadata, RowSizes};
pub use slot::{SlotHead, SlotShape};
pub use sorted::SortedRouting;
pub use sorted::vec_memory_usage;
pub use spans::RelaySorter;
pub use traffic::{RowsByDistance, Traffic};

/// How the rows of a dispatch reach the ranks of their experts. The received rows and every sum are
/// the same to the bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Each row to the ranks that its token chose, directly to its place (all-to-all).
    #[default]
    AllToAll,
    /// Every row to every rank, its choices along with it; each rank then copies those of its
    /// experts to their places (all-gather). It moves `ranks` rows per token, independent of the
    /// choices, and as many more as its experts get. It suits small groups, and a top-k near or
    /// above the number of ranks.
    AllGather,
}

impl Strategy {
    /// All strategies, for error messages and tests.
    pub const ALL: [Strategy; 2] = [Strategy::AllToAll, Strategy::AllGather];

    /// The name used on the command line, in JSON and by Python.
    pub const fn name(self) -> &'static str {
        match self {
            Strategy::AllToAll => "all-to-all",
            Strategy::AllGather => "all-gather",
        }
    }
}
