//! Places choices of another router: the part of a gate that knows no logits.

use super::keep::{CapacityAssigner, CapacityUse, Chosen};
use super::{Capacity, RngKey};
use crate::error::GateError;

/// Choices that are to be placed. `Default` has no tokens: fill in what there is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choices<'a> {
    /// Experts.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// `[tokens, top_k]`: the experts chosen, -1 for none; a token names each expert at most once.
    pub ids: &'a [i32],
    /// `[tokens, top_k]`: values of choices for policies that keep the best. Megatron compares its
    /// weights, DeepSpeed and Tutel compare unnormalised scores.
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
/// use sidelane_core::gate::{Capacity, CapacityRule, Choices, DropPolicy, apply_capacity};
///
/// let capacity =
///     Capacity { rule: CapacityRule::Rows { rows: 2 }, minimum: 0, align: 1, keep: DropPolicy::Score, groups: 1, pad: false };
/// let choices =
///     Choices { experts: 4, top_k: 1, ids: &[3, 3, 0, 3], scores: &[0.5, 0.4, 0.9, 0.7], ..Choices::default() };
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
pub fn apply_capacity(capacity: &Capacity, choices: &Choices<'_>) -> Result<PlacedChoices, GateError> {
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

fn check(choices: &Choices<'_>) -> Result<(), GateError> {
    let &Choices { experts, top_k, ids, scores, .. } = choices;
    if top_k == 0 {
        return Err(GateError::BadNumber { parameter: "top_k", seen: 0.0, expected: "at least 1" });
    }
    let columns = top_k as usize;
    let rows = ids.len() / columns;
    for (what, seen) in [("expert ids", ids.len()), ("scores", scores.len())] {
        if seen != rows * columns {
            return Err(GateError::WrongShape { what, seen, rows, columns });
        }
    }
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
