//! From routing and counts to placement: where every row goes, by arithmetic alone.
//!
//! ```text
//!   routing (mine)  --Sorted-->  rows by expert slot, counts[slots]     before anything is known of others
//!                                   |
//!                                   v  exchanged: every rank's counts
//!   below[slots], total[slots]  --Layout-->  runs per destination, terms per token, sizes of every rank
//! ```
//!
//! An *expert slot* is one copy of an expert at one rank; slots are numbered rank by rank. What a sender needs of
//! the others is two numbers per slot: the rows that lower ranks send there, and the rows of all.
//! The visible order of rows at a rank is (local expert, source rank, token), on every route.

mod layout;
mod map;
mod relay_order;
mod sorted;

pub(crate) use layout::entries_to;
pub use layout::{Counts, Frame, Layout, RowRun, Sizes, Term};
pub use map::ExpertMap;
pub use relay_order::{RankSets, RelayOrder};
pub use sorted::Sorted;

/// In which order the rows of a token are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// By ascending expert id, one rounding at the end: the same bits on every lane, layout and topology.
    #[default]
    Expert,
    /// Per rank by ascending expert id, then the ranks' partial sums (kept in `f32`) by ascending rank. Depends on
    /// the expert map.
    Rank,
}

impl Order {
    /// All orders, for error messages and tests.
    pub const ALL: [Order; 2] = [Order::Expert, Order::Rank];

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Order::Expert => "expert",
            Order::Rank => "rank",
        }
    }
}
