//! Scores, choices and weights of a gate, compared with f64 and with numbers worked out by hand.

mod examples;
mod noise;
mod properties;
mod refusals;
mod replay;
mod sinkhorn;

use sidelane::gate::{Gate, GateConfig, GateInput};

/// A softmax of all, dropless.
pub fn plain(experts: u32, top_k: u32) -> GateConfig {
    GateConfig::new(experts, top_k)
}

/// All scores of a call.
pub fn scores(config: &GateConfig, call: &GateInput<'_>) -> Vec<f32> {
    let mut scores = vec![f32::NAN; call.logits.len()];
    Gate::new(config.clone()).unwrap().scores(call, &mut scores).unwrap();
    scores
}

/// How many f32 lie between two of the same sign.
pub fn ulps(a: f32, b: f32) -> u32 {
    assert!(a.is_finite() && b.is_finite() && a >= 0.0 && b >= 0.0, "{a} {b}");
    a.to_bits().abs_diff(b.to_bits())
}

/// Repeatable numbers from -1 to 1.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}
