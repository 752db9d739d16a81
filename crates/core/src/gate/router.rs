//! The router: calls in, decisions out.

use std::slice::ChunksExactMut;

use super::keep::{CapacityAssigner, Chosen};
use super::normalise::weigh;
use super::token::{Row, Tokens};
use super::{Capacity, CapacityRule, Decision, DropPolicy, GateConfig, GateInput};
use crate::error::GateError;

/// A router with its configuration and its memory: after the first call of a size nothing is
/// allocated.
///
/// ```
/// use sidelane_core::gate::{Gate, GateInput, Preset};
/// let mut gate = Gate::new(Preset::Mixtral.config(4, 2)?)?;
/// let decision = gate.route(&GateInput { logits: &[0.0, 2.0, 1.0, 2.0], ..GateInput::default() })?;
/// assert_eq!(decision.experts(), [1, 3]);
/// assert_eq!(decision.weights(), [0.5, 0.5]);
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Gate {
    config: GateConfig,
    decision: Decision,
    tokens: Tokens,
    /// Unrounded scores of the choices, `[tokens, top_k]`.
    chosen: Vec<f64>,
    /// Scores of the choices, rounded, `[tokens, top_k]`.
    worth: Vec<f32>,
    keeper: CapacityAssigner,
}

/// All choices find room, in token order.
const DROPLESS: Capacity = Capacity {
    rule: CapacityRule::Needed,
    minimum: 0,
    align: 1,
    keep: DropPolicy::Position,
    groups: 1,
    pad: false,
};

impl Gate {
    /// A router.
    ///
    /// # Errors
    /// What [`GateConfig::check`] finds.
    pub fn new(config: GateConfig) -> Result<Gate, GateError> {
        config.check()?;
        let decision = Decision { top_k: config.top_k, ..Decision::default() };
        let (tokens, keeper) = (Tokens::default(), CapacityAssigner::default());
        Ok(Gate { config, decision, tokens, keeper, chosen: Vec::new(), worth: Vec::new() })
    }

    /// Configuration of the router.
    pub fn config(&self) -> &GateConfig {
        &self.config
    }

    /// Decides for all tokens of `call`.
    ///
    /// # Errors
    /// [`GateError::WrongShape`], [`GateError::NotFinite`], [`GateError::BadNumber`],
    /// [`GateError::Conflict`] and [`GateError::BadReplay`] name what is wrong with the call. Then
    /// the gate decides nothing, and the next call works.
    pub fn route(&mut self, call: &GateInput<'_>) -> Result<&Decision, GateError> {
        let Gate { config, decision, tokens, chosen, .. } = self;
        let count = call.check(config)?;
        let k = config.top_k as usize;
        decision.make_room(count as usize);
        chosen.resize(count as usize * k, 0.0);
        tokens.begin(config, call)?;
        for token in 0..count {
            let at = token as usize;
            let row = Row { ids: &mut decision.choices[at * k..][..k], chosen: &mut chosen[at * k..][..k] };
            tokens.decide(config, call, token, row)?;
        }
        self.drop(call)?;
        Ok(&self.decision)
    }

    /// The scores of all experts, `[tokens, experts]`, before bias and normalization. Where weights
    /// come from the chosen experts alone
    /// ([`ScoreFunction::SoftmaxOfChosen`](super::ScoreFunction::SoftmaxOfChosen)), the softmax of
    /// all. A decision needs few of them, so they are computed on request.
    ///
    /// ```
    /// # use sidelane_core::gate::{Gate, GateInput, Preset};
    /// let mut gate = Gate::new(Preset::Qwen3.config(2, 1)?)?;
    /// let mut scores = [0.0; 4];
    /// gate.scores(&GateInput { logits: &[1.0, 1.0, 2.0, 2.0], ..GateInput::default() }, &mut scores)?;
    /// assert_eq!(scores, [0.5; 4]);
    /// # Ok::<(), sidelane_core::error::GateError>(())
    /// ```
    ///
    /// # Errors
    /// As [`route`](Gate::route), and [`GateError::WrongShape`] if `scores` has another size than
    /// the logits.
    pub fn scores(&mut self, call: &GateInput<'_>, scores: &mut [f32]) -> Result<(), GateError> {
        let Gate { config, tokens, .. } = self;
        let rows = rows("scores", config, call, scores)?;
        tokens.make_room(config);
        (0..).zip(rows).try_for_each(|(token, row)| tokens.score(config, call, token, row))
    }

    /// The logits of `call` with their noise, `[tokens, experts]`: the logits that choose experts
    /// and, if the noise enters the weights, give weights. Without noise they equal the logits.
    ///
    /// # Errors
    /// As [`route`](Gate::route), and [`GateError::WrongShape`] if `noisy` has another size than
    /// the logits.
    pub fn noisy_logits(&mut self, call: &GateInput<'_>, noisy: &mut [f32]) -> Result<(), GateError> {
        let Gate { config, tokens, .. } = self;
        let rows = rows("noisy logits", config, call, noisy)?;
        tokens.make_room(config);
        (0..).zip(rows).try_for_each(|(token, row)| tokens.noisy(config, call, token, row))
    }

    /// From all choices to those that are left, their weights, places and counts.
    fn drop(&mut self, call: &GateInput<'_>) -> Result<(), GateError> {
        let Gate { config, decision: of, chosen, keeper, worth, .. } = self;
        let (k, scaling, normalise) = (config.top_k as usize, config.scaling, config.normalise);
        weigh(normalise.before(), scaling, k, chosen, &of.choices, &mut of.weights);
        of.experts.copy_from_slice(&of.choices);
        if call.training {
            config.second.thin(call.draw, &of.weights, &mut of.experts);
        }
        let capacity = config.capacity.as_ref().unwrap_or(&DROPLESS);
        let worth = if capacity.keep == DropPolicy::Priority {
            worth.clear();
            worth.extend(chosen.iter().map(|&score| score as f32));
            &worth[..]
        } else {
            &of.weights
        };
        let (experts, top_k) = (config.experts, config.top_k);
        let chosen_by = Chosen { experts, top_k, ids: &mut of.experts, scores: worth, slots: &mut of.slots };
        let kept = keeper.keep(capacity, call.global_required, call.draw, chosen_by)?;
        (of.capacity, of.required) = (kept.capacity, kept.required);
        if let Some(after) = normalise.after() {
            weigh(Some(after), scaling, k, chosen, &of.experts, &mut of.weights);
        }
        of.weights
            .iter_mut()
            .zip(&of.experts)
            .filter(|(_, id)| **id < 0)
            .for_each(|(weight, _)| *weight = 0.0);
        count(&mut of.counts_before, experts, &of.choices);
        count(&mut of.counts_after, experts, &of.experts);
        Ok(())
    }
}

/// The rows of an array that is `[tokens, experts]` for a call that is right.
fn rows<'a>(
    what: &'static str,
    config: &GateConfig,
    call: &GateInput<'_>,
    array: &'a mut [f32],
) -> Result<ChunksExactMut<'a, f32>, GateError> {
    let (rows, columns) = (call.check(config)? as usize, config.experts as usize);
    if array.len() != rows * columns {
        return Err(GateError::WrongShape { what, seen: array.len(), rows, columns });
    }
    Ok(array.chunks_exact_mut(columns))
}

fn count(counts: &mut Vec<u32>, experts: u32, ids: &[i32]) {
    counts.clear();
    counts.resize(experts as usize, 0);
    ids.iter().filter_map(|&id| usize::try_from(id).ok()).for_each(|id| counts[id] += 1);
}
