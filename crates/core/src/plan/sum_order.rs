//! Orders in which combine adds rows, as descriptors that placement asks.
//!
//! Placement calls the functions of an order and knows no variant, so a new order is a new variant
//! here:
//!
//! ```text
//!   SumOrder   --has_partials, per_partial--> groups of a sum, partial sums of relays
//! ```

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
