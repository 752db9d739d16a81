//! Modes by which receive memory is sized, and what happens to rows beyond it.

use crate::error::GateError;
use crate::gate::{CapacityRule, GateConfig};

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
