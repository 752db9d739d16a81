//! Input of a router.

use super::{GateConfig, Noise, RngKey, ScoreFunction, Select};
use crate::error::GateError;

/// One forward pass over the tokens of a rank. Only the logits must be given.
///
/// ```
/// use sidelane_core::gate::GateInput;
/// let call = GateInput { logits: &[0.5, 1.0, -2.0, 0.0], training: true, ..GateInput::default() };
/// assert!(call.bias.is_none());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct GateInput<'a> {
    /// The router's logits, `[tokens, experts]`.
    pub logits: &'a [f32],
    /// `[experts]`, added to the scores for the choice alone.
    pub bias: Option<&'a [f32]>,
    /// `[tokens, experts]`: factors on the standard deviation of
    /// [`Noise::Normal`], 0 or more (Shazeer's noisy gate, whose deviations
    /// are learnt).
    pub noise_std: Option<&'a [f32]>,
    /// `[tokens]`: which tokens choose; the others are padding. All do where it is not given.
    pub token_mask: Option<&'a [bool]>,
    /// `[tokens, top_k]`: recorded choices, -1 for none. They replace the router's own choices;
    /// weights come from the scores of this call.
    pub replay: Option<&'a [i32]>,
    /// The largest number of rows that any rank needs for one expert, for a capacity that follows
    /// the need. All ranks must pass the same number.
    pub global_required: Option<u32>,
    /// Whether this is a training pass. Only then does the router add noise (unless its kind always
    /// applies), thin out second choices and balance choices.
    pub training: bool,
    /// Which random numbers.
    pub draw: RngKey,
}

impl GateInput<'_> {
    /// Checks all but the values of logits and recorded choices; returns the number of tokens.
    pub(super) fn check(&self, config: &GateConfig) -> Result<u32, GateError> {
        let (experts, k) = (config.experts as usize, config.top_k as usize);
        let tokens = self.logits.len() / experts;
        shape("logits", self.logits.len(), tokens, experts)?;
        let Some(count) = u32::try_from(tokens).ok().filter(|&count| i32::try_from(count).is_ok()) else {
            let (parameter, expected) = ("tokens", "at most 2^31 - 1");
            return Err(GateError::BadNumber { parameter, seen: tokens as f64, expected });
        };
        if let Some(bias) = self.bias {
            shape("bias", bias.len(), experts, 1)?;
            values("bias", 1, bias, |value| value.is_finite())?;
            if config.score == ScoreFunction::SoftmaxOfChosen {
                return conflict("bias", "softmax of the chosen", "there are no scores to add it to");
            }
            if matches!(config.select, Select::Sinkhorn { .. }) {
                return conflict("bias", "Sinkhorn", "both balance");
            }
            if config.noise.samples() {
                return conflict("bias", "Gumbel noise", "it samples by the logits alone");
            }
        }
        if let Some(deviation) = self.noise_std {
            shape("deviation", deviation.len(), tokens, experts)?;
            values("deviation", experts, deviation, |value| value.is_finite() && value >= 0.0)?;
            if !matches!(config.noise, Noise::Normal { .. }) {
                return conflict("deviation", "noise that is not normal", "it has no deviation");
            }
        }
        self.token_mask.map_or(Ok(()), |used| shape("used", used.len(), tokens, 1))?;
        self.replay.map_or(Ok(()), |ids| shape("recorded choices", ids.len(), tokens, k))?;
        Ok(count)
    }
}

fn shape(what: &'static str, seen: usize, rows: usize, columns: usize) -> Result<(), GateError> {
    if seen == rows * columns { Ok(()) } else { Err(GateError::WrongShape { what, seen, rows, columns }) }
}

fn values(
    what: &'static str,
    columns: usize,
    values: &[f32],
    right: impl Fn(f32) -> bool,
) -> Result<(), GateError> {
    let wrong = values.iter().enumerate().find(|&(_, &value)| !right(value));
    wrong.map_or(Ok(()), |(at, &seen)| {
        Err(GateError::BadElement { what, row: at / columns, column: at % columns, seen })
    })
}

fn conflict<T>(one: &'static str, other: &'static str, why: &'static str) -> Result<T, GateError> {
    Err(GateError::Conflict { one, other, why })
}
