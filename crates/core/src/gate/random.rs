//! Random numbers that any rank can draw again.
//!
//! Each token has a stream of its own, named by (seed, step, purpose, rank, token): the draws of a
//! token depend neither on the number of tokens nor on the drawing rank. So a run repeats, and
//! ranks can draw for each other.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Which numbers: the same draw gives the same numbers, on every machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RngKey {
    /// Of the run.
    pub seed: u64,
    /// Of the call: forward passes that are to differ have different steps.
    pub step: u64,
    /// The rank that owns the tokens.
    pub rank: u32,
}

/// What numbers are drawn for: streams of different purposes have nothing in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Jitter = 1,
    Noise = 2,
    Second = 3,
    Keep = 4,
}

impl RngKey {
    /// The stream of one token.
    pub(super) fn stream(self, purpose: Purpose, token: u32) -> ChaCha8Rng {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        key[8..16].copy_from_slice(&self.step.to_le_bytes());
        key[16..24].copy_from_slice(&(purpose as u64).to_le_bytes());
        let mut random = ChaCha8Rng::from_seed(key);
        random.set_stream(u64::from(self.rank) << 32 | u64::from(token));
        random
    }
}

/// From 0 up to and without 1, on a grid of 2^-24.
pub(super) fn unit(random: &mut impl Rng) -> f32 {
    (random.next_u32() >> 8) as f32 * (1.0 / (1 << 24) as f32)
}
