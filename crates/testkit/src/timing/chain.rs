//! A chain of dispatches and combines, each of which sends what the one before returned.
//!
//! ```text
//!   tokens --dispatch--> rows --experts--> outputs --combine--> tokens turned by a column --dispatch--> ..
//! ```
//!
//! Experts return one row of each token, turned left by one column, and zeros for the others. Its
//! sum is that row, bit by bit, in every order and type of partial sums, so values neither grow nor
//! fade: however long the chain is, its end shows a pair that was skipped, run twice, or fed with
//! other rows. The weights of the routing say which row it is.

use sidelane::dtype::Element;
use sidelane::gate::Routing;

/// Outputs of a rank's experts, and the tokens that come out of the pairs of a chain.
#[derive(Clone, Debug)]
pub struct Chain {
    hidden: usize,
    top_k: usize,
    weights: Vec<f32>,
}

impl Chain {
    /// For the tokens of one rank, from their choices and those of them that are dropped.
    pub fn new(routing: &Routing<'_>, dropped: &[bool], hidden: usize) -> Self {
        let (top_k, mut weights) = (routing.top_k() as usize, vec![0.0; dropped.len()]);
        let of_tokens = routing.experts().chunks_exact(top_k).zip(dropped.chunks_exact(top_k));
        for (token, (experts, dropped)) in of_tokens.enumerate() {
            let kept: Vec<usize> = (0..top_k).filter(|&k| experts[k] >= 0 && !dropped[k]).collect();
            if !kept.is_empty() {
                weights[token * top_k + kept[token % kept.len()]] = 1.0;
            }
        }
        Chain { hidden, top_k, weights }
    }

    /// Weights of the choices, `[tokens, top_k]`: 1 for one of each token, another one from token
    /// to token, and 0 for the others.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Writes the outputs of the experts, `[rows, hidden]`, for these rows and their metadata.
    pub fn experts<E: Element>(&self, rows: &[E], row_weights: &[f32], outputs: &mut [E]) {
        let words = row_weights.len() / (rows.len() / self.hidden).max(1);
        let of_rows = rows.chunks_exact(self.hidden).zip(row_weights.chunks_exact(words.max(1)));
        for ((row, weights), output) in of_rows.zip(outputs.chunks_exact_mut(self.hidden)) {
            if weights.contains(&1.0) {
                output[..self.hidden - 1].copy_from_slice(&row[1..]);
                output[self.hidden - 1] = row[0];
            } else {
                output.fill(E::zeroed());
            }
        }
    }

    /// These tokens, as they return from so many pairs.
    pub fn returned<E: Element>(&self, tokens: &[E], pairs: usize) -> Vec<E> {
        let mut tokens = tokens.to_vec();
        let rows = tokens.chunks_exact_mut(self.hidden);
        for (row, weights) in rows.zip(self.weights.chunks_exact(self.top_k)) {
            if weights.contains(&1.0) {
                row.rotate_left(pairs % self.hidden);
            } else {
                row.fill(E::zeroed());
            }
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use sidelane::dtype::PartialDtype;
    use sidelane::plan::{Overflow, ReceiveMode, RowLayout, SumOrder};
    use sidelane::topology::Route;
    use sidelane_verify::reference::{Case, Reference, Tokens};

    use super::*;

    /// Tokens of all ranks after pairs that the naive reference computes.
    fn computed(inputs: &Reference<bf16>, chains: &[Chain], pairs: usize) -> Vec<Vec<bf16>> {
        let case = &inputs.case;
        let of_rank = |(tokens, chain): (&Tokens<bf16>, &Chain)| Tokens {
            weights: chain.weights().to_vec(),
            ..tokens.clone()
        };
        let reference = Reference::of(case, inputs.all.iter().zip(chains).map(of_rank).collect());
        let mut tokens: Vec<Vec<bf16>> = reference.all.iter().map(|tokens| tokens.x.clone()).collect();
        for _ in 0..pairs {
            let outputs: Vec<Vec<bf16>> = (0..chains.len())
                .map(|rank| {
                    let rows = reference.rows(rank, |source| tokens[source].clone());
                    let mut outputs = vec![bf16::NAN; rows.len()];
                    chains[rank].experts(&rows, &reference.metadata(rank).0, &mut outputs);
                    outputs
                })
                .collect();
            let y = |rank: usize, row: usize, column: usize| outputs[rank][row * case.hidden + column].into();
            tokens = (0..chains.len()).map(|rank| reference.sums_of(rank, false, y)).collect();
        }
        tokens
    }

    #[test]
    fn reference_rotates_token_by_column_per_pair_in_every_setup() {
        let usual = Case { hidden: 16, ..Case::new(&[0, 0, 1, 1], &[6; 4], 16, 4) };
        let rank_major = Case { layout: RowLayout::RankMajor, route: Route::Pxn, ..usual.clone() };
        let mode = ReceiveMode::Budget { rows: 12, overflow: Overflow::Drop };
        for case in [
            Case { order: SumOrder::Node, wire: PartialDtype::Bf16, route: Route::Pxn, ..usual.clone() },
            Case { order: SumOrder::Rank, align: 4, ..usual.clone() },
            Case { order: SumOrder::Rank, wire: PartialDtype::Bf16, ..rank_major },
            Case { mode, ..usual },
        ] {
            let inputs = Reference::<bf16>::seeded(&case, 7);
            let chain = |(tokens, dropped): (&Tokens<bf16>, &Vec<bool>)| {
                let routing = Routing::new(case.top_k, &tokens.ids[..], &tokens.weights[..]).unwrap();
                Chain::new(&routing, dropped, case.hidden)
            };
            let chains: Vec<Chain> = inputs.all.iter().zip(&inputs.seen.dropped).map(chain).collect();
            for pairs in [1, 2, 17] {
                let seen = computed(&inputs, &chains, pairs);
                let of_ranks = inputs.all.iter().zip(&chains);
                let expected: Vec<_> =
                    of_ranks.map(|(tokens, chain)| chain.returned(&tokens.x, pairs)).collect();
                assert_eq!(seen, expected, "{pairs} pairs, {case:?}");
            }
            assert_ne!(chains[0].returned(&inputs.all[0].x, 17), chains[0].returned(&inputs.all[0].x, 2));
        }
    }

    #[test]
    fn returned_row_varies_by_token_and_is_never_dropped_one() {
        let experts = [3, 0, -1, 1, 2, 0, -1, -1, -1, 1, 2, 3];
        let routing = Routing::new(3, &experts[..], &[0.5; 12][..]).unwrap();
        let mut dropped = [false; 12];
        dropped[9] = true;
        let chain = Chain::new(&routing, &dropped, 8);
        let chosen = [1., 0., 0., 0., 1., 0., 0., 0., 0., 0., 0., 1.];
        assert_eq!(chain.weights(), chosen);
    }
}
