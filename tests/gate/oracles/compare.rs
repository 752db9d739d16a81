//! Comparison of our gate's answers with those of the oracles.

use std::collections::BTreeMap;

use sidelane::gate::{
    CapacityInput, Decision, DropPolicy, Normalize, PlacedChoices, apply_capacity, update_bias,
};

use super::asked;
use super::case::{Answer, Case};
use super::draw;

/// Largest distance from the exact weight, rounded to f32, in units of its last place.
const ULPS: u32 = 2;
/// Largest relative distance from the weights of the systems.
const RELATIVE: f64 = 4e-6;
/// The rate of the bias updates that `theirs.py` asks for.
const BIAS_RATE: f32 = 1.0 / 1024.0;

/// Results of one preset.
#[derive(Default)]
pub struct Seen {
    /// Cases per oracle.
    pub judges: BTreeMap<String, u32>,
    pub tokens: u64,
    /// Weights compared with exact ones, and with those of the oracle.
    pub weights: u64,
    pub their_weights: u64,
    /// The largest deviation from an exact weight.
    pub ulps: u32,
    /// The largest deviation from an oracle's weight.
    pub relative: f64,
    /// Tokens whose choices or drops a rounding could change, and those of them where it did.
    pub near: Vec<String>,
    pub changed: Vec<String>,
    /// Choices placed as others placed them, and how many of those were dropped.
    pub placed: u64,
    pub dropped: u64,
    pub losses: u32,
    /// The worst loss, and the worst element of a gradient.
    pub worst_loss: f64,
    pub worst_gradient: f64,
    /// Difference that must not be.
    pub faults: Vec<String>,
}

impl Seen {
    pub fn expect(&mut self, holds: bool, fault: impl FnOnce() -> String) {
        if !holds {
            self.faults.push(fault());
        }
    }

    /// Compares everything there is to a case.
    pub fn compare(&mut self, case: &Case) {
        *self.judges.entry(case.judge.clone()).or_default() += 1;
        self.tokens += u64::from(case.tokens);
        self.near.extend(case.exact.near.iter().map(|token| format!("{} token {token}", case.name())));
        match asked::route(case, |decision| self.compare_decision(case, decision)) {
            Ok(()) => {}
            Err(error) => self.faults.push(format!("{}: {error}", case.name())),
        }
        for (judge, answer) in case.answers() {
            self.compare_placement(case, judge, answer);
            self.compare_bias(case, answer);
        }
        if let Some(loss) = &case.loss {
            self.compare_loss(case, loss);
        }
    }

    /// Choices, weights and places from our own scores.
    fn compare_decision(&mut self, case: &Case, ours: &Decision) {
        for (judge, answer) in case.answers() {
            let mut same = true;
            for token in 0..case.tokens {
                let own = row(case, token, ours.choices());
                if sorted(own) != sorted(row(case, token, &answer.ids)) {
                    same = false;
                    let fault = format!("{} token {token}: {own:?}, {judge} has other choices", case.name());
                    if case.exact.near.contains(&token) { &mut self.changed } else { &mut self.faults }
                        .push(fault);
                }
            }
            self.compare_weights(case, judge, answer, ours);
            // Where choices or drops differ places move.
            if same && case.exact.near.is_empty() {
                let random = case.capacity.is_some_and(|room| room.keep == DropPolicy::Random);
                let fits = if random {
                    // Our lots are our own: as many are kept, and they lie in the order of tokens.
                    in_token_order(case, ours.choices(), ours.slots())
                        == in_token_order(case, &answer.ids, &answer.slots)
                } else {
                    pairs(case, ours.choices(), ours.slots()) == pairs(case, &answer.ids, &answer.slots)
                };
                self.expect(fits, || format!("{}: {judge} has other places", case.name()));
            }
            if let Some(capacity) = answer.capacity {
                let seen = ours.capacity();
                self.expect(seen == capacity, || {
                    format!("{}: capacity {seen}, {judge} {capacity}", case.name())
                });
            }
        }
    }

    /// Weights where both keep the same.
    fn compare_weights(&mut self, case: &Case, judge: &str, answer: &Answer, ours: &Decision) {
        let after_drop = matches!(asked::config(case).normalize, Normalize::AfterDrop(_));
        for token in 0..case.tokens {
            let own = kept(row(case, token, ours.experts()), row(case, token, ours.weights()));
            let left: Vec<i32> =
                std::iter::zip(row(case, token, &answer.ids), row(case, token, &answer.slots))
                    .map(|(&id, &slot)| if slot < 0 { -1 } else { id })
                    .collect();
            let other = kept(&left, row(case, token, &answer.weights));
            if after_drop && !own.keys().eq(other.keys()) {
                continue;
            }
            for (expert, weight) in own {
                let Some(&expected) = other.get(&expert) else { continue };
                let fault = || {
                    format!("{} token {token} expert {expert}: {weight:e}, {judge} {expected:e}", case.name())
                };
                if judge == "formula" {
                    self.weights += 1;
                    let ulps = weight.to_bits().abs_diff(expected.to_bits());
                    self.ulps = self.ulps.max(ulps);
                    self.expect(ulps <= ULPS, fault);
                } else {
                    self.their_weights += 1;
                    let relative = relative(weight.into(), expected.into());
                    self.relative = self.relative.max(relative);
                    self.expect(relative <= RELATIVE, fault);
                }
            }
        }
    }

    /// Whole numbers, fed their choices and their scores: not one may differ.
    fn compare_placement(&mut self, case: &Case, judge: &str, answer: &Answer) {
        let capacity = asked::placed_by(case);
        let choices = CapacityInput {
            experts: case.experts,
            top_k: case.top_k,
            ids: &answer.ids,
            scores: &answer.decide,
            ..CapacityInput::default()
        };
        let placed = match apply_capacity(&capacity, &choices) {
            Ok(placed) => placed,
            Err(error) => return self.faults.push(format!("{}: {error}", case.name())),
        };
        let PlacedChoices { slots, capacity: rows, .. } = &placed;
        self.placed += slots.iter().filter(|&&slot| slot >= 0).count() as u64;
        self.dropped +=
            std::iter::zip(&answer.ids, slots).filter(|&(&id, &slot)| id >= 0 && slot < 0).count() as u64;
        let expected = answer.capacity.unwrap_or(*rows);
        self.expect(*rows == expected, || {
            format!("{}: fed, capacity {rows}, {judge} {expected}", case.name())
        });
        self.expect(*slots == answer.slots, || format!("{}: fed, {judge} has other places", case.name()));
    }

    /// The update of the bias, fed their counts.
    fn compare_bias(&mut self, case: &Case, answer: &Answer) {
        let (Some(expected), Some(mut bias)) = (&answer.bias, draw::bias(case)) else { return };
        let mut counts = vec![0; case.experts as usize];
        for (&id, _) in std::iter::zip(&answer.ids, &answer.slots).filter(|&(_, &slot)| slot >= 0) {
            counts[id as usize] += 1;
        }
        let updated = update_bias(&mut bias, &counts, BIAS_RATE);
        self.expect(updated.is_ok() && bias == *expected, || format!("{}: another bias", case.name()));
    }
}

/// Distance in units of the expected value.
pub fn relative(seen: f64, expected: f64) -> f64 {
    if seen == expected { 0.0 } else { (seen - expected).abs() / expected.abs() }
}

fn row<'a, T>(case: &Case, token: u32, array: &'a [T]) -> &'a [T] {
    let k = case.top_k as usize;
    &array[token as usize * k..][..k]
}

fn sorted(ids: &[i32]) -> Vec<i32> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids
}

fn kept(ids: &[i32], weights: &[f32]) -> BTreeMap<i32, f32> {
    std::iter::zip(ids, weights).filter(|&(&id, _)| id >= 0).map(|(&id, &weight)| (id, weight)).collect()
}

/// The places of a case by token and expert.
fn pairs(case: &Case, ids: &[i32], slots: &[i32]) -> BTreeMap<(u32, i32), i32> {
    let tokens = (0..case.tokens).flat_map(|token| std::iter::repeat_n(token, case.top_k as usize));
    tokens.zip(std::iter::zip(ids, slots)).map(|(token, (&id, &slot))| ((token, id), slot)).collect()
}

/// The places that are taken, in the order of tokens, by local group and expert.
fn in_token_order(case: &Case, ids: &[i32], slots: &[i32]) -> BTreeMap<(usize, i32), Vec<i32>> {
    let groups = case.capacity.and_then(|room| room.local_groups).unwrap_or(1) as usize;
    let mut taken: BTreeMap<(usize, i32), Vec<i32>> = BTreeMap::new();
    for (at, (&id, &slot)) in std::iter::zip(ids, slots).enumerate().filter(|&(_, (_, &slot))| slot >= 0) {
        taken.entry((at * groups / ids.len(), id)).or_default().push(slot);
    }
    taken
}
