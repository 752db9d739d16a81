//! Calls of the gate: a router, and losses.

use std::ptr::{null, null_mut};

use sidelane_c::*;

use super::spoilt::{ROOM, Spoilt, Struct};

/// A router that can be built: 8 experts, 2 choices, softmax, weights times 1.
const ROUTER: [u32; 24] = [8, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3f80_0000, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Builds a router and lets it decide.
pub fn router(spoilt: &Spoilt) -> Vec<Status> {
    let mut config = Struct::new::<RouterConfig>(&ROUTER, spoilt);
    let mut gate = null_mut();
    // SAFETY: as in `layer`.
    let built = unsafe { sidelane_gate_build(config.at(), &mut gate) };
    if built != Status::SIDELANE_OK {
        return vec![built];
    }
    // SAFETY: a size that was accepted means that the first fields are there.
    let experts = unsafe { *config.at::<RouterConfig>() }.experts as usize;
    let tokens = if experts <= ROOM / 2 { 2 } else { 0 };
    let random = spoilt.words.iter().map(|&(place, word)| f32::from_bits(word ^ place as u32)).chain([0.5]);
    let logits: Vec<f32> = random.cycle().take(tokens * experts).collect();
    let mut call = Struct::empty::<GateCall>();
    let mut decision = Struct::new::<Decision>(&[], spoilt);
    // SAFETY: the arrays are as large as is said.
    unsafe {
        (*call.at::<GateCall>()).logits = logits.as_ptr();
        (*call.at::<GateCall>()).tokens = tokens as u64;
        (*call.at::<GateCall>()).training = spoilt.words.len() as u32 % 3;
        let routed = sidelane_gate_route(gate, call.at(), decision.at());
        vec![built, routed, sidelane_gate_close(gate)]
    }
}

/// Takes losses of two tokens, or of none.
pub fn losses(spoilt: &Spoilt) -> Vec<Status> {
    const EVEN: [f32; 8] = [0.0; 8];
    const FIRST: [i32; 4] = [0, 1, 2, 3];
    let mut balance = Struct::new::<Balance>(&[0x3f80_0000], spoilt);
    let mut of_balance = Struct::empty::<BalanceInput>();
    let mut noised = Struct::empty::<ImportanceInput>();
    let (mut loss, mut gradient, mut counts) = (0.0, [0.0; 8], [0.0; 64]);
    let number = |nth: usize| spoilt.words.get(nth).map_or(0, |&(_, word)| word);
    // SAFETY: the arrays have the documented sizes: 64 counts are more than any number of parts
    // that two tokens have.
    unsafe {
        let input: &mut BalanceInput = &mut *of_balance.at();
        let tokens = if number(4) % 3 == 2 { 0 } else { 2 };
        (input.logits, input.tokens, input.choices) = (EVEN.as_ptr(), tokens, FIRST.as_ptr());
        (input.experts, input.top_k) = (4, 1 + number(0) % 2);
        let input: &mut ImportanceInput = &mut *noised.at();
        (input.logits, input.tokens, input.choices) = (EVEN.as_ptr(), 2, FIRST.as_ptr());
        (input.experts, input.top_k, input.noise) = (4, 2, f32::from_bits(number(1)));
        input.coefficient = f32::from_bits(number(2));
        let counted = match (*balance.at::<Balance>()).parts {
            0..16 => sidelane_balance_counts(balance.at(), of_balance.at(), counts.as_mut_ptr()),
            _ => Status::SIDELANE_OK,
        };
        sidelane_importance_loss(noised.at(), &mut loss, gradient.as_mut_ptr());
        sidelane_z_loss(
            f32::from_bits(number(3)),
            EVEN.as_ptr(),
            2,
            4,
            null(),
            &mut loss,
            gradient.as_mut_ptr(),
        );
        vec![counted, sidelane_balance_loss(balance.at(), of_balance.at(), &mut loss, gradient.as_mut_ptr())]
    }
}
