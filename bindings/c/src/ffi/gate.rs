//! Routers: logits to choices.

use sidelane::gate::{GateConfig, GateInput, RngKey};

use super::gate_config::RouterConfig;
use super::losses::Logits;
use super::memory::{Out, optional, optional_flags, slice, slice_mut};
use super::objects::Gate;
use super::tensor::Routing;
use super::versioned::{OutStruct, read, versioned};
use super::{border, close, get, give};
use crate::Status;
use crate::fault::Fault;
use crate::handles::{ExclusiveCell, Kind};
use crate::words::switch;

/// One forward pass over the tokens of a rank. Only tokens and logits are required. Arrays are read
/// during the call alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GateCall {
    /// sizeof(sidelane_gate_call_t).
    pub size: usize,
    /// The router's logits, [tokens, experts].
    pub logits: *const f32,
    /// Tokens.
    pub tokens: u64,
    /// [experts], added to the scores for the choice alone; or NULL.
    pub bias: *const f32,
    /// [tokens, experts]: factors on the standard deviation of normal noise; or NULL.
    pub noise_std: *const f32,
    /// [tokens]: 1 for tokens that choose, 0 for padding; or NULL.
    pub token_mask: *const u8,
    /// [tokens, top_k]: choices that were recorded, -1 for none; or NULL.
    pub replay: *const i32,
    /// Seed of the run.
    pub seed: u64,
    /// Step of the run: passes that are to differ have different steps.
    pub step: u64,
    /// Rank that the tokens belong to.
    pub rank: u32,
    /// 1: this is a training pass: else there is only such noise as is always there.
    pub training: u32,
    /// 1: `global_required` counts.
    pub has_global_required: u32,
    /// The largest number of rows that any rank needs for one expert, for a capacity that follows
    /// the need.
    pub global_required: u32,
}
versioned!(GateCall, "sidelane_gate_call_t", global_required: u32);

/// Decision of a router. It may be read until the gate's next call, or until the gate is closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Decision {
    /// sizeof(sidelane_decision_t).
    pub size: usize,
    /// Experts that are left (-1: dropped) and their weights, to dispatch by.
    pub routing: Routing,
    /// Choices, [tokens, top_k], before dropping.
    pub choices: *const i32,
    /// Place of each choice among the rows of its expert, [tokens, top_k]; -1 where there is none.
    pub slots: *const i32,
    /// Choices of each expert, [experts], before any was dropped.
    pub counts_before: *const u32,
    /// Choices of each expert that are left, [experts].
    pub counts_after: *const u32,
    /// Rows per expert.
    pub capacity: u32,
    /// The capacity that would have dropped nothing.
    pub required: u32,
}
versioned!(Decision, "sidelane_decision_t", required: u32);

/// A router. Local.
///
/// The caller guarantees: `config` is NULL, or as large as its size says; `gate` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_gate_build(config: *const RouterConfig, gate: *mut *mut Gate) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let (out, flat) = unsafe { (Out::new("gate", gate)?, read(config)?) };
        let router = sidelane::gate::Gate::new(GateConfig::try_from(&flat)?)?;
        give(ExclusiveCell::new(Kind::Gate, router), out)
    })
}

/// Decides for all tokens of a call. Local.
///
/// The caller guarantees: `call` and `decision` are NULL, or as large as their size says; arrays
/// are NULL or as large as documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_gate_route(
    gate: *mut Gate,
    call: *const GateCall,
    decision: *mut Decision,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let (out, call) = unsafe { (OutStruct::new(decision)?, read(call)?) };
        get(gate)?.lend(|gate| {
            // SAFETY: as the caller promised.
            let asked = unsafe { call.asked(gate.config()) }?;
            let made = gate.route(&asked)?;
            let routing = Routing {
                experts: made.experts().as_ptr(),
                weights: made.weights().as_ptr(),
                tokens: made.tokens().into(),
                top_k: made.top_k(),
                place: crate::SIDELANE_PLACE_HOST,
            };
            out.write(Decision {
                size: 0,
                routing,
                choices: made.choices().as_ptr(),
                slots: made.slots().as_ptr(),
                counts_before: made.counts_before().as_ptr(),
                counts_after: made.counts_after().as_ptr(),
                capacity: made.capacity(),
                required: made.required(),
            });
            Ok(())
        })
    })
}

/// The logits that choose in a call, noise and all, to `noisy`, [tokens, experts]. Local.
///
/// The caller guarantees: as sidelane_gate_route(); no other thread uses `noisy` meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_gate_noisy_logits(
    gate: *mut Gate,
    call: *const GateCall,
    noisy: *mut f32,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let call = unsafe { read(call) }?;
        get(gate)?.lend(|gate| {
            // SAFETY: as the caller promised.
            let asked = unsafe { call.asked(gate.config()) }?;
            // SAFETY: as the caller promised.
            let noisy = unsafe { slice_mut("noisy", noisy, asked.logits.len() as u64) }?;
            Ok(gate.noisy_logits(&asked, noisy)?)
        })
    })
}

/// Closes the gate. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_gate_close(gate: *mut Gate) -> Status {
    close(gate)
}

impl GateCall {
    /// # Safety
    /// Arrays are null or as large as documented, and no one writes to them during `'a`.
    unsafe fn asked<'a>(&self, config: &GateConfig) -> Result<GateInput<'a>, Fault> {
        let (tokens, GateConfig { experts, top_k, .. }) = (self.tokens, config);
        let all = Logits::new(tokens, *experts)?.elements;
        let choices = Logits::new(tokens, *top_k)?.elements;
        let has_global_required = switch("has_global_required", self.has_global_required)?;
        // SAFETY: as the caller promised; the others likewise.
        let logits = unsafe { slice("logits", self.logits, all) }?;
        // SAFETY: as above.
        let bias = unsafe { optional("bias", self.bias, (*experts).into()) }?;
        // SAFETY: as above.
        let noise_std = unsafe { optional("noise_std", self.noise_std, all) }?;
        // SAFETY: as above.
        let token_mask = unsafe { optional_flags("token_mask", self.token_mask, tokens) }?;
        // SAFETY: as above.
        let replay = unsafe { optional("replay", self.replay, choices) }?;
        let input = GateInput::new(logits).with_bias(bias).with_noise_std(noise_std);
        let input = input.with_token_mask(token_mask).with_replay(replay);
        let input = input.with_global_required(has_global_required.then_some(self.global_required));
        let input = input.with_training(switch("training", self.training)?);
        Ok(input.with_draw(RngKey::new(self.seed, self.step, self.rank)))
    }
}
