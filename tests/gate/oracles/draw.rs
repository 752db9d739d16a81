//! Numbers that both sides draw, bit for bit, so that no file has to hold them: `draw.py` in Rust.

use super::case::Case;

/// Purpose of drawn numbers; same numbers as in `draw.py`.
#[derive(Clone, Copy)]
enum Stream {
    Logits = 0,
    Bias = 1,
    Noise = 2,
    Used = 4,
    Earlier = 5,
    Tilt = 6,
    Replay = 7,
}

fn splitmix(seed: u64, stream: Stream) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_add((stream as u64).wrapping_mul(0xD1B5_4A32_D192_ED03));
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    })
}

fn near_normal(seed: u64, stream: Stream, count: usize, spread: f32) -> Vec<f32> {
    let third = |z: u64, shift: u32| (z >> shift & 0x1F_FFFF) as i64;
    let sums = splitmix(seed, stream).map(|z| third(z, 43) + third(z, 22) + third(z, 1) - (3 << 20));
    sums.take(count).map(|sum| sum as f32 * (spread / (1 << 20) as f32)).collect()
}

fn tilted(case: &Case, stream: Stream) -> Vec<f32> {
    let mut logits = near_normal(case.seed, stream, case.elements(), case.spread);
    let tilt = near_normal(case.seed, Stream::Tilt, case.experts as usize, case.tilt);
    for row in logits.chunks_exact_mut(tilt.len()) {
        row.iter_mut().zip(&tilt).for_each(|(logit, tilt)| *logit += tilt);
    }
    logits
}

/// The logits of a case, `[tokens, experts]`.
pub fn logits(case: &Case) -> Vec<f32> {
    tilted(case, Stream::Logits)
}

/// Those of an earlier micro-batch.
pub fn earlier(case: &Case) -> Vec<f32> {
    tilted(case, Stream::Earlier)
}

/// Logits with the noise of the oracle.
pub fn noisy(case: &Case) -> Vec<f32> {
    let noise = near_normal(case.seed, Stream::Noise, case.elements(), 1.0);
    logits(case).iter().zip(noise).map(|(logit, noise)| logit + noise).collect()
}

/// Added to scores for the choice alone, `[experts]`.
pub fn bias(case: &Case) -> Option<Vec<f32>> {
    case.bias.map(|spread| near_normal(case.seed, Stream::Bias, case.experts as usize, spread))
}

/// Which tokens count, `[tokens]`.
pub fn used(case: &Case) -> Option<Vec<bool>> {
    let unit = |z: u64| ((z >> 40) + 1) as f32 / (1 << 24) as f32;
    let draws = splitmix(case.seed, Stream::Used).take(case.tokens as usize);
    case.used.then(|| draws.map(|z| unit(z) > 0.25).collect())
}

/// Recorded choices, `[tokens, top_k]`: the best of other logits.
pub fn replay(case: &Case) -> Option<Vec<i32>> {
    let best = |row: &[f32]| {
        let mut order: Vec<i32> = (0..row.len() as i32).collect();
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
        order.truncate(case.top_k as usize);
        order
    };
    case.replay
        .then(|| tilted(case, Stream::Replay).chunks_exact(case.experts as usize).flat_map(best).collect())
}
