//! The router's part of a step: from tokens to choices, and back.

use super::MoeLayer;
use super::input::Input;
use super::values::widened;
use crate::dtype::Element;
use crate::error::{Error, PlanError};
use crate::gate::{
    BalanceLoss, Decision, GateInput, LossInput, Noise, WeightsInput, weights_backward, z_loss,
};
use crate::rows::{Matrix, product};

/// Losses whose gradients go to the logits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Losses {
    pub balance: Option<BalanceLoss>,
    pub z: Option<f32>,
}

/// Decisions of the router for the tokens.
#[derive(Debug)]
pub(super) struct Routed {
    /// The tokens, `[tokens, hidden]`.
    pub x: Vec<f32>,
    /// Logits of which weights were made, `[tokens, experts]`.
    logits: Vec<f32>,
    pub decision: Decision,
    pub balance: f32,
    pub z: f32,
    /// The losses' gradients, `[tokens, experts]`.
    of_logits: Vec<f32>,
}

impl Routed {
    pub fn tokens(&self) -> usize {
        self.decision.tokens() as usize
    }
}

impl MoeLayer {
    /// Chooses experts.
    pub(super) fn route<E: Element>(&mut self, input: &Input<'_, E>) -> Result<Routed, Error> {
        let (hidden, experts) = (self.hidden, self.gate.config().experts);
        if E::DTYPE != self.dtype {
            let (what, seen, expected) = ("tokens", E::DTYPE, self.dtype);
            return Err(PlanError::WrongDtype { what, seen, expected }.into());
        }
        let tokens = input.x.len() / hidden;
        self.check_rows("tokens", input.x.len(), tokens)?;
        if tokens > self.max_tokens as usize {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            return Err(PlanError::TooManyTokens { tokens, max: self.max_tokens }.into());
        }
        input.residual.map_or(Ok(()), |residual| self.check_rows("residual", residual.len(), tokens))?;
        let x = widened(input.x);
        let mut logits = vec![0.0; tokens * experts as usize];
        let router = Matrix::new(&self.router, hidden, experts as usize);
        product(&mut logits, Matrix::new(&x, tokens, hidden), router, false);
        let Input { bias, used, training, draw, .. } = *input;
        let call =
            GateInput { logits: &logits, bias, token_mask: used, training, draw, ..GateInput::default() };
        let decision = self.gate.route(&call)?.clone();
        let mut of_logits = vec![0.0; logits.len()];
        let top_k = decision.top_k();
        let choices = decision.choices();
        let loss = LossInput { logits: &logits, experts, top_k, choices, used, totals: None };
        let balance =
            self.losses.balance.map_or(Ok(0.0), |balance| balance.loss(&loss, Some(&mut of_logits)))?;
        let z = self.losses.z.map_or(Ok(0.0), |z| z_loss(z, &logits, experts, used, Some(&mut of_logits)))?;
        if matches!(self.gate.config().noise, Noise::Normal { .. }) {
            let mut noisy = vec![0.0; logits.len()];
            self.gate.noisy_logits(&call, &mut noisy)?;
            logits = noisy;
        }
        Ok(Routed { x, logits, decision, balance, z, of_logits })
    }

    /// From the gradient of routing weights, `[tokens, top_k]`, to those of the tokens,
    /// `[tokens, hidden]`, and of the router.
    pub(super) fn route_backward(
        &self,
        routed: &Routed,
        of_weights: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let Routed { x, logits, decision, .. } = routed;
        let mut of_logits = routed.of_logits.clone();
        let (tokens, hidden) = (decision.tokens() as usize, self.hidden);
        let experts = self.gate.config().experts as usize;
        let (choices, left) = (decision.choices(), decision.experts());
        let input = WeightsInput { logits, choices, experts: left, d_weights: of_weights };
        weights_backward(self.gate.config(), &input, &mut of_logits)?;
        let of_logits = Matrix::new(&of_logits, tokens, experts);
        let mut of_x = vec![0.0; tokens * hidden];
        product(&mut of_x, of_logits, Matrix::new(&self.router, hidden, experts).transposed(), false);
        let mut of_router = vec![0.0; hidden * experts];
        product(&mut of_router, Matrix::new(x, tokens, hidden).transposed(), of_logits, false);
        Ok((of_x, of_router))
    }
}
