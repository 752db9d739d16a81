//! Dropout whose choices depend on what an element is, not on who computes it.
//!
//! A choice is a word of Philox4x32-10, the generator of torch on GPUs. It is a
//! function of a key and a counter, so there is no state to keep, to share or to save:
//!
//! ```text
//!   key       seed
//!   counter   number of the token (64 bits), element / 4, number of the dropout layer
//!   words     one for each of four elements:   dropped if below probability 2^32
//! ```
//!
//! So ranks, chunks and microbatches may cut tokens in any way, and a backward pass or a repeated
//! forward pass makes the same choices again.

use sidelane::error::PlanError;

use crate::check::has_shape;
use crate::error::SettingError;
use crate::float::Float;

/// Elements that one call of the generator serves.
const WORDS: usize = 4;

/// Dropout of rows: an element becomes 0, or is divided by the probability to stay.
///
/// ```
/// use sidelane_parallel::tensor::{Dropout, cut_rows};
///
/// let dropout = Dropout::new(0.5, 2024, 0)?;
/// let tokens = [40, 41, 42, 43];                               // numbers in the whole training
/// let whole = dropout.forward(&tokens, &[1.0; 12])?;           // rows of three elements
/// for rank in 0..2 {
///     let own = cut_rows(&tokens, 1, (rank, 2))?;              // sequence parallel
///     assert_eq!(dropout.forward(own, &[1.0; 6])?, cut_rows(&whole, 3, (rank, 2))?);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    seed: u64,
    layer: u32,
    /// Words below it drop their element.
    threshold: u32,
    /// Factor of the elements that stay.
    factor: f32,
}

impl Dropout {
    /// Dropout by this probability. Of one seed, each dropout layer of a model has a number of its
    /// own, or it makes the choices of another.
    ///
    /// # Errors
    /// [`SettingError`] for a probability that is not at least 0 and below 1.
    pub fn new(probability: f32, seed: u64, layer: u32) -> Result<Dropout, SettingError> {
        if !(0.0..1.0).contains(&probability) {
            let (setting, expected) = ("probability of dropout", "at least 0 and below 1");
            return Err(SettingError::OutOfRange { setting, seen: probability.into(), expected });
        }
        let threshold = (f64::from(probability) * 2f64.powi(32)) as u32;
        Ok(Dropout { seed, layer, threshold, factor: 1.0 / (1.0 - probability) })
    }

    /// Rows after dropout, in the shape of `x`, `[tokens, width]`. `tokens` has the number of each
    /// row's token, which no other token of the training has: where a rank has a part of the
    /// tokens, the numbers of that part.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] if `x` does not have equal rows.
    pub fn forward<E: Float>(&self, tokens: &[u64], x: &[E]) -> Result<Vec<E>, PlanError> {
        let width = x.len() / tokens.len().max(1);
        has_shape("rows of dropout", x.len(), tokens.len(), width)?;
        let mut y = E::widened(x).into_owned();
        for (&token, row) in tokens.iter().zip(y.chunks_exact_mut(width.max(1))) {
            for (block, elements) in (0..).zip(row.chunks_mut(WORDS)) {
                let counter = [token as u32, (token >> 32) as u32, block, self.layer];
                let words = philox(counter, [self.seed as u32, (self.seed >> 32) as u32]);
                for (element, word) in elements.iter_mut().zip(words) {
                    *element = if word < self.threshold { 0.0 } else { *element * self.factor };
                }
            }
        }
        Ok(E::rounded(y))
    }

    /// Gradient of the rows from that of the outputs, by the same choices.
    ///
    /// # Errors
    /// As [`forward`](Dropout::forward).
    pub fn backward<E: Float>(&self, tokens: &[u64], of_output: &[E]) -> Result<Vec<E>, PlanError> {
        self.forward(tokens, of_output)
    }
}

/// Philox4x32-10 (Salmon et al., 2011).
fn philox(mut counter: [u32; WORDS], mut key: [u32; 2]) -> [u32; WORDS] {
    let product = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..10 {
        let [(high0, low0), (high1, low1)] =
            [product(0xd251_1f53, counter[0]), product(0xcd9e_8d57, counter[2])];
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those of Random123.
    #[test]
    fn philox_gives_the_known_answers() {
        let ones = u32::MAX;
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (pi, [0xa409_3822, 0x299f_31d0], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ];
        for (counter, key, words) in cases {
            assert_eq!(philox(counter, key), words);
        }
    }
}
