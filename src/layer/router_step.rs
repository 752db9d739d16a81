//! The router's part of a step: from tokens to choices, and back.
//!
//! ```text
//!   Input x [T,H] --> logits = x w --> Gate --> Decision: choices, weights, losses
//!
//!   of weights [T,k], of losses --> of logits [T,E] --> of w = x' (of logits),  of x = (of logits) w'
//! ```
//!
//! Products are made where the tokens are. A layer on a device may choose experts there. All else
//! of the gate, its losses and their gradients are the host's in either place.

use sidelane_core::with_methods;

use super::MoeLayer;
use super::step::widened;
use crate::dtype::Element;
use crate::error::{Error, PlanError};
use crate::gate::{
    BalanceLoss, Decision, Gate, GateConfig, GateInput, LossInput, Noise, RngKey, WeightsInput,
    weights_backward, z_loss,
};
use crate::rows::{Matrix, product};

/// One step's tokens, and inputs of their gate. Tensors are slices (`[E]`) or, for a layer on a
/// device, [`DeviceRange`](crate::device::DeviceRange)s of the layer's element type, at multiples
/// of 16 bytes.
#[derive(Debug)]
#[non_exhaustive]
pub struct Input<'a, X: ?Sized> {
    /// The tokens, `[tokens, hidden]`; there may be none.
    pub x: &'a X,
    /// Added to the layer's result, `[tokens, hidden]`.
    pub residual: Option<&'a X>,
    /// `[experts]`, for the choice alone ([`GateInput::bias`](crate::gate::GateInput::bias)).
    pub bias: Option<&'a [f32]>,
    /// `[tokens]`: which tokens choose; all do where it is not given.
    pub token_mask: Option<&'a [bool]>,
    /// Whether this is a training pass, with noise.
    pub training: bool,
    /// Which random numbers.
    pub draw: RngKey,
}

impl<'a, X: ?Sized> Input<'a, X> {
    /// Tokens, and nothing else.
    pub fn new(x: &'a X) -> Self {
        let draw = RngKey::default();
        Input { x, residual: None, bias: None, token_mask: None, training: false, draw }
    }

    with_methods! {
        with_x(x: &'a X),
        with_residual(residual: Option<&'a X>),
        with_bias(bias: Option<&'a [f32]>),
        with_token_mask(token_mask: Option<&'a [bool]>),
        with_training(training: bool),
        with_draw(draw: RngKey),
    }
}

// Derived, these would ask the same of `X`.
impl<X: ?Sized> Clone for Input<'_, X> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<X: ?Sized> Copy for Input<'_, X> {}

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
    pub gated: Gated,
}

impl Routed {
    pub fn tokens(&self) -> usize {
        self.gated.tokens()
    }
}

/// What the gate makes of logits.
#[derive(Debug)]
pub(super) struct Gated {
    /// Logits of which weights were made, `[tokens, experts]`.
    logits: Vec<f32>,
    pub decision: Decision,
    pub balance: f32,
    pub z: f32,
    /// The losses' gradients, `[tokens, experts]`.
    of_logits: Vec<f32>,
}

/// What a gate takes besides logits.
#[derive(Clone, Copy, Debug)]
pub(super) struct GateOptions<'a> {
    pub bias: Option<&'a [f32]>,
    pub token_mask: Option<&'a [bool]>,
    pub training: bool,
    pub draw: RngKey,
}

impl Gated {
    /// Chooses experts by logits, `[tokens, experts]`.
    pub fn new(
        gate: &mut Gate,
        losses: &Losses,
        mut logits: Vec<f32>,
        options: GateOptions<'_>,
    ) -> Result<Self, Error> {
        let GateOptions { bias, token_mask, training, draw } = options;
        let call = GateInput::new(&logits)
            .with_bias(bias)
            .with_token_mask(token_mask)
            .with_training(training)
            .with_draw(draw);
        let decision = gate.route(&call)?.clone();
        let experts = gate.config().experts;
        let mut of_logits = vec![0.0; logits.len()];
        let (top_k, choices) = (decision.top_k(), decision.choices());
        let loss = LossInput { logits: &logits, experts, top_k, choices, token_mask, totals: None };
        let balance = losses.balance.map_or(Ok(0.0), |balance| balance.loss(&loss, Some(&mut of_logits)))?;
        let z =
            losses.z.map_or(Ok(0.0), |z| z_loss(z, &logits, experts, token_mask, Some(&mut of_logits)))?;
        if matches!(gate.config().noise, Noise::Normal { .. }) {
            let mut noisy = vec![0.0; logits.len()];
            gate.noisy_logits(&call, &mut noisy)?;
            logits = noisy;
        }
        Ok(Gated { logits, decision, balance, z, of_logits })
    }

    /// What a device chose, without losses. The logits come [later](Self::bring), where gradients
    /// are asked for.
    pub fn chosen(decision: Decision) -> Self {
        Gated { logits: Vec::new(), decision, balance: 0.0, z: 0.0, of_logits: Vec::new() }
    }

    /// The logits by which a device chose.
    pub fn bring(&mut self, logits: Vec<f32>) {
        self.of_logits = vec![0.0; logits.len()];
        self.logits = logits;
    }

    pub fn tokens(&self) -> usize {
        self.decision.tokens() as usize
    }

    /// From the gradient of routing weights, `[tokens, top_k]`, to that of the logits,
    /// `[tokens, experts]`.
    pub fn logits_backward(&self, config: &GateConfig, of_weights: &[f32]) -> Result<Vec<f32>, Error> {
        let Gated { logits, decision, .. } = self;
        let mut of_logits = self.of_logits.clone();
        let (choices, experts) = (decision.choices(), decision.experts());
        let input = WeightsInput { logits, choices, experts, d_weights: of_weights };
        weights_backward(config, &input, &mut of_logits)?;
        Ok(of_logits)
    }
}

impl MoeLayer {
    /// Chooses experts.
    pub(super) fn route<E: Element>(&mut self, input: &Input<'_, [E]>) -> Result<Routed, Error> {
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
        let Input { bias, token_mask, training, draw, .. } = *input;
        let options = GateOptions { bias, token_mask, training, draw };
        let gated = Gated::new(&mut self.gate, &self.losses, logits, options)?;
        Ok(Routed { x, gated })
    }

    /// From the gradient of routing weights, `[tokens, top_k]`, to those of the tokens,
    /// `[tokens, hidden]`, and of the router.
    pub(super) fn route_backward(
        &self,
        routed: &Routed,
        of_weights: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let Routed { x, gated } = routed;
        let (tokens, hidden) = (gated.tokens(), self.hidden);
        let experts = self.gate.config().experts as usize;
        let of_logits = gated.logits_backward(self.gate.config(), of_weights)?;
        let of_logits = Matrix::new(&of_logits, tokens, experts);
        let mut of_x = vec![0.0; tokens * hidden];
        product(&mut of_x, of_logits, Matrix::new(&self.router, hidden, experts).transposed(), false);
        let mut of_router = vec![0.0; hidden * experts];
        product(&mut of_router, Matrix::new(x, tokens, hidden).transposed(), of_logits, false);
        Ok((of_x, of_router))
    }
}
