//! Strategy of a dispatch: rows to the ranks that a token chose, or to all.

/// How the rows of a dispatch reach the ranks of their experts. The received rows and every sum are
/// the same to the bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
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
