//! Input of a step.

use sidelane_core::with_methods;

use crate::gate::RngKey;

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
    pub used: Option<&'a [bool]>,
    /// Whether this is a training pass, with noise.
    pub training: bool,
    /// Which random numbers.
    pub draw: RngKey,
}

impl<'a, X: ?Sized> Input<'a, X> {
    /// Tokens, and nothing else.
    pub fn new(x: &'a X) -> Self {
        let draw = RngKey::default();
        Input { x, residual: None, bias: None, used: None, training: false, draw }
    }

    with_methods! {
        with_x(x: &'a X),
        with_residual(residual: Option<&'a X>),
        with_bias(bias: Option<&'a [f32]>),
        with_used(used: Option<&'a [bool]>),
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
