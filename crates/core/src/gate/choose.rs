//! Keys by which a token's experts are compared.
//!
//! | keys | where |
//! |---|---|
//! | logits, with their noise | scores would be compared alone: their order is that of the exact scores, and no two of them become equal by rounding |
//! | scores, plus bias | with a bias, or in groups |
//! | Sinkhorn's | while it balances |
//!
//! Computing scores in f64 takes longer than all else. Many sigmoids have to be compared and few
//! are chosen, so rough ones are compared first:
//!
//! ```text
//!   rough keys, off by at most e
//!       |    are the kept groups more than their sums' errors above the others, and the chosen experts more than 2e?
//!       +-- yes --> these are chosen by exact keys, too; the exact keys of the few put them in order
//!       +-- no ---> exact keys of all
//! ```
//!
//! Either way the choice is that of the exact keys.

use super::math::{LOGISTIC_ERROR, logistic_each};
use super::score::Last;
use super::select::Selector;
use super::sinkhorn::Sinkhorn;
use super::{GateConfig, GateInput, ScoreFunction, Select};
use crate::error::GateError;

/// Chooses for one token after another; keeps its memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Chooser {
    /// Keys to compare, `[experts]`.
    keys: Vec<f32>,
    /// How much rough keys are off, at most.
    error: f32,
    selector: Selector,
    sinkhorn: Sinkhorn,
}

/// One token's logits and what has been made of them, `[experts]` each.
pub(super) struct Logits<'a> {
    /// By which is chosen.
    pub(super) compared: &'a [f32],
    /// From which weights are made.
    pub(super) weighed: &'a [f32],
    /// Scores but for their last step; room for them where that is `None`.
    pub(super) parts: &'a mut [f64],
    pub(super) last: Option<Last>,
}

impl Chooser {
    /// To be called before the first token of a call.
    pub(super) fn begin(&mut self, config: &GateConfig, call: &GateInput<'_>) -> Result<(), GateError> {
        let experts = config.experts as usize;
        self.keys.resize(experts, 0.0);
        let largest = |bias: &[f32]| bias.iter().fold(0f32, |most, bias| most.max(bias.abs()));
        self.error = LOGISTIC_ERROR * (1.0 + call.bias.map_or(0.0, largest));
        if let Some(tolerance) = balanced(config, call) {
            for (token, logits) in (0..).zip(call.logits.chunks_exact(experts)) {
                super::token::finite(token, logits)?;
            }
            self.sinkhorn.balance(call.logits, experts, call.token_mask, tolerance)?;
        }
        Ok(())
    }

    /// Fills `ids` with a token's choices, best first. By rough keys, choices that lie close
    /// together may be out of order.
    pub(super) fn choose(
        &mut self,
        config: &GateConfig,
        call: &GateInput<'_>,
        token: usize,
        logits: Logits<'_>,
        ids: &mut [i32],
    ) {
        if balanced(config, call).is_some() {
            self.sinkhorn.keys(token, &mut self.keys);
            self.selector.choose(config.select, &self.keys, 0.0, ids);
        } else if by_scores(config, call) {
            self.by_scores(config, call.bias, logits, ids);
        } else {
            self.selector.choose(config.select, logits.compared, 0.0, ids);
        }
    }

    fn by_scores(&mut self, config: &GateConfig, bias: Option<&[f32]>, logits: Logits<'_>, ids: &mut [i32]) {
        let Logits { weighed, parts, last, .. } = logits;
        if config.score == ScoreFunction::Sigmoid {
            logistic_each(weighed, &mut self.keys);
            add(bias, &mut self.keys);
            if self.selector.choose(config.select, &self.keys, self.error, ids) {
                return;
            }
        }
        let last = last.unwrap_or_else(|| config.score.begin(weighed, parts));
        last.round(parts, &mut self.keys);
        add(bias, &mut self.keys);
        self.selector.choose(config.select, &self.keys, 0.0, ids);
    }
}

/// Sorts choices by the exact keys of their `scores`, if scores chose them.
pub(super) fn put_in_order(config: &GateConfig, call: &GateInput<'_>, ids: &mut [i32], scores: &mut [f64]) {
    if !by_scores(config, call) {
        return;
    }
    let key = |id: i32, score: f64| score as f32 + call.bias.map_or(0.0, |bias| bias[id as usize]);
    // Hardly ever is there anything to do.
    for end in 1..ids.len() {
        for at in (1..=end).rev() {
            let (one, other) = (key(ids[at - 1], scores[at - 1]), key(ids[at], scores[at]));
            if one > other || one == other && ids[at - 1] < ids[at] {
                break;
            }
            ids.swap(at - 1, at);
            scores.swap(at - 1, at);
        }
    }
}

fn by_scores(config: &GateConfig, call: &GateInput<'_>) -> bool {
    let groups = matches!(config.select, Select::Groups { .. });
    call.bias.is_some() || groups && config.score.before_choice()
}

fn add(bias: Option<&[f32]>, keys: &mut [f32]) {
    if let Some(bias) = bias {
        keys.iter_mut().zip(bias).for_each(|(key, bias)| *key += bias);
    }
}

/// The tolerance, where choices are balanced.
fn balanced(config: &GateConfig, call: &GateInput<'_>) -> Option<f32> {
    match config.select {
        Select::Sinkhorn { tolerance } if call.training && call.replay.is_none() => Some(tolerance),
        _ => None,
    }
}
