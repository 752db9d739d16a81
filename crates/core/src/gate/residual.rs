//! Residual experts (PR-MoE): a dense MLP next to the routed experts, mixed per token.
//!
//! ```text
//!   (c0, c1) = softmax of two logits, in f64, each rounded to f32
//!   y = moe * c0 + mlp * c1           products and sum rounded to f32, then to the type of the rows
//! ```

use half::{bf16, f16};

use super::math::exp;
use crate::dtype::{Dtype, Element};
use crate::error::GateError;

/// Inputs of the mix: rows of `E`, and two logits for each.
#[derive(Clone, Copy, Debug)]
pub struct Residual<'a, E> {
    /// `[tokens, 2]`: for the routed experts, for the MLP.
    pub logits: &'a [f32],
    /// `[tokens, hidden]`: output of the routed experts; zero for dropped tokens.
    pub moe: &'a [E],
    /// `[tokens, hidden]`: output of the MLP.
    pub mlp: &'a [E],
}

/// Where gradients are written.
#[derive(Debug)]
pub struct ResidualGradients<'a, E> {
    /// `[tokens, 2]`: each sum over a row in f64 by rising column, rounded once.
    pub d_logits: &'a mut [f32],
    /// `[tokens, hidden]`: `dy * c0` in f32, rounded to the type of the rows.
    pub d_moe: &'a mut [E],
    /// `[tokens, hidden]`: `dy * c1`, likewise.
    pub d_mlp: &'a mut [E],
}

impl<E: Element> Residual<'_, E> {
    /// Writes the mixture to `y`, `[tokens, hidden]`.
    ///
    /// ```
    /// use sidelane_core::gate::Residual;
    /// let mut y = [0.0; 2];
    /// Residual { logits: &[0.0, 0.0], moe: &[1.0, 2.0], mlp: &[3.0, 6.0] }.combine(&mut y)?;
    /// assert_eq!(y, [2.0, 4.0]);
    /// # Ok::<(), sidelane_core::error::GateError>(())
    /// ```
    ///
    /// # Errors
    /// [`GateError::WrongShape`], [`GateError::NotFinite`] for a logit, [`GateError::NoArithmetic`]
    /// for rows of bytes.
    pub fn combine(&self, y: &mut [E]) -> Result<(), GateError> {
        self.check(&[("y", y.len())])?;
        match E::DTYPE {
            Dtype::F32 => self.mix::<f32>(y, |value| value),
            Dtype::Bf16 => self.mix::<bf16>(y, bf16::from_f32),
            Dtype::F16 => self.mix::<f16>(y, f16::from_f32),
            Dtype::Bytes => return Err(GateError::NoArithmetic { dtype: Dtype::Bytes }),
        }
        Ok(())
    }

    /// From `d_y`, `[tokens, hidden]`, to the gradients of all three inputs.
    ///
    /// # Errors
    /// As [`combine`](Residual::combine); then nothing is written.
    pub fn backward(&self, d_y: &[E], gradients: ResidualGradients<'_, E>) -> Result<(), GateError> {
        let ResidualGradients { d_logits, d_moe, d_mlp } = &gradients;
        self.check(&[("d_y", d_y.len()), ("d_moe", d_moe.len()), ("d_mlp", d_mlp.len())])?;
        let (what, seen, rows) = ("d_logits", d_logits.len(), self.logits.len() / 2);
        if seen != self.logits.len() {
            return Err(GateError::WrongShape { what, seen, rows, columns: 2 });
        }
        match E::DTYPE {
            Dtype::F32 => self.unmix::<f32>(d_y, gradients, |value| value),
            Dtype::Bf16 => self.unmix::<bf16>(d_y, gradients, bf16::from_f32),
            Dtype::F16 => self.unmix::<f16>(d_y, gradients, f16::from_f32),
            Dtype::Bytes => return Err(GateError::NoArithmetic { dtype: Dtype::Bytes }),
        }
        Ok(())
    }

    fn check(&self, others: &[(&'static str, usize)]) -> Result<(), GateError> {
        let rows = self.logits.len() / 2;
        let wrong = |what, seen, columns| Err(GateError::WrongShape { what, seen, rows, columns });
        if !self.logits.len().is_multiple_of(2) {
            return wrong("logits", self.logits.len(), 2);
        }
        let columns = self.moe.len().checked_div(rows).unwrap_or(0);
        let own = [("moe", self.moe.len()), ("mlp", self.mlp.len())];
        for &(what, seen) in own.iter().chain(others) {
            if seen != rows * columns {
                return wrong(what, seen, columns);
            }
        }
        if let Some(at) = self.logits.iter().position(|logit| !logit.is_finite()) {
            let (token, expert) = ((at / 2) as u32, (at % 2) as u32);
            return Err(GateError::NotFinite { token, expert, seen: self.logits[at] });
        }
        Ok(())
    }

    fn hidden(&self) -> usize {
        // Rows without columns need no work: any width will do.
        (self.moe.len() / (self.logits.len() / 2).max(1)).max(1)
    }

    fn mix<T: bytemuck::Pod + Into<f32>>(&self, y: &mut [E], round: fn(f32) -> T) {
        let hidden = self.hidden();
        let [moe, mlp] = [self.moe, self.mlp].map(bytemuck::cast_slice::<E, T>);
        let inputs = moe.chunks_exact(hidden).zip(mlp.chunks_exact(hidden));
        let outputs = bytemuck::cast_slice_mut::<E, T>(y).chunks_exact_mut(hidden);
        for ((y, (moe, mlp)), logits) in outputs.zip(inputs).zip(self.logits.chunks_exact(2)) {
            let [c0, c1] = shares(logits).map(|c| c as f32);
            for ((y, &moe), &mlp) in y.iter_mut().zip(moe).zip(mlp) {
                *y = round(moe.into() * c0 + mlp.into() * c1);
            }
        }
    }

    fn unmix<T: bytemuck::Pod + Into<f32>>(
        &self,
        d_y: &[E],
        gradients: ResidualGradients<'_, E>,
        round: fn(f32) -> T,
    ) {
        let hidden = self.hidden();
        let [moe, mlp, d_y] = [self.moe, self.mlp, d_y].map(bytemuck::cast_slice::<E, T>);
        let ResidualGradients { d_logits, d_moe, d_mlp } = gradients;
        let [d_moe, d_mlp] = [d_moe, d_mlp].map(bytemuck::cast_slice_mut::<E, T>);
        d_logits.fill(0.0);
        for (token, row) in (0..moe.len()).step_by(hidden).map(|first| first..first + hidden).enumerate() {
            let [c0, c1] = shares(&self.logits[token * 2..]);
            // Of c0 minus that of c1: both logits have it, with opposite signs.
            let mut slope = 0.0;
            for i in row {
                let d: f32 = d_y[i].into();
                slope += f64::from(d) * (f64::from(moe[i].into()) - f64::from(mlp[i].into()));
                d_moe[i] = round(d * c0 as f32);
                d_mlp[i] = round(d * c1 as f32);
            }
            let d = (c0 * c1 * slope) as f32;
            d_logits[token * 2..][..2].copy_from_slice(&[d, -d]);
        }
    }
}

/// The softmax of the first two.
fn shares(logits: &[f32]) -> [f64; 2] {
    let apart = f64::from(logits[1]) - f64::from(logits[0]);
    [1.0 / (1.0 + exp(apart)), 1.0 / (1.0 + exp(-apart))]
}

#[cfg(test)]
#[path = "residual_tests.rs"]
mod tests;
