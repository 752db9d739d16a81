//! Capacity: rows that an expert takes from a local group of tokens, choices that a full expert
//! keeps, and the place of each kept choice among its expert's rows.
//!
//! Every system rounds in its own way and its own precision. A product that is a whole number on
//! paper (100 tokens, one expert, factor 1.1) comes out as 111 in f64 and as 110 in f32, so each
//! formula keeps its order of operations.
//!
//! ```text
//!   formula --+-- above the minimum: up to a multiple of align --+--> capacity C of an expert and local group
//!             +-- otherwise: the minimum ------------------------+
//!
//!   Position              t0 t1 t2 .., each with all its choices       places go to the first C of an expert
//!   FirstChoices          k = 0: t0 t1 t2 ..   k = 1: t0 t1 t2 ..      the same
//!   Priority              k = 0: t2 t0 t1 ..   k = 1: t2 t0 t1 ..      the same, tokens by falling score
//!   Score, Random         all but the C best of an expert are crossed out; then as Position
//! ```
//!
//! Local groups are placed one after another, each with the same capacity C, and slots 0..C per
//! expert. Time is linear in tokens x choices, however many experts there are (`Priority` sorts the
//! tokens besides): selection finds the best, and only chosen experts are touched.

use std::cmp::Reverse;
use std::mem;

use super::router_noise::{Purpose, RngKey, unit};
use super::top_k::ordered;
use super::{Capacity, CapacityRule, DropPolicy, ensure, shape};
use crate::error::GateError;

impl Capacity {
    /// Whether the numbers make sense.
    ///
    /// # Errors
    /// [`GateError::BadNumber`]: a factor that is not finite, or not above 0 for a formula that
    /// needs this; `align` or `groups` of 0.
    pub fn check(&self) -> Result<(), GateError> {
        match self.rule {
            CapacityRule::CeilF64 { factor }
            | CapacityRule::CeilF32 { factor }
            | CapacityRule::Trunc { factor } => {
                let usable = factor.is_finite() && factor > 0.0;
                ensure(usable, "capacity factor", factor, "finite and above 0")?;
            }
            CapacityRule::Tutel { factor } => {
                ensure(factor.is_finite(), "capacity factor", factor, "finite")?;
            }
            CapacityRule::Rows { .. } | CapacityRule::Needed => {}
        }
        ensure(self.align > 0, "capacity align", 0.0, "at least 1")?;
        ensure(self.groups > 0, "capacity groups", 0.0, "at least 1")
    }

    /// Rows per expert for a local group of `tokens` tokens; `need` is the largest count that any
    /// expert has in any group, here or at ranks that share the capacity. A number beyond `u32` is
    /// `u32::MAX`.
    ///
    /// A formula may give more rows than there are tokens: then nothing is dropped.
    /// [`CapacityRule::Needed`] with a single choice gives at most `tokens`, aligned or not, as
    /// DeepSpeed does.
    pub fn rows(&self, tokens: u32, experts: u32, top_k: u32, need: u32) -> u32 {
        let (s, e, k) = (f64::from(tokens), f64::from(experts), f64::from(top_k));
        // Casts from floats saturate, and make 0 of NaN: no experts, no rows.
        let rows = match self.rule {
            CapacityRule::CeilF64 { factor } => (s * k / e * factor).ceil() as u32,
            CapacityRule::CeilF32 { factor } => ((s / e) as f32 * (factor * k) as f32).ceil() as u32,
            CapacityRule::Trunc { factor } => (s * factor / e) as u32,
            CapacityRule::Tutel { factor } => {
                let limit = top_k.saturating_mul((factor.abs() * (s / e).ceil()) as u32);
                match factor {
                    0.0 => need,
                    _ if factor < 0.0 => need.min(limit),
                    _ => limit,
                }
            }
            CapacityRule::Rows { rows } => rows,
            CapacityRule::Needed => need,
        };
        if rows <= self.minimum {
            return self.minimum;
        }
        let aligned = rows.checked_next_multiple_of(self.align).unwrap_or(u32::MAX);
        if self.rule == CapacityRule::Needed && top_k == 1 { aligned.min(tokens) } else { aligned }
    }
}

/// Choices that are to be placed. `Default` has no tokens: fill in what there is.
#[derive(Clone, Copy, Debug, Default)]
pub struct CapacityInput<'a> {
    /// Experts.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// `[tokens, top_k]`: the experts chosen, -1 for none; a token names each expert at most once.
    pub ids: &'a [i32],
    /// `[tokens, top_k]`: values of choices for policies that keep the best. Megatron compares its
    /// weights, DeepSpeed and Tutel compare unnormalized scores.
    pub scores: &'a [f32],
    /// The largest need of other ranks, for rules that go by need.
    pub need: Option<u32>,
    /// Names the lots of [`DropPolicy::Random`](super::DropPolicy::Random).
    pub draw: RngKey,
}

/// Choices with their places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedChoices {
    /// `[tokens, top_k]`: the choices that are kept; -1 for the others.
    pub ids: Vec<i32>,
    /// `[tokens, top_k]`: the place of each kept choice among its expert's rows of its local group,
    /// from 0 without gaps; -1 for the others.
    pub slots: Vec<i32>,
    /// Rows per expert and local group.
    pub capacity: u32,
    /// The largest count of an expert in a local group before anything was dropped.
    pub required: u32,
}

/// Which choices are kept, and where they go.
///
/// ```
/// use sidelane_core::gate::{Capacity, CapacityInput, CapacityRule, DropPolicy, apply_capacity};
///
/// let capacity = Capacity::new(CapacityRule::Rows { rows: 2 }, DropPolicy::Score);
/// let choices =
///     CapacityInput { experts: 4, top_k: 1, ids: &[3, 3, 0, 3], scores: &[0.5, 0.4, 0.9, 0.7], ..CapacityInput::default() };
/// let placed = apply_capacity(&capacity, &choices)?;
/// assert_eq!(placed.ids, [3, -1, 0, 3]);
/// assert_eq!(placed.slots, [0, -1, 0, 1]);
/// assert_eq!((placed.capacity, placed.required), (2, 3));
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
///
/// # Errors
/// As [`Capacity::check`]; [`GateError::BadNumber`] for no choices per token, or tokens that cannot
/// be split into the local groups; [`GateError::WrongShape`] for arrays that are not
/// `[tokens, top_k]`; [`GateError::BadChoice`] for an expert that does not exist or is named twice
/// by a token; [`GateError::BadElement`] for a score that is not finite.
pub fn apply_capacity(capacity: &Capacity, choices: &CapacityInput<'_>) -> Result<PlacedChoices, GateError> {
    capacity.check()?;
    check(choices)?;
    let (mut ids, mut slots) = (choices.ids.to_vec(), vec![-1; choices.ids.len()]);
    let chosen = Chosen {
        experts: choices.experts,
        top_k: choices.top_k,
        ids: &mut ids,
        scores: choices.scores,
        slots: &mut slots,
    };
    let CapacityUse { capacity, required } =
        CapacityAssigner::default().keep(capacity, choices.need, choices.draw, chosen)?;
    Ok(PlacedChoices { ids, slots, capacity, required })
}

fn check(choices: &CapacityInput<'_>) -> Result<(), GateError> {
    let &CapacityInput { experts, top_k, ids, scores, .. } = choices;
    ensure(top_k > 0, "top_k", 0.0, "at least 1")?;
    let columns = top_k as usize;
    let rows = ids.len() / columns;
    shape("expert ids", ids.len(), rows, columns)?;
    shape("scores", scores.len(), rows, columns)?;
    // The token that named an expert last, counted from 1.
    let mut last = vec![0; experts as usize];
    for (i, (&expert, &seen)) in ids.iter().zip(scores).enumerate() {
        let (token, k) = ((i / columns) as u32, (i % columns) as u32);
        if expert != -1 {
            let known = usize::try_from(expert).ok().and_then(|expert| last.get_mut(expert));
            match known {
                Some(last) if *last != token + 1 => *last = token + 1,
                _ => return Err(GateError::BadChoice { token, k, expert, experts }),
            }
        }
        if !seen.is_finite() {
            return Err(GateError::BadElement {
                what: "scores",
                row: i / columns,
                column: i % columns,
                seen,
            });
        }
    }
    Ok(())
}

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
        let expected = "a multiple of the capacity's groups";
        ensure(tokens.is_multiple_of(groups), "tokens", tokens as f64, expected)?;
        let group = tokens / groups;
        let elements = (group * columns).max(1);
        self.make_room(capacity.drop_policy, experts as usize, ids.len(), elements);

        let mut required = 0;
        for (ids, slots) in ids.chunks(elements).zip(slots.chunks_mut(elements)) {
            required = required.max(self.number(ids, slots));
            self.forget(ids);
        }
        let rows = capacity.rows(group as u32, experts, top_k, required.max(need.unwrap_or(0)));

        let drop_policy = match capacity.drop_policy {
            // All experts have room, so nothing is compared, and these are the places.
            DropPolicy::Score | DropPolicy::Random | DropPolicy::Position if required <= rows => {
                return Ok(CapacityUse { capacity: rows, required });
            }
            drop_policy => drop_policy,
        };
        if drop_policy == DropPolicy::Random {
            self.draw_lots(draw, tokens, columns);
        }
        let parts = ids.chunks_mut(elements).zip(slots.chunks_mut(elements)).zip(scores.chunks(elements));
        for (number, ((ids, slots), scores)) in parts.enumerate() {
            match drop_policy {
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
            match drop_policy {
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
    fn make_room(&mut self, drop_policy: DropPolicy, experts: usize, choices: usize, elements: usize) {
        self.experts.clear();
        self.experts.resize(experts, Expert::default());
        self.ranks.clear();
        if matches!(drop_policy, DropPolicy::Score | DropPolicy::Priority | DropPolicy::Random) {
            self.ranks.reserve(elements);
        }
        self.lots.clear();
        if drop_policy == DropPolicy::Random {
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
mod tests {
    use super::*;

    mod capacity {
        use super::*;
        use crate::gate::DropPolicy;
        use proptest::prelude::*;

        fn capacity(rule: CapacityRule) -> Capacity {
            Capacity { rule, minimum: 0, align: 1, drop_policy: DropPolicy::Position, groups: 1, pad: false }
        }

        fn rows(rule: CapacityRule, tokens: u32, experts: u32, top_k: u32) -> u32 {
            capacity(rule).rows(tokens, experts, top_k, 37)
        }

        #[test]
        fn the_same_product_rounds_up_differently_in_f64_and_f32() {
            for (factor, f64_rows, f32_rows) in [(1.1, 111, 110), (1.2, 120, 121)] {
                assert_eq!(rows(CapacityRule::CeilF64 { factor }, 100, 1, 1), f64_rows);
                assert_eq!(rows(CapacityRule::CeilF32 { factor }, 100, 1, 1), f32_rows);
            }
            // Megatron multiplies tokens by choices before it divides; DeepSpeed multiplies the
            // factor by them.
            assert_eq!(rows(CapacityRule::CeilF64 { factor: 1.25 }, 4096, 64, 8), 640);
            assert_eq!(rows(CapacityRule::CeilF32 { factor: 1.25 }, 4096, 64, 8), 640);
            assert_eq!(rows(CapacityRule::CeilF64 { factor: 1.0 }, 10, 4, 2), 5);
            assert_eq!(rows(CapacityRule::CeilF32 { factor: 1.0 }, 9, 4, 2), 5);
        }

        #[test]
        fn gshard_truncates_then_rounds_up_to_four_or_uses_minimum() {
            let gshard = Capacity { minimum: 5, align: 4, ..capacity(CapacityRule::Trunc { factor: 2.0 }) };
            for (tokens, expected) in [(0, 5), (16, 5), (23, 5), (24, 8), (35, 8), (36, 12)] {
                assert_eq!(gshard.rows(tokens, 8, 2, 0), expected, "{tokens} tokens");
            }
            assert_eq!(rows(CapacityRule::Trunc { factor: 1.25 }, 127, 8, 1), 19);
        }

        #[test]
        fn tutel_cuts_off_per_choice_and_reads_need_from_the_sign() {
            for (factor, expected) in [(1.0, 26), (1.25, 32), (0.0, 37), (-1.0, 26), (-4.0, 37)] {
                assert_eq!(rows(CapacityRule::Tutel { factor }, 100, 8, 2), expected, "factor {factor}");
            }
            let aligned = Capacity { align: 16, ..capacity(CapacityRule::Tutel { factor: -1.0 }) };
            assert_eq!(aligned.rows(100, 8, 2, 37), 32);
            assert_eq!(aligned.rows(100, 8, 2, 0), 0);
        }

        #[test]
        fn needed_capacity_is_aligned_and_capped_by_tokens_at_top_1() {
            let needed = Capacity { align: 8, ..capacity(CapacityRule::Needed) };
            assert_eq!(needed.rows(100, 4, 2, 37), 40);
            assert_eq!(needed.rows(39, 4, 2, 37), 40);
            assert_eq!(needed.rows(39, 4, 1, 37), 39);
            assert_eq!(needed.rows(0, 4, 1, 37), 0);
        }

        #[test]
        fn no_token_leaves_the_minimum_and_overflow_saturates() {
            let rules = [
                CapacityRule::CeilF64 { factor: 1.0 },
                CapacityRule::CeilF32 { factor: 1.0 },
                CapacityRule::Trunc { factor: 1.0 },
                CapacityRule::Tutel { factor: 1.0 },
            ];
            for rule in rules {
                assert_eq!(rows(rule, 0, 8, 2), 0);
                assert_eq!(Capacity { minimum: 4, ..capacity(rule) }.rows(0, 8, 2, 0), 4);
            }
            for rule in [
                CapacityRule::CeilF64 { factor: 1e300 },
                CapacityRule::CeilF32 { factor: 1e300 },
                CapacityRule::Trunc { factor: 1e300 },
                CapacityRule::Tutel { factor: 1e300 },
                CapacityRule::Tutel { factor: -1e300 },
                CapacityRule::Rows { rows: u32::MAX - 1 },
            ] {
                let capacity = Capacity { align: 64, ..capacity(rule) };
                assert_eq!(capacity.rows(100, 4, 8, u32::MAX), u32::MAX, "{rule:?}");
            }
        }

        #[test]
        fn numbers_without_meaning_are_refused() {
            let named = |capacity: Capacity| match capacity.check() {
                Err(GateError::BadNumber { parameter, .. }) => Some(parameter),
                Ok(()) => None,
                Err(other) => panic!("{other}"),
            };
            for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
                for rule in [
                    CapacityRule::CeilF64 { factor },
                    CapacityRule::CeilF32 { factor },
                    CapacityRule::Trunc { factor },
                ] {
                    assert_eq!(named(capacity(rule)), Some("capacity factor"), "{rule:?}");
                }
                let tutel = named(capacity(CapacityRule::Tutel { factor }));
                assert_eq!(tutel, (!factor.is_finite()).then_some("capacity factor"), "{factor}");
            }
            assert_eq!(
                named(Capacity { align: 0, ..capacity(CapacityRule::Needed) }),
                Some("capacity align")
            );
            assert_eq!(
                named(Capacity { groups: 0, ..capacity(CapacityRule::Needed) }),
                Some("capacity groups")
            );
            assert_eq!(named(capacity(CapacityRule::Rows { rows: 0 })), None);
        }

        proptest! {
            /// Against arithmetic in whole numbers, where factors have no fraction to round.
            #[test]
            fn whole_factors_agree_with_whole_arithmetic(
                tokens in 0_u32..5000, experts in 1_u32..64, top_k in 1_u32..9, factor in 1_u32..4,
            ) {
                let f = f64::from(factor);
                let exact = tokens * factor / experts;
                prop_assert_eq!(rows(CapacityRule::Trunc { factor: f }, tokens, experts, top_k), exact);
                let tutel = top_k * factor * tokens.div_ceil(experts);
                prop_assert_eq!(rows(CapacityRule::Tutel { factor: f }, tokens, experts, top_k), tutel);
                if experts.is_power_of_two() {
                    let up = (tokens * top_k * factor).div_ceil(experts);
                    prop_assert_eq!(rows(CapacityRule::CeilF64 { factor: f }, tokens, experts, top_k), up);
                    prop_assert_eq!(rows(CapacityRule::CeilF32 { factor: f }, tokens, experts, top_k), up);
                }
            }
        }
    }

    mod keeping {
        use super::*;
        use proptest::prelude::*;

        fn capacity(drop_policy: DropPolicy, groups: u32, rows: u32) -> Capacity {
            Capacity {
                rule: CapacityRule::Rows { rows },
                minimum: 0,
                align: 1,
                drop_policy,
                groups,
                pad: false,
            }
        }

        /// The order in which an expert considers the tokens that chose it, and the order in which
        /// it numbers those that it keeps.
        fn orders(
            drop_policy: DropPolicy,
            own: &[(usize, usize)],
            score: impl Fn(usize, usize) -> f32,
            columns: usize,
        ) -> [Vec<(usize, usize)>; 2] {
            let by_token = own.to_vec();
            let mut looked = own.to_vec();
            let best = |t: usize| (0..columns).map(|k| score(t, k)).fold(f32::NEG_INFINITY, f32::max);
            // Stable sorts: equal keys stay in token order.
            match drop_policy {
                DropPolicy::Position => {}
                DropPolicy::Score | DropPolicy::Random => {
                    looked.sort_by(|a, b| score(b.0, b.1).partial_cmp(&score(a.0, a.1)).unwrap());
                }
                DropPolicy::FirstChoices => looked.sort_by_key(|&(_, k)| k),
                DropPolicy::Priority => {
                    looked.sort_by(|a, b| best(b.0).partial_cmp(&best(a.0)).unwrap());
                    looked.sort_by_key(|&(_, k)| k);
                }
            }
            let numbered = match drop_policy {
                DropPolicy::Position | DropPolicy::Score | DropPolicy::Random => by_token,
                DropPolicy::FirstChoices | DropPolicy::Priority => looked.clone(),
            };
            [looked, numbered]
        }

        /// Every expert of every group looks at every token.
        fn naive(capacity: &Capacity, choices: &CapacityInput<'_>) -> PlacedChoices {
            let columns = choices.top_k as usize;
            let tokens = choices.ids.len() / columns;
            let group = tokens / capacity.groups as usize;
            let lots: Vec<f32> = (0..tokens)
                .flat_map(|t| {
                    let mut random = choices.draw.stream(Purpose::Keep, t as u32);
                    (0..columns).map(move |_| unit(&mut random))
                })
                .collect();
            let (drop_policy, scores) = match capacity.drop_policy {
                DropPolicy::Random => (DropPolicy::Random, lots.as_slice()),
                drop_policy => (drop_policy, choices.scores),
            };
            let chosen = |group_number: usize, expert: i32| -> Vec<(usize, usize)> {
                let tokens = group_number * group..(group_number + 1) * group;
                let all = tokens.flat_map(|t| (0..columns).map(move |k| (t, k)));
                all.filter(|&(t, k)| choices.ids[t * columns + k] == expert).collect()
            };
            let pairs: Vec<(usize, i32)> = (0..capacity.groups as usize)
                .flat_map(|g| (0..choices.experts as i32).map(move |e| (g, e)))
                .collect();
            let required = pairs.iter().map(|&(g, e)| chosen(g, e).len()).max().unwrap() as u32;
            let need = required.max(choices.need.unwrap_or(0));
            let rows = capacity.rows(group as u32, choices.experts, choices.top_k, need);
            let mut placed = PlacedChoices {
                ids: vec![-1; choices.ids.len()],
                slots: vec![-1; choices.ids.len()],
                capacity: rows,
                required,
            };
            for (g, expert) in pairs {
                let [looked, numbered] =
                    orders(drop_policy, &chosen(g, expert), |t, k| scores[t * columns + k], columns);
                let kept = &looked[..looked.len().min(rows as usize)];
                for (slot, (t, k)) in numbered.into_iter().filter(|pair| kept.contains(pair)).enumerate() {
                    placed.ids[t * columns + k] = expert;
                    placed.slots[t * columns + k] = slot as i32;
                }
            }
            placed
        }

        /// Shapes, with few different scores so that many are equal, and some choices missing.
        fn cases() -> impl Strategy<Value = (u32, u32, u32, Vec<i32>, Vec<f32>)> {
            (1_u32..9, 1_u32..5, 0_u32..14).prop_flat_map(|(experts, groups, group)| {
                (1..=experts.min(4)).prop_flat_map(move |top_k| {
                    let tokens = (groups * group) as usize;
                    let all: Vec<i32> = (0..experts as i32).collect();
                    let row = Just(all).prop_shuffle().prop_flat_map(move |row| {
                        let present = prop::collection::vec(prop::bool::weighted(0.9), top_k as usize);
                        present.prop_map(move |present| {
                            let choice = |(id, present): (&i32, bool)| if present { *id } else { -1 };
                            row.iter().zip(present).map(choice).collect::<Vec<i32>>()
                        })
                    });
                    let score = prop::sample::select(vec![-1.5_f32, -0.0, 0.0, 0.25, 0.5, 1e-30, 3.0]);
                    let scores = prop::collection::vec(score, tokens * top_k as usize);
                    (prop::collection::vec(row, tokens), scores)
                        .prop_map(move |(rows, scores)| (experts, top_k, groups, rows.concat(), scores))
                })
            })
        }

        const ALL: [DropPolicy; 5] = [
            DropPolicy::Score,
            DropPolicy::Position,
            DropPolicy::FirstChoices,
            DropPolicy::Priority,
            DropPolicy::Random,
        ];

        proptest! {
            #[test]
            fn every_expert_keeps_whom_the_rule_names(
                (experts, top_k, groups, ids, scores) in cases(),
                rows in 0_u32..9,
                needed: bool,
                need in prop::option::of(0_u32..20),
                seed: u64,
            ) {
                let draw = RngKey { seed, step: 3, rank: 1 };
                let choices = CapacityInput { experts, top_k, ids: &ids, scores: &scores, need, draw };
                for drop_policy in ALL {
                    let rule = if needed { CapacityRule::Needed } else { CapacityRule::Rows { rows } };
                    let capacity = Capacity { rule, ..capacity(drop_policy, groups, rows) };
                    prop_assert_eq!(apply_capacity(&capacity, &choices).unwrap(), naive(&capacity, &choices), "{:?}", drop_policy);
                }
            }
        }

        /// Keeps with a workspace that has seen something else before.
        fn keep_again(
            keeper: &mut CapacityAssigner,
            capacity: &Capacity,
            choices: &CapacityInput<'_>,
        ) -> PlacedChoices {
            let (mut ids, mut slots) = (choices.ids.to_vec(), vec![77; choices.ids.len()]);
            let chosen = Chosen {
                experts: choices.experts,
                top_k: choices.top_k,
                ids: &mut ids,
                scores: choices.scores,
                slots: &mut slots,
            };
            let kept = keeper.keep(capacity, choices.need, choices.draw, chosen).unwrap();
            PlacedChoices { ids, slots, capacity: kept.capacity, required: kept.required }
        }

        #[test]
        fn a_used_workspace_remembers_nothing() {
            let mut keeper = CapacityAssigner::default();
            for drop_policy in ALL.into_iter().chain(ALL) {
                for (experts, rows) in [(8, 1), (3, 0), (5, 2), (8, 100)] {
                    let ids: Vec<i32> = (0..12).map(|i| i * i % experts as i32).collect();
                    let scores: Vec<f32> = (0..12).map(|i| (i * 7 % 5) as f32).collect();
                    let choices = CapacityInput {
                        experts,
                        top_k: 1,
                        ids: &ids,
                        scores: &scores,
                        ..CapacityInput::default()
                    };
                    let capacity = capacity(drop_policy, 3, rows);
                    assert_eq!(keep_again(&mut keeper, &capacity, &choices), naive(&capacity, &choices));
                }
            }
        }

        /// Four tokens, two choices, three experts; two rows each.
        const IDS: [i32; 8] = [0, 1, 0, 2, 1, 0, 0, 1];
        const SCORES: [f32; 8] = [0.6, 0.3, 0.5, 0.4, 0.7, 0.2, 0.8, 0.1];

        fn placed(drop_policy: DropPolicy) -> (Vec<i32>, Vec<i32>) {
            let choices = CapacityInput {
                experts: 3,
                top_k: 2,
                ids: &IDS,
                scores: &SCORES,
                ..CapacityInput::default()
            };
            let placed = apply_capacity(&capacity(drop_policy, 1, 2), &choices).unwrap();
            assert_eq!((placed.capacity, placed.required), (2, 4));
            (placed.ids, placed.slots)
        }

        #[test]
        fn by_score_the_highest_stay_and_are_numbered_by_token() {
            // Expert 0: 0.6, 0.5, 0.2, 0.8; expert 1: 0.3, 0.7, 0.1.
            assert_eq!(
                placed(DropPolicy::Score),
                (vec![0, 1, -1, 2, 1, -1, 0, -1], vec![0, 0, -1, 0, 1, -1, 1, -1])
            );
        }

        #[test]
        fn by_position_the_first_tokens_stay_whichever_choice_it_is() {
            let expected = (vec![0, 1, 0, 2, 1, -1, -1, -1], vec![0, 0, 1, 0, 1, -1, -1, -1]);
            assert_eq!(placed(DropPolicy::Position), expected);
        }

        #[test]
        fn first_choices_come_before_all_second_ones() {
            // Expert 1: token 2 first, then the second choice of token 0.
            assert_eq!(
                placed(DropPolicy::FirstChoices),
                (vec![0, 1, 0, 2, 1, -1, -1, -1], vec![0, 1, 1, 0, 0, -1, -1, -1])
            );
        }

        #[test]
        fn priority_goes_to_the_surest_tokens() {
            // Tokens 3, 2, 0, 1. Expert 0: 3, 0; expert 1: 2, then the second choice of token 3.
            assert_eq!(
                placed(DropPolicy::Priority),
                (vec![0, -1, -1, 2, 1, -1, 0, 1], vec![1, -1, -1, 0, 0, -1, 0, 1])
            );
        }

        #[test]
        fn lots_are_the_same_for_the_same_draw_alone() {
            let ids = [0; 256];
            let keep = |draw| {
                let choices = CapacityInput {
                    experts: 1,
                    top_k: 1,
                    ids: &ids,
                    scores: &[0.0; 256],
                    ..CapacityInput::default()
                };
                let choices = CapacityInput { draw, ..choices };
                apply_capacity(&capacity(DropPolicy::Random, 1, 128), &choices).unwrap()
            };
            let draw = RngKey { seed: 1, step: 2, rank: 3 };
            let kept = keep(draw);
            assert_eq!(kept.ids.iter().filter(|&&id| id == 0).count(), 128);
            assert_eq!(kept, keep(draw));
            for other in [RngKey { seed: 2, ..draw }, RngKey { step: 3, ..draw }, RngKey { rank: 4, ..draw }]
            {
                assert_ne!(kept, keep(other), "{other:?}");
            }
        }

        #[test]
        fn choices_that_cannot_be_placed_are_named() {
            let good = CapacityInput {
                experts: 3,
                top_k: 2,
                ids: &[0, 1, 2, -1],
                scores: &[0.5; 4],
                ..CapacityInput::default()
            };
            let fails = |groups, choices: &CapacityInput<'_>| {
                apply_capacity(&capacity(DropPolicy::Score, groups, 1), choices).unwrap_err()
            };
            assert!(apply_capacity(&capacity(DropPolicy::Score, 2, 1), &good).is_ok());
            let bad_number = |error| match error {
                GateError::BadNumber { parameter, .. } => parameter,
                other => panic!("{other}"),
            };
            assert_eq!(bad_number(fails(3, &good)), "tokens");
            assert_eq!(bad_number(fails(0, &good)), "capacity groups");
            assert_eq!(bad_number(fails(1, &CapacityInput { top_k: 0, ..good })), "top_k");
            for ids in [[0, 1, 3, -1], [0, 1, -2, 0], [0, 1, 2, 2]] {
                let error = fails(1, &CapacityInput { ids: &ids, ..good });
                assert!(matches!(error, GateError::BadChoice { token: 1, experts: 3, .. }), "{error}");
            }
            let error = fails(1, &CapacityInput { scores: &[0.5, 0.5, f32::NAN, 0.5], ..good });
            assert!(matches!(error, GateError::BadElement { row: 1, column: 0, .. }), "{error}");
            let error = fails(1, &CapacityInput { scores: &[0.5; 2], ..good });
            assert_eq!(error, GateError::WrongShape { what: "scores", seen: 2, rows: 2, columns: 2 });
        }
    }
}
