//! The loss that keeps importance and load even, where noise chooses.
//!
//! Shazeer's two losses (2017) as in Tutel (`load_importance_loss`). T tokens, E experts, K
//! choices, noise of standard deviation d = `noise` / E on the logits that choose:
//!
//! ```text
//!   p_te    = softmax of the clean logits
//!   line_t  = the noisy logit of token t's last choice: what an expert has to beat
//!   importance_e = sum over t of p_te
//!   load_e       = sum over t of Phi((p_te - line_t) / d)          Phi: the normal distribution
//!   loss = coefficient * (cv2(importance) + cv2(load)) / 2          cv2(x) = variance(x) / (mean(x)^2 + 1e-10), over E - 1
//! ```
//!
//! A probability is held against a logit, as Tutel does it. All of it has a gradient, `line_t` too.

use std::f64::consts::{PI, SQRT_2};

use super::gradient::softmax_backward;
use super::{finite, known, rows_of, shape};
use crate::error::GateError;
use crate::gate::ScoreFunction;
use crate::gate::math::exp;

/// Avoids a division by zero for experts that no token wants.
const EPSILON: f64 = 1e-10;

/// Input of the loss.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImportanceInput<'a> {
    /// `[tokens, experts]`, without noise.
    pub logits: &'a [f32],
    /// `[tokens, experts]`: the logits that chose
    /// ([`Gate::noisy_logits`](crate::gate::Gate::noisy_logits)). Without them, the clean logits.
    pub noisy: Option<&'a [f32]>,
    /// Experts, 2 at least.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// `[tokens, top_k]`: the choices before dropping. Tokens whose last one is -1 do not count.
    pub choices: &'a [i32],
    /// Tutel's `gate_noise`, above 0: the standard deviation of the noise times the experts.
    pub noise: f32,
}

/// The loss. Its gradient with respect to the clean logits, of which the noisy ones are a sum, is
/// added to `gradient`, `[tokens, experts]`. Without tokens there is no loss.
///
/// ```
/// use sidelane_core::gate::{ImportanceInput, importance_loss};
/// // Expert 0 is wanted twice, and as much as expert 1 is not.
/// let input = ImportanceInput {
///     logits: &[0.0, -200.0, 0.0, -200.0], experts: 2, top_k: 1, choices: &[0, 0], noise: 2.0, ..ImportanceInput::default()
/// };
/// // Importance 2 and 0, load 2 Phi(1) and 2 Phi(0): variances over squared means are 2 and 0.1295.
/// let loss = importance_loss(1.0, &input, None)?;
/// assert!((loss - 1.064_759_8).abs() < 1e-6, "{loss}");
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
///
/// # Errors
/// [`GateError::WrongShape`], [`GateError::NotFinite`], [`GateError::BadChoice`], and
/// [`GateError::BadNumber`] for fewer than two experts, no choices or more than experts, a noise
/// that is not above 0, a coefficient that is not finite. Then the gradient is unchanged.
pub fn importance_loss(
    coefficient: f32,
    input: &ImportanceInput<'_>,
    gradient: Option<&mut [f32]>,
) -> Result<f32, GateError> {
    let tokens = check(coefficient, input)?;
    let (experts, k) = (input.experts as usize, input.top_k as usize);
    gradient.as_ref().map_or(Ok(()), |gradient| shape("gradient", gradient.len(), tokens, experts))?;
    let noisy = input.noisy.unwrap_or(input.logits);
    let deviation = f64::from(input.noise) / experts as f64;
    // Of each token that has a part: its row, its last choice, and the line.
    let rows = || {
        let last = input.choices.chunks_exact(k).map(|choices| choices[k - 1]).enumerate();
        last.filter_map(|(token, last)| {
            let (at, last) = (token * experts, usize::try_from(last).ok()?);
            Some((at..at + experts, last, f64::from(noisy[at + last])))
        })
    };

    let mut shares = vec![0.0; experts];
    let (mut importance, mut load) = (vec![0.0; experts], vec![0.0; experts]);
    for (row, _, line) in rows() {
        ScoreFunction::Softmax.fill(&input.logits[row], &mut shares);
        for ((importance, load), share) in importance.iter_mut().zip(&mut load).zip(&shares) {
            *importance += share;
            *load += normal((share - line) / deviation);
        }
    }
    let half = 0.5 * f64::from(coefficient);
    let loss = half * (uneven(&mut importance) + uneven(&mut load));
    let Some(gradient) = gradient else { return Ok(loss as f32) };

    // Both sums are slopes now.
    let mut d = vec![0.0; experts];
    for (row, last, line) in rows() {
        ScoreFunction::Softmax.fill(&input.logits[row.clone()], &mut shares);
        let mut d_line = 0.0;
        for (e, (d, share)) in d.iter_mut().zip(&shares).enumerate() {
            let of_load = half * load[e] * density((share - line) / deviation) / deviation;
            *d = half * importance[e] + of_load;
            d_line -= of_load;
        }
        softmax_backward(&shares, &mut d);
        d[last] += d_line;
        gradient[row].iter_mut().zip(&d).for_each(|(to, &d)| *to += d as f32);
    }
    Ok(loss as f32)
}

fn check(coefficient: f32, input: &ImportanceInput<'_>) -> Result<usize, GateError> {
    let (experts, k) = (input.experts as usize, input.top_k as usize);
    let bad = |parameter, seen, expected| Err(GateError::BadNumber { parameter, seen, expected });
    if experts < 2 {
        return bad("experts", input.experts.into(), "2 at least: of one there is no variance");
    }
    if k == 0 || k > experts {
        return bad("top_k", input.top_k.into(), "1 to the number of experts");
    }
    if !(input.noise.is_finite() && input.noise > 0.0) {
        return bad("noise", input.noise.into(), "a finite number above 0");
    }
    finite("coefficient", coefficient)?;
    let tokens = rows_of(input.logits, experts)?;
    if let Some(noisy) = input.noisy {
        shape("noisy logits", noisy.len(), tokens, experts)?;
        rows_of(noisy, experts)?;
    }
    shape("choices", input.choices.len(), tokens, k)?;
    known(input.choices, k, experts)?;
    Ok(tokens)
}

/// Variance over squared mean; the values become its slopes.
fn uneven(values: &mut [f64]) -> f64 {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let square = mean * mean + EPSILON;
    let of_mean = variance * 2.0 * mean / (count * square * square);
    for value in values {
        *value = 2.0 * (*value - mean) / ((count - 1.0) * square) - of_mean;
    }
    variance / square
}

/// The normal distribution.
fn normal(x: f64) -> f64 {
    0.5 * libm::erfc(-x / SQRT_2)
}

/// Its density.
fn density(x: f64) -> f64 {
    exp(-0.5 * x * x) / (2.0 * PI).sqrt()
}
