//! Losses of a router besides its balance: two more losses on its logits, and the gradient from the
//! weights of choices to the logits.
//!
//! All gradients are added to one array, [tokens, experts].

use sidelane::gate::{
    ImportanceInput as Noised, WeightsInput as Weighed, importance_loss, weights_backward, z_loss,
};

use super::memory::{Out, optional, optional_flags, slice, slice_mut};
use super::objects::Gate;
use super::versioned::{read, versioned};
use super::{border, get};
use crate::Status;
use crate::fault::{ArgumentError, Fault};

/// `coefficient` times the mean over tokens of (ln of the sum of e^logit)^2, to `loss`. Tokens with
/// a 0 in `token_mask` ([tokens], or NULL) do not count. The gradient is added to `d_logits`,
/// [tokens, experts], unless that is NULL.
///
/// The caller guarantees: `loss` is NULL or valid; arrays are NULL or as large as documented, and
/// no other thread uses `d_logits` meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_z_loss(
    coefficient: f32,
    logits: *const f32,
    tokens: u64,
    experts: u32,
    token_mask: *const u8,
    loss: *mut f32,
    d_logits: *mut f32,
) -> Status {
    border(|| {
        let shape = Logits::new(tokens, experts)?;
        // SAFETY: as the caller promised.
        let (out, logits) = unsafe { (Out::new("loss", loss)?, slice("logits", logits, shape.elements)?) };
        // SAFETY: as the caller promised.
        let (token_mask, d_logits) =
            unsafe { (optional_flags("token_mask", token_mask, tokens)?, gradient(d_logits, shape)?) };
        out.write(z_loss(coefficient, logits, experts, token_mask, d_logits)?);
        Ok(())
    })
}

/// Input of the importance loss. Arrays are read during the call alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ImportanceInput {
    /// sizeof(sidelane_importance_input_t).
    pub size: usize,
    /// The router's logits without noise, [tokens, experts].
    pub logits: *const f32,
    /// The logits that chose experts, as sidelane_gate_noisy_logits() gives them, [tokens,
    /// experts]; NULL: the clean logits chose.
    pub noisy: *const f32,
    /// [tokens, top_k]: the choices before dropping. Tokens whose last one is -1 do not count.
    pub choices: *const i32,
    /// Tokens.
    pub tokens: u64,
    /// Experts, 2 at least.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// The standard deviation of the noise times the experts, above 0 (Tutel's gate_noise).
    pub noise: f32,
    /// Factor on all.
    pub coefficient: f32,
}
versioned!(ImportanceInput, "sidelane_importance_input_t", coefficient: f32);

/// Writes the loss that balances importance and load of a noisy gate (Shazeer's, as in Tutel) to
/// `loss`. The gradient to the clean logits is added to `d_logits`, [tokens, experts], unless that
/// is NULL.
///
/// The caller guarantees: as sidelane_z_loss(); `input` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_importance_loss(
    input: *const ImportanceInput,
    loss: *mut f32,
    d_logits: *mut f32,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let (out, input) = unsafe { (Out::new("loss", loss)?, read(input)?) };
        let ImportanceInput { tokens, experts, top_k, noise, coefficient, .. } = input;
        let (shape, choices) = (Logits::new(tokens, experts)?, Logits::new(tokens, top_k)?.elements);
        // SAFETY: as the caller promised.
        let taken = unsafe {
            Noised {
                logits: slice("logits", input.logits, shape.elements)?,
                noisy: optional("noisy", input.noisy, shape.elements)?,
                experts,
                top_k,
                choices: slice("choices", input.choices, choices)?,
                noise,
            }
        };
        // SAFETY: as the caller promised.
        out.write(importance_loss(coefficient, &taken, unsafe { gradient(d_logits, shape) }?)?);
        Ok(())
    })
}

/// A router's decision, and how the loss changes with its weights. Arrays are read during the call
/// alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WeightsInput {
    /// sizeof(sidelane_weights_input_t).
    pub size: usize,
    /// The logits behind the weights, [tokens, experts]: noisy ones if noise enters the weights,
    /// too.
    pub logits: *const f32,
    /// [tokens, top_k]: the choices before dropping (sidelane_decision_t.choices).
    pub choices: *const i32,
    /// [tokens, top_k]: those that are left (sidelane_decision_t.routing.experts).
    pub experts: *const i32,
    /// [tokens, top_k]: the loss by each weight. The value at a dropped choice is ignored.
    pub d_weights: *const f32,
    /// Tokens.
    pub tokens: u64,
}
versioned!(WeightsInput, "sidelane_weights_input_t", tokens: u64);

/// Adds the gradient of the logits to `d_logits`, [tokens, experts]. It goes back from the gradient
/// of the routing weights, which the gradients of combine and dispatch return, through scaling,
/// normalization and scores of this gate. Choices have no gradient.
///
/// The caller guarantees: as sidelane_z_loss(); `input` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_gate_weights_backward(
    gate: *mut Gate,
    input: *const WeightsInput,
    d_logits: *mut f32,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let input = unsafe { read(input) }?;
        get(gate)?.lend(|gate| {
            let config = gate.config();
            let shape = Logits::new(input.tokens, config.experts)?;
            let choices = Logits::new(input.tokens, config.top_k)?.elements;
            // SAFETY: as the caller promised.
            let (taken, d_logits) = unsafe {
                let taken = Weighed {
                    logits: slice("logits", input.logits, shape.elements)?,
                    choices: slice("choices", input.choices, choices)?,
                    experts: slice("experts", input.experts, choices)?,
                    d_weights: slice("d_weights", input.d_weights, choices)?,
                };
                (taken, slice_mut("d_logits", d_logits, shape.elements)?)
            };
            Ok(weights_backward(config, &taken, d_logits)?)
        })
    })
}

/// How many numbers there are for so many tokens.
#[derive(Clone, Copy, Debug)]
pub struct Logits {
    pub elements: u64,
}

impl Logits {
    pub fn new(tokens: u64, columns: u32) -> Result<Logits, ArgumentError> {
        let (rows, columns) = (tokens, u64::from(columns));
        let elements = rows.checked_mul(columns);
        let elements = elements.ok_or(ArgumentError::TooLarge { what: "logits", rows, columns })?;
        Ok(Logits { elements })
    }
}

/// Where a gradient is added, if it is wanted.
///
/// # Safety
/// As [`slice_mut`]; null is none.
pub unsafe fn gradient<'a>(at: *mut f32, shape: Logits) -> Result<Option<&'a mut [f32]>, Fault> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller promised.
    Ok(Some(unsafe { slice_mut("d_logits", at, shape.elements) }?))
}
