//! How evenly choices fall on experts, ranks and nodes, and how far tokens spread.

use serde::Serialize;
use sidelane::gate::Routing;
use sidelane::plan::ExpertMap;
use sidelane::topology::NodeMap;

/// Choices by expert, rank or node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Load {
    pub choices: Vec<u64>,
    pub max_over_mean: f64,
    pub min_over_mean: f64,
    /// Entropy of the shares, of that of equal ones: 1 is even, 0 is all in one place.
    pub evenness: f64,
}

impl Load {
    fn new(choices: Vec<u64>) -> Self {
        let parts = choices.len() as f64;
        let all = choices.iter().sum::<u64>() as f64;
        let share = |choices: u64| if all > 0.0 { choices as f64 / all } else { 1.0 / parts };
        let shares = choices.iter().map(|&choices| share(choices));
        let bits: f64 = shares.clone().filter(|&share| share > 0.0).map(|share| -share * share.ln()).sum();
        Load {
            max_over_mean: shares.clone().fold(0.0, f64::max) * parts,
            min_over_mean: shares.fold(1.0, f64::min) * parts,
            evenness: if parts > 1.0 { bits / parts.ln() } else { 1.0 },
            choices,
        }
    }
}

/// In how many places a token's experts are.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub mean: f64,
    /// Tokens by number of places, from 0 on.
    pub tokens: Vec<u64>,
}

impl Spread {
    fn new(places: impl Iterator<Item = usize>) -> Self {
        let mut tokens = Vec::new();
        for places in places {
            tokens.resize(tokens.len().max(places + 1), 0);
            tokens[places] += 1;
        }
        let all: u64 = tokens.iter().sum();
        let sum: u64 = (0..).zip(&tokens).map(|(places, tokens)| places * tokens).sum();
        Spread { mean: if all > 0 { sum as f64 / all as f64 } else { 0.0 }, tokens }
    }
}

/// Everything that is counted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loads {
    pub experts: Load,
    pub ranks: Load,
    pub nodes: Load,
    pub ranks_per_token: Spread,
    pub nodes_per_token: Spread,
}

impl Loads {
    /// Of the decisions of every rank, with experts in equal blocks.
    pub fn new(map: &ExpertMap, nodes: &NodeMap, routings: &[Routing<'_>]) -> Self {
        let (mut by_expert, mut by_rank) = (vec![0; map.experts() as usize], vec![0; map.ranks() as usize]);
        let (mut ranks_of, mut nodes_of) = (Vec::new(), Vec::new());
        let (mut ranks, mut reached) = (Vec::new(), Vec::new());
        for (source, routing) in (0..).zip(routings) {
            for token in 0..routing.tokens() {
                let chosen = routing.experts_of(token).iter().filter_map(|&id| u32::try_from(id).ok());
                ranks.clear();
                for expert in chosen {
                    let rank = map.rank_of(map.slot_for(source, expert));
                    by_expert[expert as usize] += 1;
                    by_rank[rank as usize] += 1;
                    ranks.push(rank);
                }
                reached.clear();
                reached.extend(ranks.iter().map(|&rank| nodes.node_of(rank)));
                ranks_of.push(different(&mut ranks));
                nodes_of.push(different(&mut reached));
            }
        }
        let members = |node| nodes.members(node).iter().map(|&rank| by_rank[rank as usize]).sum();
        Loads {
            nodes: Load::new((0..nodes.nodes()).map(members).collect()),
            experts: Load::new(by_expert),
            ranks: Load::new(by_rank),
            ranks_per_token: Spread::new(ranks_of.into_iter()),
            nodes_per_token: Spread::new(nodes_of.into_iter()),
        }
    }
}

fn different(places: &mut Vec<u32>) -> usize {
    places.sort_unstable();
    places.dedup();
    places.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_counted_where_their_experts_are() {
        let map = ExpertMap::contiguous(4, 2).unwrap();
        let nodes = NodeMap::from_labels(&[0, 1]);
        let routing = |ids: &[i32]| Routing::new(2, ids.to_vec(), vec![0.5; ids.len()]).unwrap();
        let loads = Loads::new(&map, &nodes, &[routing(&[0, 1, 0, 3]), routing(&[0, -1, -1, -1])]);
        assert_eq!(loads.experts.choices, [3, 1, 0, 1]);
        assert_eq!(
            (loads.ranks.choices.as_slice(), loads.nodes.choices.as_slice()),
            (&[4, 1][..], &[4, 1][..])
        );
        assert_eq!((loads.experts.max_over_mean, loads.experts.min_over_mean), (2.4, 0.0));
        assert_eq!(loads.ranks_per_token.tokens, [1, 2, 1]);
        assert_eq!((loads.ranks_per_token.mean, loads.nodes_per_token.mean), (1.0, 1.0));
    }

    #[test]
    fn even_loads_have_evenness_one_and_one_place_has_none() {
        let even = Load::new(vec![5; 16]);
        assert!((even.evenness - 1.0).abs() < 1e-12 && even.max_over_mean == 1.0);
        assert_eq!(Load::new(vec![0, 9, 0]).evenness, 0.0);
        assert_eq!(Load::new(vec![7]).evenness, 1.0);
        assert_eq!(Load::new(vec![0, 0]).evenness, 1.0);
    }
}
