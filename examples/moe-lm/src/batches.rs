//! Which windows of the text a step learns from, and which none.
//!
//! ```text
//!   tokens   | train .....................| held out |..................... train |
//!
//!   step n   windows 0 .. batch, drawn by seed and n;  rank r: batch/ranks of them from r x batch/ranks on
//! ```
//!
//! Nothing is kept from step to step, so a run that goes on draws as one that never stopped.

use std::ops::Range;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::settings::Settings;

/// Tokens that are held out, unless the batch does not divide their windows.
const HELD: usize = 4096;

/// Windows of a text.
#[derive(Clone, Debug)]
pub struct Batches {
    train: Vec<u32>,
    /// And the token after the last.
    held: Vec<u32>,
    window: usize,
}

/// Windows and what follows each of their tokens, `[windows, window]` each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The token after each.
    pub following: Vec<u32>,
}

impl Batches {
    /// Of all tokens of a text. In the middle of it whole batches are held out, of 4096 tokens or
    /// the next more.
    ///
    /// # Errors
    /// [`Error::TooShort`].
    pub fn new(tokens: &[u32], settings: &Settings) -> Result<Batches> {
        let window = settings.shape.window;
        let (batch, seen) = (settings.batch, tokens.len());
        let held = window.checked_mul(batch).and_then(|batch| HELD.checked_next_multiple_of(batch));
        let needed = held.and_then(|held| held.checked_add(window.checked_mul(2)?.checked_add(3)?));
        let (Some(held), Some(_)) = (held, needed.filter(|&needed| needed <= seen)) else {
            return Err(Error::TooShort { seen, needed: needed.unwrap_or(usize::MAX) });
        };
        let first = (tokens.len() - held) / 2;
        let train = [&tokens[..first], &tokens[first + held..]].concat();
        Ok(Batches { train, held: tokens[first..=first + held].to_vec(), window })
    }

    /// Tokens to learn from.
    pub fn train(&self) -> usize {
        self.train.len()
    }

    /// Of all tokens: those of another text have another.
    pub fn digest(&self) -> String {
        let mut digest = Sha256::new();
        self.train.iter().chain(&self.held).for_each(|token| digest.update(token.to_le_bytes()));
        digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Windows that are held out.
    pub fn held(&self) -> usize {
        (self.held.len() - 1) / self.window
    }

    /// Some of a step's windows.
    pub fn of_step(&self, settings: &Settings, step: usize, windows: Range<usize>) -> Windows {
        let mut random = ChaCha8Rng::seed_from_u64(settings.seed);
        random.set_stream(u64::MAX - step as u64);
        let starts: Vec<usize> =
            (0..settings.batch).map(|_| random.random_range(0..self.train.len() - self.window)).collect();
        Windows::of(&self.train, starts[windows].iter().copied(), self.window)
    }

    /// Some of the windows that are held out.
    pub fn of_held(&self, windows: Range<usize>) -> Windows {
        Windows::of(&self.held, windows.map(|nth| nth * self.window), self.window)
    }
}

impl Windows {
    fn of(tokens: &[u32], starts: impl Iterator<Item = usize> + Clone, window: usize) -> Windows {
        let all = |shift: usize| {
            starts.clone().flat_map(|start| &tokens[start + shift..][..window]).copied().collect()
        };
        Windows { tokens: all(0), following: all(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Shape;

    fn settings() -> Settings {
        let shape = Shape { window: 8, ..Shape::default() };
        Settings {
            shape,
            batch: 4,
            steps: 10,
            rate: 0.0,
            warm_up: 1,
            balance: 0.0,
            seed: 3,
            ranks: 2,
            expert_parallel: 2,
        }
    }

    #[test]
    fn ranks_share_windows_of_step_and_steps_differ() {
        let tokens: Vec<u32> = (0..6000).collect();
        let batches = Batches::new(&tokens, &settings()).unwrap();
        let whole = batches.of_step(&settings(), 5, 0..4);
        let parts = [0..2, 2..4].map(|part| batches.of_step(&settings(), 5, part).tokens).concat();
        assert_eq!(whole.tokens, parts);
        assert_ne!(whole, batches.of_step(&settings(), 6, 0..4));
        assert_eq!(whole.tokens.len(), 4 * 8);
        assert_eq!(whole.following[..7], whole.tokens[1..8]);
    }

    #[test]
    fn one_token_windows_hold_out_4096_tokens_with_4096_targets() {
        let one = Settings { shape: Shape { window: 1, ..Shape::default() }, ..settings() };
        let tokens: Vec<u32> = (0..6000).collect();
        let batches = Batches::new(&tokens, &one).unwrap();
        let held = batches.of_held(0..batches.held());
        assert_eq!((held.tokens.len(), held.following.len()), (4096, 4096));
    }

    #[test]
    fn a_text_with_one_other_token_has_another_digest() {
        let mut tokens: Vec<u32> = (0..6000).collect();
        let digest = |tokens: &[u32]| Batches::new(tokens, &settings()).unwrap().digest();
        let before = digest(&tokens);
        assert_eq!(before, digest(&tokens));
        tokens[5999] = 1;
        assert_ne!(before, digest(&tokens));
    }

    #[test]
    fn held_out_tokens_are_never_trained_on() {
        let tokens: Vec<u32> = (0..6000).collect();
        let batches = Batches::new(&tokens, &settings()).unwrap();
        let held = batches.of_held(0..batches.held());
        assert_eq!((held.tokens.len(), batches.train()), (4096, 6000 - 4096));
        let train: std::collections::HashSet<u32> = batches.train.iter().copied().collect();
        assert!(held.tokens.iter().all(|token| !train.contains(token)));
        assert!(matches!(
            Batches::new(&tokens[..4096], &settings()),
            Err(Error::TooShort { seen: 4096, .. })
        ));
    }
}
