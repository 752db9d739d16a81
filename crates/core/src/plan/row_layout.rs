//! Layouts of received rows, as descriptors whose values placement takes.
//!
//! Placement, builders and executors take the values of a layout and know no variant. So a new
//! layout is a new variant here:
//!
//! ```text
//!   RowLayout      first_bin  bin_of  expert_of    bins: what rows are counted by
//!                  most_bins  expert_bins          sizes of tables
//!                  merges                          entries of a token: an argument of sorts
//!                  return_words  numbers_per_expert  what goes with rows, and returns with them
//!                  check                           settings that it refuses
//!       |
//!   RowMetadata    words  pairs  experts           words behind each row
//! ```

use super::{ExpertMap, ReceiveMode};
use crate::error::PlanError;
use crate::topology::Route;

/// Order in which a rank sees the rows that it received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RowLayout {
    /// (local expert, source rank, token): a row for each choice of a token, as grouped GEMMs need
    /// them.
    #[default]
    ExpertMajor,
    /// (source rank, token): one row for each token that chose any of the rank's experts, with its
    /// choices as metadata (DeepEP's layout). The caller sums the experts' outputs of a row, so one
    /// row returns.
    RankMajor,
}

impl RowLayout {
    /// All layouts, for error messages and tests.
    pub const ALL: [RowLayout; 2] = [RowLayout::ExpertMajor, RowLayout::RankMajor];

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            RowLayout::ExpertMajor => "expert-major",
            RowLayout::RankMajor => "rank-major",
        }
    }

    /// Whether a token has one row at each rank that it chose, and not one for each choice.
    pub const fn is_per_rank(self) -> bool {
        matches!(self, RowLayout::RankMajor)
    }

    /// Words per row that return with the gradients of routing weights.
    pub const fn return_words(self, top_k: u32) -> u32 {
        if self.is_per_rank() { top_k } else { 1 }
    }
}

/// Values that placement, builders and executors take.
#[doc(hidden)]
impl RowLayout {
    /// First bin of a rank. Behind the last rank: how many bins there are.
    pub fn first_bin(self, map: &ExpertMap, rank: u32) -> u32 {
        match self {
            RowLayout::ExpertMajor if rank == map.ranks() => map.slots(),
            RowLayout::ExpertMajor => map.slots_of(rank).start,
            RowLayout::RankMajor => rank,
        }
    }

    /// Bin of the rows for an expert slot.
    pub fn bin_of(self, map: &ExpertMap, slot: u32) -> u32 {
        match self {
            RowLayout::ExpertMajor => slot,
            RowLayout::RankMajor => map.rank_of(slot),
        }
    }

    /// Expert by which the rows of a bin come in sums by expert. Rank-major rows are sums of
    /// several experts, and come by rank.
    pub fn expert_of(self, map: &ExpertMap, bin: u32) -> u32 {
        match self {
            RowLayout::ExpertMajor => map.expert_of(bin),
            RowLayout::RankMajor => bin,
        }
    }

    /// Most bins that a rank may have, of so many expert slots: all of them may move there.
    pub const fn most_bins(self, slots: u32) -> u32 {
        match self {
            RowLayout::ExpertMajor => slots,
            RowLayout::RankMajor => 1,
        }
    }

    /// Of so many bins of a rank, those with the rows of one expert: all, or rank-major none.
    /// Placement counts these rows. Elsewhere choices are counted from metadata.
    pub const fn expert_bins(self, bins: usize) -> usize {
        match self {
            RowLayout::ExpertMajor => bins,
            RowLayout::RankMajor => 0,
        }
    }

    /// Numbers for each local expert that go with rows on a device: its rows, and the same with
    /// pads. Rank-major, pads lie behind the rows of all experts, so there is one.
    pub const fn numbers_per_expert(self) -> u32 {
        match self {
            RowLayout::ExpertMajor => 2,
            RowLayout::RankMajor => 1,
        }
    }

    /// Whether one entry stands for all choices of a token in a bin. Sorts of choices have it as an
    /// argument, because they are faster where a bin has one choice of a token at most.
    pub const fn merges(self) -> bool {
        self.is_per_rank()
    }

    /// Checks that it goes with `weighted` combines and with `spans`, blocks in relay order, over
    /// this route.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`], which names the setting.
    pub fn check(self, weighted: bool, spans: bool, route: Route) -> Result<(), PlanError> {
        let bad = |parameter, expected| Err(PlanError::BadParameter { parameter, seen: 1, expected });
        if weighted && self.is_per_rank() {
            return bad("weighted", "off: with rank-major rows your experts apply the weights");
        }
        if spans && !(self.is_per_rank() && route == Route::Pxn) {
            return bad("coalesce_relays", "off, unless rows are rank-major and go over relays (route pxn)");
        }
        Ok(())
    }
}

/// Metadata of each row, in 32-bit words behind the rows. Zero in pads and unused slots.
///
/// | | words |
/// |---|---|
/// | `Weight` | routing weight |
/// | `Marked` | routing weight, 1 |
/// | `Summed` | the [sum](super::RankSums) + 1 that the row is part of; routing weight |
/// | `Choices` | per choice the local expert + 1, or 0 where another rank has it; then per choice its weight |
/// | `Indexed` | as `Choices`; then the row + 1 that it is in visible order |
/// | `Gathered` | the source rank + 1; if choices are carried, per choice the expert + 1, or 0 if it was dropped; then per choice its weight |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowMetadata {
    /// Expert-major.
    Weight,
    /// Expert-major in fixed slots: a mark tells a row from an unused slot.
    Marked,
    /// Expert-major, where each rank sums a token's rows before they return.
    Summed,
    /// Rank-major.
    Choices,
    /// Rank-major, where blocks are in relay order.
    Indexed,
    /// Every row to every rank: nothing was chosen.
    Gathered,
}

impl RowMetadata {
    /// Those of a layout and a mode; `spans`: blocks are in relay order.
    pub const fn of(layout: RowLayout, mode: ReceiveMode, spans: bool) -> Self {
        match (layout, mode) {
            (RowLayout::RankMajor, _) if spans => RowMetadata::Indexed,
            (RowLayout::RankMajor, _) => RowMetadata::Choices,
            (RowLayout::ExpertMajor, ReceiveMode::Slots { .. }) => RowMetadata::Marked,
            (RowLayout::ExpertMajor, ReceiveMode::Exact | ReceiveMode::Budget { .. }) => RowMetadata::Weight,
        }
    }

    /// Words per row.
    pub const fn words(self, top_k: u32) -> u32 {
        match self {
            RowMetadata::Weight => 1,
            RowMetadata::Marked | RowMetadata::Summed => 2,
            RowMetadata::Choices => 2 * top_k,
            RowMetadata::Indexed | RowMetadata::Gathered => 2 * top_k + 1,
        }
    }

    /// Pairs of words of a row that a device lays apart, firsts and seconds: local expert and
    /// weight of each choice, or the sum that the row is part of and its weight. None where a
    /// kernel reads the words as they are.
    pub const fn pairs(self, top_k: u32) -> u32 {
        match self {
            RowMetadata::Choices | RowMetadata::Indexed => top_k,
            RowMetadata::Summed => 1,
            RowMetadata::Weight | RowMetadata::Marked | RowMetadata::Gathered => 0,
        }
    }

    /// Words of a row that name local experts.
    pub const fn experts(self, top_k: u32) -> u32 {
        match self {
            RowMetadata::Choices | RowMetadata::Indexed => top_k,
            _ => 0,
        }
    }
}
