//! One token: from its logits to its choices and their scores.
//!
//! ```text
//!   logits -> noise -> scores ------------------> scores of the chosen
//!      |         |        + bias                       ^
//!      v         v        v                            |
//!      keys: one of them, or Sinkhorn's -> choices ----+     (or recorded ones)
//! ```
//!
//! Where scores would be compared alone, logits are: their order is that of the exact scores, and no two of them become
//! equal by rounding.

use super::call::Call;
use super::score::{Last, of_chosen};
use super::select::Selector;
use super::sinkhorn::Sinkhorn;
use super::top_k::TopK;
use super::{GateConfig, Noise, Score, Select, replay};
use crate::error::GateError;

/// Decides for one token after another; keeps its memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Tokens {
    /// Scores but for their last step, `[experts]`.
    parts: Vec<f64>,
    /// `[experts]`.
    noisy: Vec<f32>,
    /// What is compared, `[experts]`.
    keys: Vec<f32>,
    /// Logits of the chosen.
    few: Vec<f32>,
    first: TopK,
    selector: Selector,
    sinkhorn: Sinkhorn,
}

/// What is decided for one token.
pub(super) struct Row<'a> {
    /// `[experts]`, or empty where scores are made of the chosen alone.
    pub(super) scores: &'a mut [f32],
    /// `[top_k]`.
    pub(super) ids: &'a mut [i32],
    /// Unrounded scores of the choices, `[top_k]`.
    pub(super) chosen: &'a mut [f64],
}

impl Tokens {
    /// To be called before the first token of a call.
    pub(super) fn begin(&mut self, config: &GateConfig, call: &Call<'_>) -> Result<(), GateError> {
        let experts = config.experts as usize;
        self.parts.resize(experts, 0.0);
        self.noisy.resize(experts, 0.0);
        self.keys.resize(experts, 0.0);
        if let Some(tolerance) = balanced(config, call) {
            for (token, logits) in (0..).zip(call.logits.chunks_exact(experts)) {
                finite(token, logits)?;
            }
            self.sinkhorn.balance(call.logits, experts, call.used, tolerance)?;
        }
        Ok(())
    }

    /// Decides for one token.
    pub(super) fn decide(
        &mut self,
        config: &GateConfig,
        call: &Call<'_>,
        token: u32,
        row: Row<'_>,
    ) -> Result<(), GateError> {
        let (at, experts, k) = (token as usize, config.experts as usize, config.top_k as usize);
        let logits = &call.logits[at * experts..][..experts];
        finite(token, logits)?;
        let noise = if call.training { config.noise } else { Noise::None };
        if noise != Noise::None {
            let deviation = call.deviation.map(|all| &all[at * experts..][..experts]);
            noise.fill(call.draw, token, logits, deviation, &mut self.noisy);
        }
        let own = noise.on_weights();
        let mut last = Last::Times(1.0);
        if config.score.before_choice() {
            last = config.score.begin(if own { &self.noisy } else { logits }, &mut self.parts);
            last.round(&self.parts, row.scores);
        }
        if let Some(recorded) = call.replay {
            let recorded = &recorded[at * k..][..k];
            replay::check(token, recorded, config.experts)?;
            row.ids.copy_from_slice(recorded);
        }
        if call.used.is_some_and(|used| !used[at]) {
            row.ids.fill(-1);
        } else if call.replay.is_none() {
            self.choose(config, call, at, logits, row.scores, row.ids);
        }
        if config.score.before_choice() {
            let score = |&id: &i32| usize::try_from(id).map_or(0.0, |id| last.of(self.parts[id]));
            row.chosen.iter_mut().zip(row.ids.iter()).for_each(|(to, id)| *to = score(id));
        } else {
            of_chosen(if own { &self.noisy } else { logits }, row.ids, &mut self.few, row.chosen);
        }
        Ok(())
    }

    fn choose(
        &mut self,
        config: &GateConfig,
        call: &Call<'_>,
        token: usize,
        logits: &[f32],
        scores: &[f32],
        ids: &mut [i32],
    ) {
        let noise = if call.training { config.noise } else { Noise::None };
        if noise == Noise::GumbelAfterFirst {
            self.first.of(logits, 1).for_each(|first| self.noisy[first as usize] = f32::INFINITY);
        }
        let seen = if noise == Noise::None { logits } else { &self.noisy };
        let groups = matches!(config.select, Select::Groups { .. });
        let base = if groups && config.score != Score::SoftmaxOfChosen { scores } else { seen };
        let keys = if balanced(config, call).is_some() {
            self.sinkhorn.keys(token, &mut self.keys);
            &self.keys
        } else if let Some(bias) = call.bias {
            let sums = scores.iter().zip(bias).map(|(score, bias)| score + bias);
            self.keys.iter_mut().zip(sums).for_each(|(key, sum)| *key = sum);
            &self.keys
        } else {
            base
        };
        self.selector.choose(config.select, keys, ids);
    }
}

/// The tolerance, where choices are balanced.
fn balanced(config: &GateConfig, call: &Call<'_>) -> Option<f32> {
    match config.select {
        Select::Sinkhorn { tolerance } if call.training && call.replay.is_none() => Some(tolerance),
        _ => None,
    }
}

fn finite(token: u32, logits: &[f32]) -> Result<(), GateError> {
    if logits.iter().fold(true, |all, logit| all & (logit.abs() <= f32::MAX)) {
        return Ok(());
    }
    let bad = (0..).zip(logits).find(|(_, logit)| !logit.is_finite());
    bad.map_or(Ok(()), |(expert, &seen)| Err(GateError::NotFinite { token, expert, seen }))
}
