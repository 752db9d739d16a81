//! Settings of a run: all that its bits depend on, and no more.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Limits of a model that is not small any more: beyond them, a mistyped number would exhaust
/// memory.
const MOST: u128 = 1 << 32;

/// Sizes of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Different tokens.
    pub vocabulary: usize,
    /// Tokens that see each other.
    pub window: usize,
    /// Blocks of attention and experts.
    pub layers: usize,
    /// Elements of a token.
    pub width: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Heads of keys and values, each of which serves as many heads of attention next to each
    /// other.
    pub kv_heads: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token chooses.
    pub top_k: usize,
    /// Inner width of an expert.
    pub expert_width: usize,
    /// Whether the head has the weights of the embedding.
    pub tied: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Shape {
            vocabulary: 1024,
            window: 128,
            layers: 2,
            width: 128,
            heads: 4,
            kv_heads: 4,
            experts: 64,
            top_k: 8,
            expert_width: 64,
            tied: false,
        }
    }
}

impl Shape {
    /// Elements of a token's keys, and of its values.
    pub fn kv_width(&self) -> usize {
        self.width / self.heads * self.kv_heads
    }

    /// Elements of a token's queries, keys and values.
    pub fn qkv_width(&self) -> usize {
        self.width + 2 * self.kv_width()
    }
}

/// One run. Two runs of equal settings over equal ranks give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Sizes of the model.
    pub shape: Shape,
    /// Windows of a step, over all ranks.
    pub batch: usize,
    /// Steps of the whole run: the learning rate falls to zero at its end.
    pub steps: usize,
    /// Highest learning rate.
    pub rate: f64,
    /// Steps in which it is reached.
    pub warm_up: usize,
    /// Coefficient of the loss that keeps experts in use, taken per window.
    pub balance: f32,
    /// Of weights and of windows.
    pub seed: u64,
    /// Ranks.
    pub ranks: usize,
    /// Ranks over which the experts of a layer are spread.
    pub expert_parallel: usize,
}

impl Settings {
    /// Whether the numbers go together.
    ///
    /// # Errors
    /// [`Error::TooFew`], [`Error::TooMany`], [`Error::NotMultiple`], [`Error::NotANumber`].
    pub fn check(&self) -> Result<()> {
        let Shape {
            vocabulary, window, layers, width, heads, kv_heads, experts, top_k, expert_width, ..
        } = self.shape;
        let least = [
            ("different tokens", vocabulary, 8),
            ("tokens of a window", window, 1),
            ("layers", layers, 1),
            ("experts that a token chooses", top_k, 1),
            ("inner width of an expert", expert_width, 1),
        ];
        if let Some((what, seen, least)) = least.into_iter().find(|&(_, seen, least)| seen < least) {
            return Err(Error::TooFew { what, seen, least });
        }
        let multiples = [
            ("windows of a step, by ranks", self.batch, self.ranks),
            ("ranks, by those of an expert-parallel group", self.ranks, self.expert_parallel),
            ("experts, by ranks of an expert-parallel group", experts, self.expert_parallel),
            ("width, by heads", width, heads),
            ("heads, by those of keys and values", heads, kv_heads),
        ];
        for (what, seen, of) in multiples {
            if seen == 0 || !seen.is_multiple_of(of) {
                return Err(Error::NotMultiple { what, seen, of });
            }
        }
        let most = [
            ("experts that a token chooses", top_k as u128, experts as u128),
            ("weights, and values of the mask of attention", self.values(), MOST),
        ];
        if let Some((what, seen, most)) = most.into_iter().find(|&(_, seen, most)| seen > most) {
            return Err(Error::TooMany { what, seen, most });
        }
        let numbers = [("learning rate", self.rate), ("coefficient of the balance", self.balance.into())];
        match numbers.into_iter().find(|(_, seen)| !seen.is_finite() || *seen < 0.0) {
            Some((what, seen)) => Err(Error::NotANumber { what, seen }),
            None => Ok(()),
        }
    }

    /// Values of the shape in memory, over all ranks.
    fn values(&self) -> u128 {
        let Shape { vocabulary, window, layers, width, experts, expert_width, .. } = self.shape;
        let product = |of: &[usize]| of.iter().fold(1, |all: u128, &each| all.saturating_mul(each as u128));
        [
            product(&[2, vocabulary, width]),
            product(&[window, width]),
            product(&[window, window]),
            product(&[layers, 4, width, width]),
            product(&[layers, width, experts]),
            product(&[layers, experts, 3, width, expert_width]),
        ]
        .into_iter()
        .fold(0, u128::saturating_add)
    }

    /// Windows of one rank in a step.
    pub fn windows(&self) -> usize {
        self.batch / self.ranks
    }

    /// Tokens of a step.
    pub fn tokens(&self) -> usize {
        self.batch * self.shape.window
    }

    /// Experts of one rank in a layer.
    pub fn own_experts(&self) -> usize {
        self.shape.experts / self.expert_parallel
    }

    /// Which experts of a layer a rank has.
    pub fn experts_of(&self, rank: usize) -> Range<usize> {
        let own = self.own_experts();
        let first = rank % self.expert_parallel * own;
        first..first + own
    }

    /// The same run on so many ranks from some step on. Experts are spread over as many as before,
    /// or over all where that does not divide them.
    pub fn on(&self, ranks: usize) -> Settings {
        let divides = ranks.is_multiple_of(self.expert_parallel);
        let expert_parallel = if divides { self.expert_parallel } else { ranks };
        Settings { ranks, expert_parallel, ..*self }
    }

    /// The learning rate of a step: up in a line, down in a cosine.
    pub fn rate_at(&self, step: usize) -> f32 {
        let up = ((step + 1) as f64 / self.warm_up.max(1) as f64).min(1.0);
        let down = (1.0 + (std::f64::consts::PI * step as f64 / self.steps as f64).cos()) / 2.0;
        (self.rate * up * down) as f32
    }
}
