//! Load of experts, ranks and nodes by a router's decisions, and what a capacity drops of them.
//!
//! The counts alone decide how many choices are dropped; the policy decides which. Keeping the
//! highest weights loses the least weight; keeping the first tokens drops the last ones.

use serde::Serialize;
use sidelane_core::error::GateError;
use sidelane_core::gate::{Capacity, CapacityInput, CapacityRule, DropPolicy, Routing, apply_capacity};
use sidelane_core::plan::ExpertMap;
use sidelane_core::topology::NodeMap;

/// Choices by expert, rank or node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Load {
    /// In the order of the places.
    pub choices: Vec<u64>,
    /// Of the place with most, by the mean.
    pub max_over_mean: f64,
    /// Of the place with least, by the mean.
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
    /// Of all tokens.
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

/// Loads of all places.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loads {
    /// By expert.
    pub experts: Load,
    /// By rank.
    pub ranks: Load,
    /// By node.
    pub nodes: Load,
    /// Ranks that a token reaches.
    pub ranks_per_token: Spread,
    /// Nodes that a token reaches.
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
                    let Some(slot) = map.slot_for(source, expert) else { continue };
                    let rank = map.rank_of(slot);
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

/// Policies of dropping, with their names in tables. `Random` keeps as much weight as `Position`,
/// on average.
const WAYS: [(DropPolicy, &str); 4] = [
    (DropPolicy::Score, "score"),
    (DropPolicy::Position, "position"),
    (DropPolicy::FirstChoices, "first_choices"),
    (DropPolicy::Priority, "priority"),
];

/// Costs of a capacity factor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dropped {
    /// The factor.
    pub factor: f64,
    /// Rows of each rank for each expert.
    pub rows: u32,
    /// Share of the choices.
    pub choices: f64,
    /// Losses of each policy.
    pub lost: Vec<Lost>,
}

/// Losses of one drop policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lost {
    /// Its name.
    pub policy: String,
    /// Share of the weights.
    pub weight: f64,
    /// Share of the tokens that have no choice left.
    pub tokens: f64,
}

impl Dropped {
    /// At this capacity factor, the tokens of each rank being a local group.
    ///
    /// # Errors
    /// A factor that is no capacity.
    pub fn at(factor: f64, experts: u32, routings: &[Routing<'_>]) -> Result<Self, GateError> {
        let top_k = routings.first().map_or(1, Routing::top_k);
        let all = |part: fn(&Routing<'_>) -> Vec<f32>| routings.iter().flat_map(part).collect::<Vec<f32>>();
        let weights = all(|routing| routing.weights().to_vec());
        let ids: Vec<i32> = routings.iter().flat_map(|routing| routing.experts()).copied().collect();
        let choices =
            CapacityInput { experts, top_k, ids: &ids, scores: &weights, ..CapacityInput::default() };
        let place = |keep| {
            let groups = routings.len() as u32;
            let rule = CapacityRule::CeilF64 { factor };
            apply_capacity(&Capacity::new(rule, keep).with_groups(groups), &choices)
        };
        let mut dropped = Dropped { factor, rows: 0, choices: 0.0, lost: Vec::with_capacity(WAYS.len()) };
        for (keep, name) in WAYS {
            let placed = place(keep)?;
            dropped.rows = placed.capacity;
            dropped.choices = share(&ids, &placed.ids, |_| 1.0);
            dropped.lost.push(Lost {
                policy: name.to_owned(),
                weight: share(&ids, &placed.ids, |choice| weights[choice].into()),
                tokens: emptied(&ids, &placed.ids, top_k as usize),
            });
        }
        Ok(dropped)
    }
}

/// The part of the choices, by what each counts, that is no longer there.
fn share(before: &[i32], after: &[i32], worth: impl Fn(usize) -> f64) -> f64 {
    let (mut all, mut lost) = (0.0, 0.0);
    for choice in (0..before.len()).filter(|&choice| before[choice] >= 0) {
        all += worth(choice);
        if after[choice] < 0 {
            lost += worth(choice);
        }
    }
    if all > 0.0 { lost / all } else { 0.0 }
}

/// The part of the tokens that had a choice and have none left.
fn emptied(before: &[i32], after: &[i32], top_k: usize) -> f64 {
    let has_any = |ids: &[i32]| ids.iter().any(|&id| id >= 0);
    let tokens = before.chunks(top_k).zip(after.chunks(top_k)).filter(|(before, _)| has_any(before));
    let (all, lost) =
        tokens.fold((0, 0), |(all, lost), (_, after)| (all + 1, lost + usize::from(!has_any(after))));
    if all > 0 { lost as f64 / all as f64 } else { 0.0 }
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

    #[test]
    fn what_is_lost_depends_on_whom_one_keeps_and_how_much_does_not() {
        let routing = Routing::new(2, vec![0, 1, 0, -1, 0, 1], vec![0.25, 0.75, 1.0, 0.0, 0.5, 0.5]).unwrap();
        // Five choices of two experts; three tokens x 2 / 2 x 0.5: two rows each.
        let dropped = Dropped::at(0.5, 2, &[routing]).unwrap();
        assert_eq!((dropped.rows, dropped.choices), (2, 0.2));
        let lost: Vec<_> = dropped.lost.iter().map(|lost| (lost.policy.as_str(), lost.weight)).collect();
        assert_eq!(
            lost,
            [
                ("score", 0.25 / 3.0),
                ("position", 0.5 / 3.0),
                ("first_choices", 0.5 / 3.0),
                ("priority", 0.5 / 3.0)
            ]
        );
        assert!(dropped.lost.iter().all(|lost| lost.tokens == 0.0));
    }

    #[test]
    fn tokens_without_choices_are_not_lost() {
        let routing = Routing::new(1, vec![-1, 0, 0], vec![0.0, 1.0, 1.0]).unwrap();
        let dropped = Dropped::at(0.25, 1, &[routing]).unwrap();
        assert_eq!((dropped.rows, dropped.choices, dropped.lost[1].tokens), (1, 0.5, 0.5));
    }
}
