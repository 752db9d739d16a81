//! Residual experts (PR-MoE): a dense MLP next to the routed experts, mixed per token.
//!
//! ```text
//!   (c0, c1) = softmax of two logits, in f64, each rounded to f32
//!   y = moe * c0 + mlp * c1           products and sum rounded to f32, then to the type of the rows
//! ```

use half::{bf16, f16};

use super::math::exp;
use super::shape;
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
        shape("d_logits", d_logits.len(), self.logits.len() / 2, 2)?;
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
        shape("logits", self.logits.len(), rows, 2)?;
        let columns = self.moe.len().checked_div(rows).unwrap_or(0);
        let own = [("moe", self.moe.len()), ("mlp", self.mlp.len())];
        for &(what, seen) in own.iter().chain(others) {
            shape(what, seen, rows, columns)?;
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
mod tests {
    use super::*;

    const LOGITS: [f32; 6] = [0.25, -1.0, 3.0, 3.5, -200.0, 300.0];
    const MOE: [f32; 12] = [1.0, -2.0, 0.5, 3.0, 0.0, 0.0, 0.0, 0.0, 1e3, -1e-3, 7.0, 0.1];
    const MLP: [f32; 12] = [0.3, 0.2, -0.1, 4.0, 5.0, -6.0, 7.0, 0.7, 2.0, 1.0, -0.5, 0.9];
    const D_Y: [f32; 12] = [0.5, -0.25, 1.0, 2.0, -1.0, 0.1, 0.2, 0.3, 1.0, 2.0, 3.0, -4.0];

    const RESIDUAL: Residual<'_, f32> = Residual { logits: &LOGITS, moe: &MOE, mlp: &MLP };

    fn coefficients(logits: &[f64]) -> [f64; 2] {
        let [a, b] = [logits[0].exp(), logits[1].exp()];
        [a / (a + b), b / (a + b)]
    }

    fn exact_mix(logits: &[f64], token: usize, column: usize) -> f64 {
        let [c0, c1] = coefficients(&logits[token * 2..]);
        f64::from(MOE[token * 4 + column]) * c0 + f64::from(MLP[token * 4 + column]) * c1
    }

    #[test]
    fn each_product_and_the_sum_are_rounded_once() {
        let mut y = [f32::NAN; 12];
        RESIDUAL.combine(&mut y).unwrap();
        let halves = |rows: [f32; 12]| rows.map(bf16::from_f32);
        let (moe, mlp, mut narrow) = (halves(MOE), halves(MLP), [bf16::NAN; 12]);
        Residual { logits: &LOGITS, moe: &moe, mlp: &mlp }.combine(&mut narrow).unwrap();
        let logits = LOGITS.map(f64::from);
        for i in 0..12 {
            let [c0, c1] = coefficients(&logits[i / 4 * 2..]).map(|c| c as f32);
            assert_eq!(y[i], MOE[i] * c0 + MLP[i] * c1, "element {i}");
            let wide = moe[i].to_f32() * c0 + mlp[i].to_f32() * c1;
            assert_eq!(narrow[i], bf16::from_f32(wide), "element {i}");
            let exact = exact_mix(&logits, i / 4, i % 4);
            assert!((f64::from(y[i]) - exact).abs() <= 1e-6 * (1.0 + exact.abs()));
        }
        assert_eq!(y[8..], MLP[8..], "all of it comes from the MLP");
    }

    #[test]
    fn gradients_are_the_slopes_of_the_mixture() {
        let (mut d_logits, mut d_moe, mut d_mlp) = ([f32::NAN; 6], [f32::NAN; 12], [f32::NAN; 12]);
        let gradients = ResidualGradients { d_logits: &mut d_logits, d_moe: &mut d_moe, d_mlp: &mut d_mlp };
        RESIDUAL.backward(&D_Y, gradients).unwrap();
        let logits = LOGITS.map(f64::from);
        let loss = |logits: &[f64]| -> f64 {
            (0..12).map(|i| f64::from(D_Y[i]) * exact_mix(logits, i / 4, i % 4)).sum()
        };
        for i in 0..6 {
            let moved = |by: f64| {
                let mut logits = logits;
                logits[i] += by;
                loss(&logits)
            };
            let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            assert!((f64::from(d_logits[i]) - slope).abs() < 1e-5, "logit {i}: {} {slope}", d_logits[i]);
        }
        assert!(d_logits[0].abs() > 0.05 && d_logits[2].abs() > 0.5, "{d_logits:?}");
        for i in 0..12 {
            let [c0, c1] = coefficients(&logits[i / 4 * 2..]).map(|c| c as f32);
            assert_eq!((d_moe[i], d_mlp[i]), (D_Y[i] * c0, D_Y[i] * c1), "element {i}");
        }
    }

    #[test]
    fn bad_rows_are_refused_and_nothing_is_written() {
        let mut y = [0.5; 12];
        let shape = |result: Result<(), GateError>| match result.unwrap_err() {
            GateError::WrongShape { what, .. } => what,
            other => panic!("{other}"),
        };
        assert_eq!(shape(RESIDUAL.combine(&mut y[1..])), "y");
        assert_eq!(shape(Residual { logits: &LOGITS[1..], ..RESIDUAL }.combine(&mut y)), "logits");
        assert_eq!(shape(Residual { moe: &MOE[1..], ..RESIDUAL }.combine(&mut y)), "moe");
        assert_eq!(shape(Residual { mlp: &MLP[1..], ..RESIDUAL }.combine(&mut y)), "mlp");
        let mut logits = LOGITS;
        logits[3] = f32::NAN;
        let error = Residual { logits: &logits, ..RESIDUAL }.combine(&mut y).unwrap_err();
        assert!(matches!(error, GateError::NotFinite { token: 1, expert: 1, .. }), "{error}");
        assert_eq!(y, [0.5; 12]);
        let bytes = Residual { logits: &LOGITS, moe: &[0_u8; 12], mlp: &[0_u8; 12] };
        assert_eq!(bytes.combine(&mut [0; 12]), Err(GateError::NoArithmetic { dtype: Dtype::Bytes }));

        let (mut d_moe, mut d_mlp, mut d_logits) = ([0.5; 12], [0.5; 12], [0.5; 5]);
        let gradients = ResidualGradients { d_logits: &mut d_logits, d_moe: &mut d_moe, d_mlp: &mut d_mlp };
        assert_eq!(shape(RESIDUAL.backward(&D_Y, gradients)), "d_logits");
        assert_eq!((d_moe, d_mlp), ([0.5; 12], [0.5; 12]));
        assert_eq!(Residual::<f32> { logits: &[], moe: &[], mlp: &[] }.combine(&mut []), Ok(()));
    }
}
