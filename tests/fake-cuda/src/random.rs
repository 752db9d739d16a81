//! The seeded chance behind everything that the rules leave open.

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The chance of one hardware queue.
pub struct Chance(ChaCha8Rng);

impl Chance {
    /// Each queue of each device draws from a stream of numbers of its own.
    pub fn new(seed: u64, device: usize, queue: usize) -> Chance {
        let mut numbers = ChaCha8Rng::seed_from_u64(seed);
        numbers.set_stream((device as u64) << 32 | queue as u64);
        Chance(numbers)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.random_range(0..end.max(1))
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        things.shuffle(&mut self.0);
    }
}
