//! The router's decisions for the tokens of one rank.

use std::borrow::Cow;

use crate::error::PlanError;

/// Per token its chosen experts and their weights: two arrays `[tokens, top_k]`, row-major.
///
/// An id of -1 is a dropped choice: it moves nothing, adds nothing, and its gradient is zero.
///
/// ```
/// let routing = sidelane_core::gate::Routing::new(2, vec![5, 0, 3, -1], vec![0.75, 0.25, 1.0, 0.0])?;
/// assert_eq!(routing.tokens(), 2);
/// assert_eq!(routing.experts_of(1), [3, -1]);
/// # Ok::<(), sidelane_core::error::PlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Routing<'a> {
    top_k: u32,
    experts: Cow<'a, [i32]>,
    weights: Cow<'a, [f32]>,
}

impl<'a> Routing<'a> {
    /// From expert ids and weights, each `[tokens, top_k]`, owned or borrowed.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] if the arrays differ in length or are no multiple of `top_k`;
    /// [`PlanError::BadParameter`] if `top_k` is 0. Ids are checked by the call that uses the
    /// routing.
    pub fn new(
        top_k: u32,
        experts: impl Into<Cow<'a, [i32]>>,
        weights: impl Into<Cow<'a, [f32]>>,
    ) -> Result<Self, PlanError> {
        let (experts, weights) = (experts.into(), weights.into());
        if top_k == 0 {
            return Err(PlanError::BadParameter { parameter: "top_k", seen: 0, expected: "at least 1" });
        }
        let columns = top_k as usize;
        let rows = experts.len() / columns;
        for (what, seen) in [("expert ids", experts.len()), ("routing weights", weights.len())] {
            if seen != rows * columns {
                return Err(PlanError::WrongShape { what, seen, rows, columns });
            }
        }
        Ok(Routing { top_k, experts, weights })
    }

    /// From two arrays that are known to fit.
    pub(super) fn borrowed(top_k: u32, experts: &'a [i32], weights: &'a [f32]) -> Self {
        Routing { top_k, experts: experts.into(), weights: weights.into() }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u32 {
        (self.experts.len() / self.top_k as usize) as u32
    }

    /// Choices per token.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Expert ids, `[tokens, top_k]`.
    pub fn experts(&self) -> &[i32] {
        &self.experts
    }

    /// Weights, `[tokens, top_k]`.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// The choices of one token.
    pub fn experts_of(&self, token: u32) -> &[i32] {
        let k = self.top_k as usize;
        &self.experts[token as usize * k..][..k]
    }
}
