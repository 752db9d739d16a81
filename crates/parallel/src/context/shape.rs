//! Sizes of attention, and its tensors.

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::PlanError;

use crate::check::{agree, at_least_one, has_shape, rows_of};

/// Sizes of attention, of all ranks together.
///
/// Tensors are `[tokens, heads, head_dim]`. KV head `h` serves `query_heads / kv_heads` query heads
/// next to each other, from `h * query_heads / kv_heads` on (GQA; MQA with one KV head).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Heads of queries and of outputs.
    pub query_heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether a token sees itself and earlier tokens only.
    pub causal: bool,
}

impl AttentionShape {
    /// Elements of a token's queries.
    pub(super) fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Elements of a token's keys, and of its values.
    pub(super) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The KV head of a query head.
    pub(super) fn kv_head(&self, query_head: usize) -> usize {
        query_head * self.kv_heads / self.query_heads
    }

    /// Checks that heads have elements, that sizes can be multiplied, and that each KV head serves
    /// as many query heads.
    pub(super) fn check(&self) -> Result<(), PlanError> {
        at_least_one("query heads", self.query_heads)?;
        at_least_one("KV heads", self.kv_heads)?;
        at_least_one("elements of a head", self.head_dim)?;
        let most = u32::MAX as usize / self.head_dim;
        if self.query_heads > most {
            let (parameter, expected) = ("query heads", "less than 2^32 elements of all heads");
            return Err(PlanError::BadParameter { parameter, seen: self.query_heads as u64, expected });
        }
        if self.query_heads.is_multiple_of(self.kv_heads) {
            return Ok(());
        }
        let (parameter, expected) = ("query heads", "a multiple of the KV heads");
        Err(PlanError::BadParameter { parameter, seen: self.query_heads as u64, expected })
    }

    /// Refuses a shape that was found wrong on this rank, and compares it with those of the others.
    pub(super) fn agree(self, group: &mut Communicator, found: Result<(), PlanError>) -> Result<(), Error> {
        let settings = found.map(|()| {
            let AttentionShape { query_heads, kv_heads, head_dim, causal } = self;
            let heads =
                [("query heads", query_heads), ("KV heads", kv_heads), ("elements of a head", head_dim)];
            let heads = heads.into_iter().map(|(what, count)| (what, count as u64));
            heads.chain([("causal attention", causal.into())]).collect()
        });
        agree(group, settings.map_err(Error::from))
    }

    /// Tokens of a rank's tensors, which must have as many each.
    pub(super) fn tokens<E>(&self, query: &[E], key: &[E], value: &[E]) -> Result<usize, PlanError> {
        let tokens = rows_of("queries", query.len(), self.query_width())?;
        has_shape("keys", key.len(), tokens, self.kv_width())?;
        has_shape("values", value.len(), tokens, self.kv_width())?;
        Ok(tokens)
    }
}

/// Gradients of attention, in the shapes of what they are of.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGradients<E = f32> {
    /// Of the queries.
    pub query: Vec<E>,
    /// Of the keys.
    pub key: Vec<E>,
    /// Of the values.
    pub value: Vec<E>,
}
