//! A router's decisions, in the form that `sidelane bench --routing` replays: one line per token.

use std::path::Path;

use serde::Serialize;
use sidelane::gate::Decision;

use crate::error::{Error, Result};
use crate::settings::Settings;

/// Decisions for consecutive tokens, `[tokens, top_k]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decisions {
    /// Experts, the weightiest first.
    pub experts: Vec<i32>,
    /// Their weights.
    pub weights: Vec<f32>,
}

/// The first line.
#[derive(Serialize)]
struct About {
    r#type: &'static str,
    num_experts: usize,
    top_k: usize,
    layer: usize,
    seed: u64,
    steps: usize,
}

/// Every other line.
#[derive(Serialize)]
struct Token<'a> {
    topk_ids: &'a [i32],
    topk_weights: Vec<f64>,
}

impl Decisions {
    /// Decisions of a gate.
    pub fn of(decision: &Decision) -> Decisions {
        Decisions { experts: decision.experts().to_vec(), weights: decision.weights().to_vec() }
    }

    /// Appends those of later tokens.
    pub fn extend(&mut self, later: Decisions) {
        self.experts.extend(later.experts);
        self.weights.extend(later.weights);
    }

    /// For another rank.
    pub fn to_bytes(&self) -> Vec<u8> {
        let choices = self.experts.iter().zip(&self.weights);
        choices.flat_map(|(expert, weight)| [expert.to_le_bytes(), weight.to_le_bytes()].concat()).collect()
    }

    /// From another rank.
    pub fn from_bytes(bytes: &[u8]) -> Decisions {
        let (words, _) = bytes.as_chunks::<4>();
        let (pairs, _) = words.as_chunks::<2>();
        let choices =
            pairs.iter().map(|&[expert, weight]| (i32::from_le_bytes(expert), f32::from_le_bytes(weight)));
        let (experts, weights) = choices.unzip();
        Decisions { experts, weights }
    }

    /// Writes JSON lines as [`Recorded`](sidelane::gate::Recorded) reads them: weights to four
    /// digits, since they are only for inspection: no run's bits depend on them.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn write(&self, path: &Path, settings: &Settings) -> Result<()> {
        let (shape, failed) = (settings.shape, Error::malformed(path));
        let about = About {
            r#type: "meta",
            num_experts: shape.experts,
            top_k: shape.top_k,
            layer: shape.layers - 1,
            seed: settings.seed,
            steps: settings.steps,
        };
        let rounded = |weight: &f32| (f64::from(*weight) * 1e4).round() / 1e4;
        let tokens = self.experts.chunks(shape.top_k).zip(self.weights.chunks(shape.top_k));
        let token = |(topk_ids, weights): (_, &[f32])| {
            serde_json::to_string(&Token { topk_ids, topk_weights: weights.iter().map(rounded).collect() })
        };
        let lines = std::iter::once(serde_json::to_string(&about)).chain(tokens.map(token));
        let lines =
            lines.map(|line| Ok(line? + "\n")).collect::<serde_json::Result<String>>().map_err(failed)?;
        std::fs::write(path, lines).map_err(Error::file(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_travel_as_they_are() {
        let decisions = Decisions { experts: vec![3, -1, 7], weights: vec![0.25, 0.0, f32::MIN_POSITIVE] };
        assert_eq!(Decisions::from_bytes(&decisions.to_bytes()), decisions);
    }
}
