//! One token: from its logits to its choices and their scores.
//!
//! ```text
//!   logits -> noise -> scores ------------------> scores of the chosen
//!      |         |        + bias                       ^
//!      v         v        v                            |
//!      keys: one of them, or Sinkhorn's -> choices ----+     (or recorded ones)
//! ```
//!
//! Only a softmax of all needs the scores of all experts. Other scores are computed for the chosen
//! experts, and for all on request.

use super::call::GateInput;
use super::choose::{Chooser, Logits, put_in_order};
use super::math;
use super::score::of_chosen;
use super::top_k::TopK;
use super::{GateConfig, Noise, ScoreFunction, replay};
use crate::error::GateError;

/// Decides for one token after another; keeps its memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Tokens {
    /// Scores but for their last step, `[experts]`.
    parts: Vec<f64>,
    /// `[experts]`.
    noisy: Vec<f32>,
    /// Logits of the chosen.
    few: Vec<f32>,
    first: TopK,
    chooser: Chooser,
}

/// The decision for one token.
pub(super) struct Row<'a> {
    /// `[top_k]`.
    pub(super) ids: &'a mut [i32],
    /// Unrounded scores of the choices, `[top_k]`.
    pub(super) chosen: &'a mut [f64],
}

impl Tokens {
    /// To be called before the first token of a call.
    pub(super) fn begin(&mut self, config: &GateConfig, call: &GateInput<'_>) -> Result<(), GateError> {
        self.make_room(config);
        self.chooser.begin(config, call)
    }

    pub(super) fn make_room(&mut self, config: &GateConfig) {
        let experts = config.experts as usize;
        self.parts.resize(experts, 0.0);
        self.noisy.resize(experts, 0.0);
    }

    /// Decides for one token.
    pub(super) fn decide(
        &mut self,
        config: &GateConfig,
        call: &GateInput<'_>,
        token: u32,
        row: Row<'_>,
    ) -> Result<(), GateError> {
        let (at, k) = (token as usize, config.top_k as usize);
        let logits = logits_of(config, call, token)?;
        let noise = self.add_noise(config, call, token, logits);
        let Tokens { parts, noisy, few, first, chooser } = self;
        if noise == Noise::GumbelAfterFirst {
            first.of(logits, 1).for_each(|first| noisy[first as usize] = f32::INFINITY);
        }
        let noisy = &noisy[..];
        let compared = if noise == Noise::None { logits } else { noisy };
        let weighed = if noise.on_weights() { noisy } else { logits };
        let last = (config.score == ScoreFunction::Softmax).then(|| config.score.begin(weighed, parts));

        let recorded = call.replay.map(|ids| &ids[at * k..][..k]);
        recorded.map_or(Ok(()), |recorded| replay::check(token, recorded, config.experts))?;
        let mut by_keys = false;
        if call.token_mask.is_some_and(|used| !used[at]) {
            row.ids.fill(-1);
        } else if let Some(recorded) = recorded {
            row.ids.copy_from_slice(recorded);
        } else {
            by_keys = true;
            chooser.choose(config, call, at, Logits { compared, weighed, parts, last }, row.ids);
        }
        match last {
            Some(last) => {
                let score = |&id: &i32| usize::try_from(id).map_or(0.0, |id| last.of(parts[id]));
                row.chosen.iter_mut().zip(row.ids.iter()).for_each(|(to, id)| *to = score(id));
            }
            None => of_chosen(config.score, weighed, row.ids, few, row.chosen),
        }
        if by_keys {
            put_in_order(config, call, row.ids, row.chosen);
        }
        Ok(())
    }

    /// Scores of all experts for one token.
    pub(super) fn score(
        &mut self,
        config: &GateConfig,
        call: &GateInput<'_>,
        token: u32,
        scores: &mut [f32],
    ) -> Result<(), GateError> {
        let logits = logits_of(config, call, token)?;
        let noise = self.add_noise(config, call, token, logits);
        let weighed = if noise.on_weights() { &self.noisy } else { logits };
        config.score.begin(weighed, &mut self.parts).round(&self.parts, scores);
        Ok(())
    }

    /// Logits with their noise for one token.
    pub(super) fn noisy(
        &mut self,
        config: &GateConfig,
        call: &GateInput<'_>,
        token: u32,
        to: &mut [f32],
    ) -> Result<(), GateError> {
        let logits = logits_of(config, call, token)?;
        let noise = self.add_noise(config, call, token, logits);
        to.copy_from_slice(if noise == Noise::None { logits } else { &self.noisy });
        Ok(())
    }

    /// Makes the noisy logits, where there is noise, and says which.
    fn add_noise(&mut self, config: &GateConfig, call: &GateInput<'_>, token: u32, logits: &[f32]) -> Noise {
        let noise = config.noise.of_pass(call.training);
        if noise != Noise::None {
            let experts = config.experts as usize;
            let deviation = call.noise_std.map(|all| &all[token as usize * experts..][..experts]);
            noise.fill(call.draw, token, logits, deviation, &mut self.noisy);
        }
        noise
    }
}

/// The logits of a token, which are finite.
fn logits_of<'a>(config: &GateConfig, call: &GateInput<'a>, token: u32) -> Result<&'a [f32], GateError> {
    let experts = config.experts as usize;
    let logits = &call.logits[token as usize * experts..][..experts];
    finite(token, logits)?;
    Ok(logits)
}

pub(super) fn finite(token: u32, logits: &[f32]) -> Result<(), GateError> {
    if math::finite(logits) {
        return Ok(());
    }
    let bad = (0..).zip(logits).find(|(_, logit)| !logit.is_finite());
    bad.map_or(Ok(()), |(expert, &seen)| Err(GateError::NotFinite { token, expert, seen }))
}
