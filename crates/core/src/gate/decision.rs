//! Decision of a router.

use super::Routing;

/// The choices of all tokens of a call, before and after dropping. Arrays `[tokens, top_k]` are
/// row-major; a token's choices come best first.
///
/// It belongs to its [`Gate`](super::Gate), which fills it anew with each call.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Decision {
    pub(super) top_k: u32,
    pub(super) choices: Vec<i32>,
    pub(super) experts: Vec<i32>,
    pub(super) weights: Vec<f32>,
    pub(super) slots: Vec<i32>,
    pub(super) capacity: u32,
    pub(super) required: u32,
    pub(super) counts_before: Vec<u32>,
    pub(super) counts_after: Vec<u32>,
}

impl Decision {
    /// Makes room for so many tokens. Old values are left where they are.
    pub(super) fn make_room(&mut self, tokens: usize) {
        let choices = tokens * self.top_k as usize;
        self.choices.resize(choices, -1);
        self.experts.resize(choices, -1);
        self.weights.resize(choices, 0.0);
        self.slots.resize(choices, -1);
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u32 {
        (self.experts.len() / self.top_k as usize) as u32
    }

    /// Choices per token.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Choices before dropping, `[tokens, top_k]`; -1 for tokens that do not count.
    pub fn choices(&self) -> &[i32] {
        &self.choices
    }

    /// Choices after dropping, `[tokens, top_k]`: expert ids, or -1.
    pub fn experts(&self) -> &[i32] {
        &self.experts
    }

    /// Weights of [`experts`](Self::experts), `[tokens, top_k]`; 0 where there is none.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Experts and weights, to dispatch by.
    pub fn routing(&self) -> Routing<'_> {
        Routing::borrowed(self.top_k, &self.experts, &self.weights)
    }

    /// Which choices were dropped, `[tokens, top_k]`.
    pub fn dropped(&self) -> impl ExactSizeIterator<Item = bool> + '_ {
        self.choices.iter().zip(&self.experts).map(|(choice, expert)| choice != expert)
    }

    /// Tokens that chose and have nothing left: combine gives them zeros.
    pub fn dropped_tokens(&self) -> impl Iterator<Item = u32> + '_ {
        let k = self.top_k as usize;
        let rows = self.choices.chunks_exact(k).zip(self.experts.chunks_exact(k));
        let lost = |(choices, experts): (&[i32], &[i32])| {
            choices.iter().any(|&id| id >= 0) && experts.iter().all(|&id| id < 0)
        };
        (0..).zip(rows).filter(move |&(_, row)| lost(row)).map(|(token, _)| token)
    }

    /// Place of each choice among the rows of its expert and local group, `[tokens, top_k]`, from 0
    /// without gaps; -1 where there is none.
    pub fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// Rows per expert and local group: the capacity or, for a dropless gate, the need of the
    /// fullest expert.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The capacity that would have dropped nothing: the largest count of an expert in a local
    /// group.
    pub fn required(&self) -> u32 {
        self.required
    }

    /// Choices of each expert, `[experts]`, before any was dropped.
    pub fn counts_before(&self) -> &[u32] {
        &self.counts_before
    }

    /// Choices of each expert that are left, `[experts]`.
    pub fn counts_after(&self) -> &[u32] {
        &self.counts_after
    }
}
