//! Choices that a full expert keeps, and the place of each kept choice among its expert's rows.
//!
//! Local groups are placed one after another, each with the same capacity C, and slots 0..C per
//! expert.
//!
//! ```text
//!   Position              t0 t1 t2 .., each with all its choices       places go to the first C of an expert
//!   FirstChoices          k = 0: t0 t1 t2 ..   k = 1: t0 t1 t2 ..      the same
//!   Priority              k = 0: t2 t0 t1 ..   k = 1: t2 t0 t1 ..      the same, tokens by falling score
//!   Score, Random         all but the C best of an expert are crossed out; then as Position
//! ```
//!
//! Time is linear in tokens x choices, however many experts there are (`Priority` sorts the tokens
//! besides): selection finds the best, and only chosen experts are touched.

use std::cmp::Reverse;
use std::mem;

use super::random::{Purpose, RngKey, unit};
use super::top_k::ordered;
use super::{Capacity, DropPolicy};
use crate::error::GateError;

/// Memory that [`keep`](CapacityAssigner::keep) reuses: of calls of one shape, only the first
/// allocates.
#[derive(Clone, Debug, Default)]
pub(super) struct CapacityAssigner {
    experts: Vec<Expert>,
    /// Of choices, or of tokens.
    ranks: Vec<Rank>,
    /// Random scores.
    lots: Vec<f32>,
}

/// Choices to place.
pub(super) struct Chosen<'a> {
    /// Experts.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// `[tokens, top_k]`, -1 for none; dropped choices become -1. No token names an expert twice.
    pub ids: &'a mut [i32],
    /// `[tokens, top_k]`, no NaN: scores by which [`DropPolicy::Score`] and
    /// [`DropPolicy::Priority`] decide.
    pub scores: &'a [f32],
    /// `[tokens, top_k]`: filled with the places, -1 where there is none.
    pub slots: &'a mut [i32],
}

/// How much room there was, and how much would have been needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CapacityUse {
    /// Rows per expert and local group.
    pub capacity: u32,
    /// The largest count of an expert in a local group before anything was dropped.
    pub required: u32,
}

/// One expert, while a local group is placed.
#[derive(Clone, Copy, Debug, Default)]
struct Expert {
    chosen: u32,
    next: u32,
    /// Where its ranks begin.
    ranks: usize,
}

/// A place in an order without ties: falling score, of equal ones the first.
type Rank = (Reverse<u32>, usize);

fn rank(score: f32, index: usize) -> Rank {
    (Reverse(ordered(score)), index)
}

impl CapacityAssigner {
    /// Drops the excess and numbers the rest. `need` is the largest need of other ranks that share
    /// the capacity.
    ///
    /// # Errors
    /// [`GateError::BadNumber`] if the tokens cannot be split into the capacity's local groups;
    /// then nothing has changed.
    pub(super) fn keep(
        &mut self,
        capacity: &Capacity,
        need: Option<u32>,
        draw: RngKey,
        chosen: Chosen<'_>,
    ) -> Result<CapacityUse, GateError> {
        let Chosen { experts, top_k, ids, scores, slots } = chosen;
        let columns = top_k as usize;
        let tokens = ids.len() / columns;
        let groups = capacity.groups as usize;
        if !tokens.is_multiple_of(groups) {
            let expected = "a multiple of the capacity's groups";
            return Err(GateError::BadNumber { parameter: "tokens", seen: tokens as f64, expected });
        }
        let group = tokens / groups;
        let elements = (group * columns).max(1);
        self.make_room(capacity.keep, experts as usize, ids.len(), elements);

        let mut required = 0;
        for (ids, slots) in ids.chunks(elements).zip(slots.chunks_mut(elements)) {
            required = required.max(self.number(ids, slots));
            self.forget(ids);
        }
        let rows = capacity.rows(group as u32, experts, top_k, required.max(need.unwrap_or(0)));

        let keep = match capacity.keep {
            // All experts have room, so nothing is compared, and these are the places.
            DropPolicy::Score | DropPolicy::Random | DropPolicy::Position if required <= rows => {
                return Ok(CapacityUse { capacity: rows, required });
            }
            keep => keep,
        };
        if keep == DropPolicy::Random {
            self.draw_lots(draw, tokens, columns);
        }
        let parts = ids.chunks_mut(elements).zip(slots.chunks_mut(elements)).zip(scores.chunks(elements));
        for (number, ((ids, slots), scores)) in parts.enumerate() {
            match keep {
                DropPolicy::Score => self.cross_out(rows, ids, scores),
                DropPolicy::Random => {
                    let lots = mem::take(&mut self.lots);
                    self.cross_out(rows, ids, &lots[number * elements..]);
                    self.lots = lots;
                }
                DropPolicy::Priority => self.rank_tokens(columns, scores),
                DropPolicy::Position | DropPolicy::FirstChoices => {}
            }
            let experts = &mut self.experts;
            match keep {
                DropPolicy::Position | DropPolicy::Score | DropPolicy::Random => {
                    give_places(experts, rows, ids, slots, 0..ids.len());
                }
                DropPolicy::FirstChoices => {
                    let order = (0..columns).flat_map(|k| (k..elements).step_by(columns));
                    give_places(experts, rows, ids, slots, order);
                }
                DropPolicy::Priority => {
                    let tokens = &self.ranks;
                    let order =
                        (0..columns).flat_map(|k| tokens.iter().map(move |rank| rank.1 * columns + k));
                    give_places(experts, rows, ids, slots, order);
                }
            }
            self.forget(ids);
            for (id, &slot) in ids.iter_mut().zip(&*slots) {
                if slot < 0 {
                    *id = -1;
                }
            }
        }
        Ok(CapacityUse { capacity: rows, required })
    }

    /// As much as choices of this shape may ask for, whatever they are.
    fn make_room(&mut self, keep: DropPolicy, experts: usize, choices: usize, elements: usize) {
        self.experts.clear();
        self.experts.resize(experts, Expert::default());
        self.ranks.clear();
        if matches!(keep, DropPolicy::Score | DropPolicy::Priority | DropPolicy::Random) {
            self.ranks.reserve(elements);
        }
        self.lots.clear();
        if keep == DropPolicy::Random {
            self.lots.reserve(choices);
        }
    }

    /// Numbers the choices of each expert as they come; the largest count.
    fn number(&mut self, ids: &[i32], slots: &mut [i32]) -> u32 {
        let mut most = 0;
        for (slot, &id) in slots.iter_mut().zip(ids) {
            *slot = match named(id).map(|named| &mut self.experts[named].next) {
                Some(next) => {
                    *next += 1;
                    most = most.max(*next);
                    *next as i32 - 1
                }
                None => -1,
            };
        }
        most
    }

    /// Adds up the choices of each expert.
    fn count(&mut self, ids: &[i32]) {
        ids.iter().filter_map(|&id| named(id)).for_each(|named| self.experts[named].chosen += 1);
    }

    /// Clears all experts that are named.
    fn forget(&mut self, ids: &[i32]) {
        for expert in ids.iter().filter_map(|&id| named(id)) {
            self.experts[expert] = Expert::default();
        }
    }

    /// One random score per choice, from the stream of its token.
    fn draw_lots(&mut self, draw: RngKey, tokens: usize, columns: usize) {
        self.lots.clear();
        for token in 0..tokens {
            let mut random = draw.stream(Purpose::Keep, token as u32);
            self.lots.extend((0..columns).map(|_| unit(&mut random)));
        }
    }

    /// All but the `rows` best of each expert become -1.
    fn cross_out(&mut self, rows: u32, ids: &mut [i32], scores: &[f32]) {
        self.count(ids);
        self.ranks.clear();
        for i in 0..ids.len() {
            let Some(named) = named(ids[i]) else { continue };
            let expert = &mut self.experts[named];
            if expert.chosen <= rows {
                continue;
            }
            let chosen = expert.chosen as usize;
            if expert.next == 0 {
                expert.ranks = self.ranks.len();
                self.ranks.resize(expert.ranks + chosen, rank(0.0, 0));
            }
            self.ranks[expert.ranks + expert.next as usize] = rank(scores[i], i);
            expert.next += 1;
            if expert.next == expert.chosen {
                let ranks = &mut self.ranks[expert.ranks..][..chosen];
                ranks.select_nth_unstable(rows as usize);
                for &(_, worse) in &ranks[rows as usize..] {
                    ids[worse] = -1;
                }
                *expert = Expert::default();
            }
        }
    }

    /// Tokens by falling score of their best choice.
    fn rank_tokens(&mut self, columns: usize, scores: &[f32]) {
        self.ranks.clear();
        let best = |scores: &[f32]| scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        self.ranks
            .extend(scores.chunks(columns).map(best).enumerate().map(|(token, best)| rank(best, token)));
        self.ranks.sort_unstable();
    }
}

/// The expert that an id names.
fn named(id: i32) -> Option<usize> {
    usize::try_from(id).ok()
}

/// The next place at its expert for each choice, in the given order. -1 for no choice, and when all
/// places are taken.
fn give_places(
    experts: &mut [Expert],
    rows: u32,
    ids: &[i32],
    slots: &mut [i32],
    order: impl Iterator<Item = usize>,
) {
    for i in order {
        slots[i] = match named(ids[i]).map(|named| &mut experts[named].next) {
            Some(next) if *next < rows => {
                *next += 1;
                *next as i32 - 1
            }
            _ => -1,
        };
    }
}

#[cfg(test)]
#[path = "keep_tests.rs"]
mod tests;
