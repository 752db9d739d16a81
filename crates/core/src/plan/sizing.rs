//! Sizes of rows and their metadata; the row layouts, and the one place that distinguishes them.

use super::{ReceiveMode, RowBuffer};

/// Order in which a rank sees the rows that it received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
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
/// | `Choices` | per choice the local expert + 1, or 0 where another rank has it; then per choice its weight |
/// | `Indexed` | as `Choices`; then the row + 1 that it is in visible order |
/// | `Gathered` | the source rank + 1; if choices are carried, per choice the expert + 1, or 0 if it was dropped; then per choice its weight |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowMetadata {
    /// Expert-major.
    Weight,
    /// Expert-major in fixed slots: a mark tells a row from an unused slot.
    Marked,
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
            RowMetadata::Marked => 2,
            RowMetadata::Choices => 2 * top_k,
            RowMetadata::Indexed | RowMetadata::Gathered => 2 * top_k + 1,
        }
    }

    /// Which layout they go with.
    pub const fn layout(self) -> RowLayout {
        match self {
            RowMetadata::Weight | RowMetadata::Marked | RowMetadata::Gathered => RowLayout::ExpertMajor,
            RowMetadata::Choices | RowMetadata::Indexed => RowLayout::RankMajor,
        }
    }
}

/// Sizes of what moves: the same in every call of one `ExpertParallel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSizes {
    /// Bytes of one row that is sent; 0 if only its metadata is.
    pub row_bytes: u64,
    /// Bytes of one returned row.
    pub home_bytes: u64,
    /// Words that go out with a row.
    pub words_out: u32,
    /// Words that return with a row: one per choice that it stands for.
    pub words_home: u32,
    /// Bytes of a partial sum, where relays sum.
    pub partial_bytes: Option<u64>,
}

impl RowSizes {
    /// What lands: `rows` rows.
    pub fn landing(&self, rows: u32) -> RowBuffer {
        RowBuffer { rows, notes: u64::from(rows) * u64::from(self.words_out), row_bytes: self.row_bytes }
    }

    /// Memory that a rank offers in a return: as many rows as landed.
    pub fn offer(&self, rows: u32) -> RowBuffer {
        RowBuffer { rows, notes: u64::from(rows) * u64::from(self.words_home), row_bytes: self.home_bytes }
    }

    /// Memory that a block of `entries` entries returns: `rows` rows, or partials where relays sum.
    pub fn home(&self, rows: u32, entries: u32) -> RowBuffer {
        let row_bytes = self.partial_bytes.unwrap_or(self.home_bytes);
        RowBuffer { rows, notes: u64::from(entries) * u64::from(self.words_home), row_bytes }
    }

    /// The same in a return of weights alone by copy engines, which bring them home as rows.
    pub fn of_weights(self) -> RowSizes {
        RowSizes { home_bytes: u64::from(self.words_home) * 4, words_home: 0, ..self }
    }

    /// Bytes that go out with a row.
    pub fn note_bytes(&self) -> u64 {
        u64::from(self.words_out) * 4
    }

    /// Bytes in which `rows` rows can land and, behind them, `staged` rows can wait to be relayed.
    pub fn extent_bytes(&self, rows: u32, staged: u32) -> u64 {
        self.landing(rows).bytes().saturating_add(u64::from(staged) * self.row_bytes)
    }
}
