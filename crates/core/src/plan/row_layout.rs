//! Layouts of received rows, as descriptors that placement asks.
//!
//! Placement calls the functions of a layout and knows no variant, so a new layout is a new variant
//! here:
//!
//! ```text
//!   RowLayout  --is_per_rank--> bins, entries          --words_home--> words that return with a row
//!              --RowMetadata::of--> words behind each row
//! ```

use super::ReceiveMode;

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
    pub const fn words_home(self, top_k: u32) -> u32 {
        if self.is_per_rank() { top_k } else { 1 }
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

    /// Which layout they go with.
    pub const fn layout(self) -> RowLayout {
        match self {
            RowMetadata::Weight | RowMetadata::Marked | RowMetadata::Summed | RowMetadata::Gathered => {
                RowLayout::ExpertMajor
            }
            RowMetadata::Choices | RowMetadata::Indexed => RowLayout::RankMajor,
        }
    }
}
