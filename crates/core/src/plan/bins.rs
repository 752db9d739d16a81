//! The bins that rows are counted by.
//!
//! ```text
//!   expert --ExpertMap--> slots, one at each rank that holds it --Bins--> bin of a row, its rank, its place in a sum
//! ```

use super::{ExpertMap, RowLayout, SumOrder};
use crate::topology::NodeMap;

/// The bins of a group, numbered rank by rank. In a bin, rows lie by source rank and then token:
///
/// ```text
///   expert-major   a bin per expert slot    (local expert, source rank, token)
///   rank-major     a bin per rank           (source rank, token)
/// ```
///
/// Placement knows only bins, never what they stand for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bins {
    /// First bin of each rank; one more than there are ranks.
    starts: Vec<u32>,
    /// Rank of each bin.
    rank_of: Vec<u32>,
    /// All bins, in the order in which a token's rows are added up.
    in_order: Vec<u32>,
    /// Per bin: which partial sum its rows belong to.
    partial_of: Vec<u32>,
    layout: RowLayout,
    order: SumOrder,
}

impl Bins {
    /// The bins of a layout.
    pub fn of_layout(layout: RowLayout, map: &ExpertMap, order: SumOrder, nodes: &NodeMap) -> Self {
        let starts: Vec<u32> = (0..=map.ranks()).map(|rank| layout.first_bin(map, rank)).collect();
        let bins_of = |rank: u32| starts[rank as usize]..starts[rank as usize + 1];
        let rank_of: Vec<u32> = (0..map.ranks()).flat_map(|rank| bins_of(rank).map(move |_| rank)).collect();
        let partial = |&rank: &u32| order.per_partial(rank, nodes.node_of(rank)).unwrap_or(0);
        let partial_of: Vec<u32> = rank_of.iter().map(partial).collect();
        let mut in_order: Vec<u32> = (0..rank_of.len() as u32).collect();
        // Replicas of an expert are told apart by their rank, which only makes the order total.
        in_order.sort_unstable_by_key(|&bin| {
            let (partial, rank, expert) =
                (partial_of[bin as usize], rank_of[bin as usize], layout.expert_of(map, bin));
            if order.has_partials() { (partial, rank, expert) } else { (0, expert, rank) }
        });
        Bins { starts, rank_of, in_order, partial_of, layout, order }
    }

    /// A bin per expert slot.
    pub fn experts(map: &ExpertMap, order: SumOrder, nodes: &NodeMap) -> Self {
        Self::of_layout(RowLayout::ExpertMajor, map, order, nodes)
    }

    /// Number of bins.
    pub fn count(&self) -> u32 {
        self.rank_of.len() as u32
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.starts.len() as u32 - 1
    }

    /// The bins of a rank.
    pub fn of(&self, rank: u32) -> std::ops::Range<u32> {
        self.starts[rank as usize]..self.starts[rank as usize + 1]
    }

    /// The rank of a bin.
    pub fn rank_of(&self, bin: u32) -> u32 {
        self.rank_of[bin as usize]
    }

    /// All bins, in the order in which a token's rows are added up.
    pub fn in_order(&self) -> &[u32] {
        &self.in_order
    }

    /// Which partial sum the rows of a bin belong to: those of one partial follow each other in the
    /// order of the sum.
    pub fn partial_of(&self, bin: u32) -> u32 {
        self.partial_of[bin as usize]
    }

    /// Layout whose rows they count.
    pub fn layout(&self) -> RowLayout {
        self.layout
    }

    /// Order of sums.
    pub fn order(&self) -> SumOrder {
        self.order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_sort_by_expert_by_rank_and_by_node() {
        let map = ExpertMap::from_slots(4, &[vec![3], vec![1], vec![2, 0]]).unwrap();
        let nodes = NodeMap::from_labels(&[0, 1, 0]);
        let order = |order| Bins::experts(&map, order, &nodes).in_order().to_vec();
        assert_eq!(order(SumOrder::Expert), [3, 1, 2, 0]);
        assert_eq!(order(SumOrder::Rank), [0, 1, 3, 2]);
        assert_eq!(order(SumOrder::Node), [0, 3, 2, 1], "ranks 0 and 2 are node 0");
        let bins = Bins::experts(&map, SumOrder::Node, &nodes);
        assert_eq!((0..4).map(|bin| bins.partial_of(bin)).collect::<Vec<_>>(), [0, 1, 0, 0]);
    }
}
