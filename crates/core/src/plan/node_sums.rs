//! Sums by node: with [`SumOrder::Node`](super::SumOrder), a relay may add up a token's rows of its
//! node before they return. Then one row returns for each token and node, in the order of the
//! block.
//!
//! ```text
//!   token a   experts 0 1 | 4 6 7      nodes of them  0 0 | 1 1 1
//!
//!   rows      0 1 | - - -              at home: those of this node
//!             relay: 4 + 6 + 7         the row of the block that was token a
//!   places    0 1 | s - -              s: where that sum returns
//! ```

use super::{DispatchLayout, InterNodeRows, PlanContext, SortedRouting, refill};

/// The sums that relays make of one rank's rows. Used again from call to call.
#[derive(Clone, Debug, Default)]
pub struct NodeSums {
    /// Per row of a block: one of its choices has its place.
    placed: Vec<bool>,
}

impl NodeSums {
    /// Of each choice whose row a relay sums, the place is that of the sum, for one choice of each
    /// token and node, or -1. The others keep theirs. A sum is weighted already: its `weights`, of
    /// which there may be none, are 1.
    pub fn replace_places(
        &mut self,
        frame: &PlanContext,
        (sorted, crossing): (&SortedRouting, &InterNodeRows),
        layout: &DispatchLayout,
        (places, weights): (&mut [i32], &mut [f32]),
    ) {
        for (nth, relay) in frame.paths.relays().enumerate() {
            let home = layout.home_of(&frame.paths, relay, false);
            let bins = frame.paths.served_by(relay).iter().flat_map(|&rank| frame.bins.of(rank));
            let entries = bins.flat_map(|bin| sorted.starts[bin as usize]..sorted.starts[bin as usize + 1]);
            refill(&mut self.placed, crossing.rows(nth) as usize, false);
            for (entry, &row) in entries.zip(crossing.index_of(nth)) {
                let choice = sorted.choices[entry as usize] as usize;
                let again = std::mem::replace(&mut self.placed[row as usize], true);
                places[choice] = if again { -1 } else { (home + row) as i32 };
                if let Some(weight) = weights.get_mut(choice) {
                    *weight = 1.0;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::Routing;
    use crate::plan::{Bins, Counts, ExpertMap, ReceiveMode, ReceiveSizes, RowMetadata, RowSizes, SumOrder};
    use crate::topology::{NodeMap, Paths, Route};

    #[test]
    fn one_choice_of_each_token_and_other_node_has_the_place_of_the_sum() {
        let map = ExpertMap::contiguous(4, 4).unwrap();
        let nodes = NodeMap::from_labels(&[0, 0, 1, 1]);
        let bins = Bins::experts(&map, SumOrder::Node, &nodes);
        let (row_bytes, partial_bytes, rank_sums) = (16, Some(16), false);
        let (home_bytes, words_out, words_home) = (16, 1, 1);
        let sizing = RowSizes { row_bytes, home_bytes, words_out, words_home, partial_bytes, rank_sums };
        let (paths, mode) = (Paths::new(&nodes, Route::Pxn, 0), ReceiveMode::Exact);
        let frame = PlanContext { bins: &bins, paths, align: 1, chunks: 1, sizing, mode };
        // Tokens 0 and 2 have two experts of the other node, token 1 one and token 3 none.
        let ids = vec![3, 0, 2, 1, 2, -1, 2, 3, 1, 0, -1, 1];
        let routing = Routing::new(3, ids, vec![0.5; 12]).unwrap();
        let (mut sorted, mut crossing) = (SortedRouting::default(), InterNodeRows::default());
        sorted.fill(&map, &bins, RowMetadata::Weight, 0, &routing).unwrap();
        crossing.fill(&bins, &paths, &sorted);
        let (mut counts, mut sizes) = (Counts::default(), ReceiveSizes::default());
        let mut words = sorted.counts.clone();
        crossing.staged(&paths, &mut words);
        counts.clear(words.len() as u32);
        counts.add(0, 0, &words);
        sizes.fill(&bins, 1, &counts.total, None);
        let mut layout = DispatchLayout::default();
        layout.fill_transfers(&frame, (&sorted, &crossing), 3, &counts, &sizes);
        let (mut places, mut weights) = (vec![100; 12], vec![0.5; 12]);
        let both = (&mut places[..], &mut weights[..]);
        NodeSums::default().replace_places(&frame, (&sorted, &crossing), &layout, both);
        // Five rows of the own node come home before the sums. Expert 2 comes before expert 3.
        assert_eq!(places, [-1, 100, 5, 100, 6, 100, 7, -1, 100, 100, 100, 100]);
        let one = [1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5];
        assert_eq!(weights, one);
        let none = (&mut places[..], &mut [][..]);
        NodeSums::default().replace_places(&frame, (&sorted, &crossing), &layout, none);
    }
}
