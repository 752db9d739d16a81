//! What a capacity would drop, by each way of choosing whom.
//!
//! How many choices are dropped is decided by the counts alone; whom it hits is decided by the way: the highest weights
//! lose least weight, the first tokens leave the last ones empty.

use serde::Serialize;
use sidelane::error::GateError;
use sidelane::gate::{Capacity, Choices, Keep, Routing, Rule, place};

/// Ways of choosing whom to keep, with their names in tables. `Random` keeps as much weight as `Position`, on average.
const WAYS: [(Keep, &str); 4] = [
    (Keep::Score, "score"),
    (Keep::Position, "position"),
    (Keep::FirstChoices, "first_choices"),
    (Keep::Priority, "priority"),
];

/// What a capacity factor would cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dropped {
    pub factor: f64,
    /// Rows of each rank for each expert.
    pub rows: u32,
    /// Share of the choices.
    pub choices: f64,
    pub lost: Vec<Lost>,
}

/// What is lost by one way of choosing whom to keep.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lost {
    pub keep: String,
    /// Share of the weights.
    pub weight: f64,
    /// Share of the tokens that have no choice left.
    pub tokens: f64,
}

impl Dropped {
    /// At this capacity factor, the tokens of each rank being a local group.
    pub fn at(factor: f64, experts: u32, routings: &[Routing<'_>]) -> Result<Self, GateError> {
        let top_k = routings.first().map_or(1, Routing::top_k);
        let all = |part: fn(&Routing<'_>) -> Vec<f32>| routings.iter().flat_map(part).collect::<Vec<f32>>();
        let weights = all(|routing| routing.weights().to_vec());
        let ids: Vec<i32> = routings.iter().flat_map(|routing| routing.experts()).copied().collect();
        let choices = Choices { experts, top_k, ids: &ids, scores: &weights, ..Choices::default() };
        let place = |keep| {
            let groups = routings.len() as u32;
            let rule = Rule::CeilF64 { factor };
            place(&Capacity { rule, minimum: 0, align: 1, keep, groups, pad: false }, &choices)
        };
        let mut dropped = Dropped { factor, rows: 0, choices: 0.0, lost: Vec::with_capacity(WAYS.len()) };
        for (keep, name) in WAYS {
            let placed = place(keep)?;
            dropped.rows = placed.capacity;
            dropped.choices = share(&ids, &placed.ids, |_| 1.0);
            dropped.lost.push(Lost {
                keep: name.to_owned(),
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
    fn what_is_lost_depends_on_whom_one_keeps_and_how_much_does_not() {
        let routing = Routing::new(2, vec![0, 1, 0, -1, 0, 1], vec![0.25, 0.75, 1.0, 0.0, 0.5, 0.5]).unwrap();
        // Five choices of two experts; three tokens x 2 / 2 x 0.5: two rows each.
        let dropped = Dropped::at(0.5, 2, &[routing]).unwrap();
        assert_eq!((dropped.rows, dropped.choices), (2, 0.2));
        let lost: Vec<_> = dropped.lost.iter().map(|lost| (lost.keep.as_str(), lost.weight)).collect();
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
