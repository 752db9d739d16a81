//! Modes of an instance: which ranks its rows go to, how receive memory is sized, and in which
//! order rows are summed.
//!
//! ```text
//!   Strategy      all-to-all  x -> the ranks that a token chose      all-gather  x -> all ranks
//!   ReceiveMode   Exact  counted      Budget  at most so many rows      Slots  a fixed slot per pair
//!   SumOrder      Expert  e0 + e1 + e2 + e3
//!                 Rank    (e0 + e1) + (e2 + e3)           partial sums of ranks, or of nodes:
//!                 Node    (e0 + e1 + e2) + (e3)           has_partials, per_partial
//! ```
//!
//! Placement calls the functions of a mode and knows no variant, so a new order is a new variant
//! here.

use crate::error::GateError;
use crate::gate::{CapacityRule, GateConfig};

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

/// How receive memory is sized.
///
/// | mode | sizes | counts |
/// |---|---|---|
/// | `Exact` | exact, as large as the call needs | exchanged |
/// | `Budget` | at most so many rows per rank | exchanged: all ranks see the same overflow |
/// | `Slots` | fixed slots for each pair of ranks | none: the layout is known before the call |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReceiveMode {
    /// Exact sizes.
    #[default]
    Exact,
    /// A receive budget (Megatron's static mode): a row whose place, pads counted, is at or beyond
    /// it does not land.
    Budget {
        /// Rows per rank.
        rows: u32,
        /// Treatment of a call that needs more.
        overflow: Overflow,
    },
    /// Fixed slots: each source has `rows` of them in every bin of every rank (drop-and-pad; with
    /// as many slots as a rank has tokens, rank-major slots are dropless). Unused slots are zero.
    Slots {
        /// Rows per source and expert or, rank-major, per source.
        rows: u32,
        /// Treatment of a call that needs more.
        overflow: Overflow,
    },
}

/// Treatment of rows for which there is no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Overflow {
    /// Nothing moves. Over budget, every rank gets the same error with the number of required rows.
    /// Where slots are full, the rank that would overfill them says so, and the others name it.
    #[default]
    Error,
    /// The last rows of a bin are dropped: they count as choices of -1, and the handle has their
    /// mask.
    Drop,
}

impl ReceiveMode {
    /// Receive mode that a gate needs where each rank has `tokens` tokens.
    ///
    /// A capacity that is padded is drop-and-pad: every rank has `capacity` rows per local group at
    /// every expert, unused ones zero, and no counts are exchanged; the rows that the gate keeps
    /// always fit. Otherwise sizes are exact.
    ///
    /// ```
    /// use sidelane_core::gate::{Capacity, Preset};
    /// use sidelane_core::plan::{Overflow, ReceiveMode};
    /// let mut config = Preset::Switch.config(8, 1)?;
    /// assert_eq!(ReceiveMode::from_gate(&config, 64)?, ReceiveMode::Exact);
    /// config.capacity = config.capacity.map(|capacity| capacity.with_pad(true));
    /// assert_eq!(ReceiveMode::from_gate(&config, 64)?, ReceiveMode::Slots { rows: 10, overflow: Overflow::Error });
    /// # Ok::<(), sidelane_core::error::GateError>(())
    /// ```
    ///
    /// # Errors
    /// [`GateError::Conflict`] for a padded capacity that follows the need: slots are fixed before
    /// the call; [`GateError::BadNumber`] for tokens that cannot be split into the local groups.
    pub fn from_gate(config: &GateConfig, tokens: u32) -> Result<Self, GateError> {
        let Some(capacity) = config.capacity.filter(|capacity| capacity.pad) else {
            return Ok(ReceiveMode::Exact);
        };
        if matches!(capacity.rule, CapacityRule::Needed)
            || matches!(capacity.rule, CapacityRule::Tutel { factor } if factor <= 0.0)
        {
            let (one, other) = ("capacity pad", "a capacity that follows the need");
            return Err(GateError::Conflict { one, other, why: "slots are fixed before the call" });
        }
        if !tokens.is_multiple_of(capacity.groups) {
            let (parameter, expected) = ("capacity groups", "a divisor of the number of tokens");
            return Err(GateError::BadNumber { parameter, seen: capacity.groups.into(), expected });
        }
        let rows = capacity.rows(tokens / capacity.groups, config.experts, config.top_k, 0);
        Ok(ReceiveMode::Slots { rows: rows.saturating_mul(capacity.groups), overflow: Overflow::Error })
    }

    /// The receive budget, if there is one.
    pub fn budget(self) -> Option<u32> {
        match self {
            ReceiveMode::Budget { rows, .. } => Some(rows),
            _ => None,
        }
    }

    /// The slots per source and bin, if they are fixed.
    pub fn slots(self) -> Option<u32> {
        match self {
            ReceiveMode::Slots { rows, .. } => Some(rows),
            _ => None,
        }
    }

    /// Treatment of rows for which there is no room.
    pub fn overflow(self) -> Overflow {
        match self {
            ReceiveMode::Exact => Overflow::Error,
            ReceiveMode::Budget { overflow, .. } | ReceiveMode::Slots { overflow, .. } => overflow,
        }
    }

    /// Numbers by which ranks check that they chose the same mode.
    pub fn words(self) -> [u64; 2] {
        match self {
            ReceiveMode::Exact => [0, 0],
            ReceiveMode::Budget { rows, overflow } => [1 + (overflow as u64) * 4, rows.into()],
            ReceiveMode::Slots { rows, overflow } => [2 + (overflow as u64) * 4, rows.into()],
        }
    }
}
/// Order in which the rows of a token are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum SumOrder {
    /// By ascending expert id, one rounding at the end: the same bits on every lane, layout and
    /// topology.
    #[default]
    Expert,
    /// Per rank by ascending expert id, then the ranks' partial sums (kept in `f32`) by ascending
    /// rank. Depends on the expert map.
    Rank,
    /// Per node by ascending rank and expert id, then the nodes' partial sums (kept in `f32`) by
    /// ascending node. Depends on the expert map and on which ranks share a node.
    Node,
}

impl SumOrder {
    /// All orders, for error messages and tests.
    pub const ALL: [SumOrder; 3] = [SumOrder::Expert, SumOrder::Rank, SumOrder::Node];

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            SumOrder::Expert => "expert",
            SumOrder::Rank => "rank",
            SumOrder::Node => "node",
        }
    }

    /// Whether a token's sum is made of partial sums.
    pub const fn has_partials(self) -> bool {
        !matches!(self, SumOrder::Expert)
    }

    /// Chooses between the value for partial sums per rank and that for partial sums per node.
    /// `None` where a token's sum has no parts.
    pub fn per_partial<T>(self, of_rank: T, of_node: T) -> Option<T> {
        match self {
            SumOrder::Expert => None,
            SumOrder::Rank => Some(of_rank),
            SumOrder::Node => Some(of_node),
        }
    }
}
