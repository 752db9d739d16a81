//! Input of a step.

use crate::gate::RngKey;

/// One step's tokens, and inputs of their gate.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a, E> {
    /// The tokens, `[tokens, hidden]`; there may be none.
    pub x: &'a [E],
    /// Added to the layer's result, `[tokens, hidden]`.
    pub residual: Option<&'a [E]>,
    /// `[experts]`, for the choice alone ([`GateInput::bias`](crate::gate::GateInput::bias)).
    pub bias: Option<&'a [f32]>,
    /// `[tokens]`: which tokens choose; all do where it is not given.
    pub used: Option<&'a [bool]>,
    /// Whether this is a training pass, with noise.
    pub training: bool,
    /// Which random numbers.
    pub draw: RngKey,
}

impl<'a, E> Input<'a, E> {
    /// Tokens, and nothing else.
    pub fn new(x: &'a [E]) -> Self {
        let draw = RngKey::default();
        Input { x, residual: None, bias: None, used: None, training: false, draw }
    }
}
