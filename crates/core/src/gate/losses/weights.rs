//! From the gradient of routing weights to that of the logits.

use super::gradient::softmax_backward;
use super::{known, rows_of, shape};
use crate::error::GateError;
use crate::gate::score::of_chosen;
use crate::gate::{Divisor, GateConfig};

/// A router's decision, and how the loss changes with its weights.
#[derive(Clone, Copy, Debug)]
pub struct WeightsInput<'a> {
    /// `[tokens, experts]`: the logits behind the weights. If noise enters the weights, too, these
    /// are the noisy logits ([`Gate::noisy_logits`](crate::gate::Gate::noisy_logits)). The clean
    /// logits then have the same gradient, times the factor if the noise multiplies.
    pub logits: &'a [f32],
    /// `[tokens, top_k]`: the choices before dropping
    /// ([`Decision::choices`](crate::gate::Decision::choices)).
    pub choices: &'a [i32],
    /// `[tokens, top_k]`: the choices after dropping
    /// ([`Decision::experts`](crate::gate::Decision::experts)).
    pub experts: &'a [i32],
    /// `[tokens, top_k]`: d loss / d weight; what stands at a dropped choice counts for nothing.
    pub d_weights: &'a [f32],
}

/// Adds d loss / d logit to `gradient`, `[tokens, experts]`: back through scaling, normalisation
/// (before or after dropping, as the weights were made) and scores. Neither the choices nor the
/// bias have a gradient.
///
/// # Errors
/// [`GateError::WrongShape`], [`GateError::NotFinite`], [`GateError::BadChoice`], and the errors of
/// [`GateConfig::check`]. Then the gradient is unchanged.
pub fn weights_backward(
    config: &GateConfig,
    input: &WeightsInput<'_>,
    gradient: &mut [f32],
) -> Result<(), GateError> {
    config.check()?;
    let (experts, k) = (config.experts as usize, config.top_k as usize);
    let tokens = rows_of(input.logits, experts)?;
    for (what, ids) in [("choices", input.choices), ("experts", input.experts)] {
        shape(what, ids.len(), tokens, k)?;
        known(ids, k, experts)?;
    }
    shape("weight gradients", input.d_weights.len(), tokens, k)?;
    shape("gradient", gradient.len(), tokens, experts)?;

    let (mut scores, mut d_scores) = (vec![0.0; experts], vec![0.0; experts]);
    let (mut chosen, mut d_chosen, mut few) = (vec![0.0; k], vec![0.0; k], Vec::new());
    for (token, gradient) in gradient.chunks_exact_mut(experts).enumerate() {
        let logits = &input.logits[token * experts..][..experts];
        let row = token * k..(token + 1) * k;
        let (choices, left) = (&input.choices[row.clone()], &input.experts[row.clone()]);
        let of_all = config.score.before_choice();
        if of_all {
            config.score.fill(logits, &mut scores);
            let score = |&id: &i32| usize::try_from(id).map_or(0.0, |id| scores[id]);
            chosen.iter_mut().zip(choices).for_each(|(to, id)| *to = score(id));
        } else {
            of_chosen(config.score, logits, choices, &mut few, &mut chosen);
        }

        for ((d, &id), &weight) in d_chosen.iter_mut().zip(left).zip(&input.d_weights[row]) {
            *d = if id < 0 { 0.0 } else { f64::from(weight) * f64::from(config.scaling) };
        }
        if let Some(divisor) = config.normalise.before() {
            divisor.backward(&chosen, choices, &mut d_chosen);
        } else if let Some(divisor) = config.normalise.after() {
            divisor.backward(&chosen, left, &mut d_chosen);
        }
        d_scores.fill(0.0);
        if !of_all {
            softmax_backward(&chosen, &mut d_chosen);
        }
        let named = choices.iter().zip(&d_chosen);
        named.filter(|&(&id, _)| id >= 0).for_each(|(&id, d)| d_scores[id as usize] += d);
        if of_all {
            config.score.backward(logits, &scores, &mut d_scores);
        }
        gradient.iter_mut().zip(&d_scores).for_each(|(to, &d)| *to += d as f32);
    }
    Ok(())
}

impl Divisor {
    /// From d/d (score / divisor) to d/d score, in place, where the divisor is that of the choices
    /// `ids`.
    fn backward(self, scores: &[f64], ids: &[i32], d: &mut [f64]) {
        let divisor = self.of(scores, ids);
        let moves = match self {
            Divisor::SumPlus(_) => ids.len() > 1,
            Divisor::SumAtLeast(least) => divisor > f64::from(least),
        };
        let pull: f64 = d.iter().zip(scores).map(|(d, score)| d * score).sum::<f64>() / divisor;
        for (d, &id) in d.iter_mut().zip(ids) {
            *d = (*d - if moves && id >= 0 { pull } else { 0.0 }) / divisor;
        }
    }
}
