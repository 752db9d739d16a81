//! The loss that keeps logits small.

use super::{finite, rows_of, shape};
use crate::error::GateError;
use crate::gate::math::{exp, largest};

/// `coefficient * mean over tokens of (ln of the sum of e^logit)^2` (ST-MoE; Megatron's
/// `moe_z_loss_coeff`, divided by the ranks that share the tokens). `logits` are
/// `[tokens, experts]`; tokens that are not `used`, `[tokens]`, count neither in the sum nor in the
/// mean. The gradient is added to `gradient`, `[tokens, experts]`. Without tokens there is no loss.
///
/// ```
/// let mut gradient = [0.0; 2];
/// let loss = sidelane_core::gate::z_loss(0.5, &[1.0, 1.0], 2, None, Some(&mut gradient))?;
/// let z = 1.0 + 2f32.ln();
/// assert!((loss - 0.5 * z * z).abs() < 1e-6 && (gradient[0] - 0.5 * z).abs() < 1e-6);
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
///
/// # Errors
/// [`GateError::WrongShape`], [`GateError::NotFinite`], [`GateError::BadNumber`] for a coefficient
/// that is not finite, or no experts. Then the gradient is unchanged.
pub fn z_loss(
    coefficient: f32,
    logits: &[f32],
    experts: u32,
    used: Option<&[bool]>,
    mut gradient: Option<&mut [f32]>,
) -> Result<f32, GateError> {
    let experts = experts as usize;
    let tokens = rows_of(logits, experts)?;
    finite("coefficient", coefficient)?;
    used.map_or(Ok(()), |used| shape("used", used.len(), tokens, 1))?;
    gradient.as_ref().map_or(Ok(()), |gradient| shape("gradient", gradient.len(), tokens, experts))?;

    let counts = |token: &usize| used.is_none_or(|used| used[*token]);
    let factor = f64::from(coefficient) / (0..tokens).filter(counts).count().max(1) as f64;
    let mut sum = 0.0;
    for token in (0..tokens).filter(counts) {
        let row = token * experts..(token + 1) * experts;
        let top = f64::from(largest(&logits[row.clone()]));
        let of_top = |&logit: &f32| exp(f64::from(logit) - top);
        let all: f64 = logits[row.clone()].iter().map(of_top).sum();
        let z = top + all.ln();
        sum += z * z;
        if let Some(gradient) = gradient.as_deref_mut() {
            let slope = factor * 2.0 * z / all;
            for (d, logit) in gradient[row.clone()].iter_mut().zip(&logits[row]) {
                *d += (slope * of_top(logit)) as f32;
            }
        }
    }
    Ok((factor * sum) as f32)
}
