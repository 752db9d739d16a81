//! Ulysses attention: an all-to-all turns parts of the tokens into parts of the heads, and back.
//!
//! ```text
//!              rank 0            rank 1                          rank 0            rank 1
//!   tokens 0   heads 0 1 2 3     .              all-to-all       heads 0 1         heads 2 3
//!   tokens 1   .                 heads 0 1 2 3  ---------->      heads 0 1         heads 2 3
//! ```
//!
//! Queries, keys and values of a token lie side by side on the way, so one all-to-all carries all
//! three, and one carries their gradients back. Keys of fewer KV heads than ranks go to all ranks
//! whose query heads need them: each of these ranks holds a replica.

use std::marker::PhantomData;
use std::ops::Range;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};

use super::attention::{Attended, Block, Queries};
use super::shape::{AttentionGradients, AttentionShape};
use crate::check::{Member, has_shape, part_of};
use crate::float::Float;

/// Attention of which each rank has a part of the tokens outside, and a part of the heads inside.
///
/// ```
/// use sidelane::{World, collective::Communicator};
/// use sidelane_parallel::context::{AttentionShape, UlyssesAttention};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut group = Communicator::builder(&world.all()?).build()?;
///         let shape = AttentionShape { query_heads: 2, kv_heads: 1, head_dim: 1, causal: true };
///         let attention = UlyssesAttention::new(&mut group, shape)?;
///         let (query, key, value) = ([0.0; 2], [0.0], [world.rank() as f32]);     // one token of each rank
///         let (output, tape) = attention.forward(&mut group, &query, &key, &value)?;
///         assert_eq!(output, [[0.0; 2], [0.5; 2]][world.rank() as usize]);        // a mean of the values so far
///         let gradients = tape.backward(&mut group, &[1.0; 2])?;
///         assert_eq!(gradients.value, [[3.0], [1.0]][world.rank() as usize]);     // of two heads
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UlyssesAttention<E = f32> {
    shape: AttentionShape,
    /// Attention over the heads of a rank.
    local: AttentionShape,
    member: Member,
    elements: PhantomData<E>,
}

/// This rank's heads of all tokens, as a forward pass leaves them for the backward pass.
#[derive(Clone, Debug)]
pub struct UlyssesTape<E = f32> {
    attention: UlyssesAttention<E>,
    attended: Attended,
    block: Block<Vec<f32>>,
}

impl UlyssesAttention {
    /// Attention of this shape over the ranks of a group. Where KV heads are fewer than ranks,
    /// several ranks hold a replica of each. Collective: ranks compare their shapes.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if query heads are not a multiple of the ranks and of the KV
    /// heads, or KV heads neither a multiple of the ranks nor a divisor of them;
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer) if ranks have different shapes.
    pub fn new(group: &mut Communicator, shape: AttentionShape) -> Result<Self, Error> {
        let member = Member::of(group);
        let cut = Self::cut(shape, member);
        shape.agree(group, cut.as_ref().map(drop).map_err(Clone::clone))?;
        Ok(UlyssesAttention { shape, local: cut?, member, elements: PhantomData })
    }

    /// The heads of each rank.
    fn cut(shape: AttentionShape, member: Member) -> Result<AttentionShape, PlanError> {
        shape.check()?;
        let (ranks, kv_heads) = (member.ranks as usize, shape.kv_heads);
        let query_heads = part_of("query heads", shape.query_heads, member.part())?;
        if !kv_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(kv_heads) {
            let expected = "a multiple of the ranks of the group, or a divisor of them";
            return Err(PlanError::BadParameter { parameter: "KV heads", seen: kv_heads as u64, expected });
        }
        Ok(AttentionShape { query_heads, kv_heads: (kv_heads / ranks).max(1), ..shape })
    }
}

impl<E: Float> UlyssesAttention<E> {
    /// The same attention for rows of other elements: `with_rows::<bf16>()`.
    pub fn with_rows<F: Float>(self) -> UlyssesAttention<F> {
        let UlyssesAttention { shape, local, member, .. } = self;
        UlyssesAttention { shape, local, member, elements: PhantomData }
    }

    fn ranks(&self) -> usize {
        self.member.ranks as usize
    }

    /// Outputs of this rank's tokens, `[T / ranks, query_heads, head_dim]`. Queries have the same
    /// shape, keys and values are `[T / ranks, kv_heads, head_dim]`. Rank `r` has the `r`-th part
    /// of the tokens. Collective.
    ///
    /// # Errors
    /// [`PlanError`] for arguments that do not fit; as [`Communicator::all_to_all`], also if ranks
    /// have different numbers of tokens.
    pub fn forward(
        &self,
        group: &mut Communicator,
        query: &[E],
        key: &[E],
        value: &[E],
    ) -> Result<(Vec<E>, UlyssesTape<E>), Error> {
        let checked = self.member.check(group).and_then(|()| self.shape.tokens(query, key, value));
        let tokens = checked.map_err(|error| group.refuse(CallKind::AllToAll, error.into()))?;
        let mut sent = Vec::with_capacity(self.ranks() * tokens * self.local_width());
        for (rank, token) in self.places(tokens) {
            sent.extend_from_slice(&query[self.query_heads(token, rank)]);
            sent.extend_from_slice(&key[self.kv_heads(token, rank)]);
            sent.extend_from_slice(&value[self.kv_heads(token, rank)]);
        }

        let (query, block) = self.apart(exchange(group, sent)?);
        let queries = Queries::new(self.local, query);
        let seen = queries.see(block.as_slices(), self.visible(tokens));
        let (output, attended) = queries.finish(seen);

        let received = exchange(group, E::rounded(output))?;
        let mut output = vec![E::zeroed(); tokens * self.shape.query_width()];
        for ((rank, token), row) in self.places(tokens).zip(received.chunks_exact(self.local.query_width())) {
            output[self.query_heads(token, rank)].copy_from_slice(row);
        }
        Ok((output, UlyssesTape { attention: *self, attended, block }))
    }

    /// Queries, keys and values of all tokens out of the rows of an all-to-all.
    fn apart(&self, received: Vec<E>) -> (Vec<f32>, Block<Vec<f32>>) {
        let received = E::widened(&received);
        let tokens = received.len() / self.local_width();
        let room = |width: usize| Vec::with_capacity(tokens * width);
        let mut query = room(self.local.query_width());
        let mut block = Block { key: room(self.local.kv_width()), value: room(self.local.kv_width()) };
        for row in received.chunks_exact(self.local_width()) {
            let (of_query, of_block) = row.split_at(self.local.query_width());
            let (of_key, of_value) = of_block.split_at(self.local.kv_width());
            query.extend_from_slice(of_query);
            block.key.extend_from_slice(of_key);
            block.value.extend_from_slice(of_value);
        }
        (query, block)
    }

    /// Ranks, and for each the tokens of a rank: the order of rows in an all-to-all.
    fn places(&self, tokens: usize) -> impl Iterator<Item = (usize, usize)> + use<E> {
        (0..self.ranks()).flat_map(move |rank| (0..tokens).map(move |token| (rank, token)))
    }

    /// Query heads of a rank, in the row of a token.
    fn query_heads(&self, token: usize, rank: usize) -> Range<usize> {
        let width = self.local.query_width();
        let first = token * self.shape.query_width() + rank * width;
        first..first + width
    }

    /// KV heads of a rank, in the row of a token. Ranks with replicas of a head have the same.
    fn kv_heads(&self, token: usize, rank: usize) -> Range<usize> {
        let head = rank * self.shape.kv_heads / self.ranks();
        let first = token * self.shape.kv_width() + head * self.shape.head_dim;
        first..first + self.local.kv_width()
    }

    /// Elements of a token's queries, keys and values on a rank.
    fn local_width(&self) -> usize {
        self.local.query_width() + 2 * self.local.kv_width()
    }

    /// Keys that a token of all sees.
    fn visible(&self, tokens: usize) -> impl Fn(usize) -> usize + use<E> {
        let (causal, all) = (self.shape.causal, tokens * self.ranks());
        move |token| if causal { token + 1 } else { all }
    }
}

impl<E: Float> UlyssesTape<E> {
    /// Gradients of this rank's tokens from those of their outputs,
    /// `[T / ranks, query_heads, head_dim]`. Collective.
    ///
    /// # Errors
    /// As [`UlyssesAttention::forward`].
    pub fn backward(
        &self,
        group: &mut Communicator,
        of_output: &[E],
    ) -> Result<AttentionGradients<E>, Error> {
        let attention = &self.attention;
        let (shape, local) = (&attention.shape, &attention.local);
        let tokens = self.attended.len() / shape.query_width();
        let checked = attention
            .member
            .check(group)
            .and_then(|()| has_shape("gradients of outputs", of_output.len(), tokens, shape.query_width()));
        checked.map_err(|error| group.refuse(CallKind::AllToAll, error.into()))?;
        let mut sent = Vec::with_capacity(of_output.len());
        for (rank, token) in attention.places(tokens) {
            sent.extend_from_slice(&of_output[attention.query_heads(token, rank)]);
        }

        let received = exchange(group, sent)?;
        let received = E::widened(&received);
        let of_output = self.attended.output_gradients(&received);
        let mut of_query = vec![0.0; self.attended.len()];
        let mut of_block = self.block.zeros();
        let visible = attention.visible(tokens);
        let (block, of) = (self.block.as_slices(), of_block.as_mut_slices());
        self.attended.add_gradients(block, &of_output, visible, &mut of_query, of);
        let mut sent = Vec::with_capacity(tokens * attention.ranks() * attention.local_width());
        let of_rows =
            of_block.key.chunks_exact(local.kv_width()).zip(of_block.value.chunks_exact(local.kv_width()));
        for (of_query, (of_key, of_value)) in of_query.chunks_exact(local.query_width()).zip(of_rows) {
            sent.extend_from_slice(of_query);
            sent.extend_from_slice(of_key);
            sent.extend_from_slice(of_value);
        }

        let received = exchange(group, E::rounded(sent))?;
        let received = E::widened(&received);
        let zeros = |width: usize| vec![0.0; tokens * width];
        let (query, key) = (zeros(shape.query_width()), zeros(shape.kv_width()));
        let mut gradients = AttentionGradients { query, value: key.clone(), key };
        let rows = received.chunks_exact(attention.local_width());
        for ((rank, token), row) in attention.places(tokens).zip(rows) {
            let (of_query, of_block) = row.split_at(local.query_width());
            let (of_key, of_value) = of_block.split_at(local.kv_width());
            gradients.query[attention.query_heads(token, rank)].copy_from_slice(of_query);
            // Replicas of a head come by ascending rank.
            add(&mut gradients.key[attention.kv_heads(token, rank)], of_key);
            add(&mut gradients.value[attention.kv_heads(token, rank)], of_value);
        }
        let AttentionGradients { query, key, value } = gradients;
        let [query, key, value] = [query, key, value].map(E::rounded);
        Ok(AttentionGradients { query, key, value })
    }
}

/// An all-to-all of equal parts, which are not kept.
fn exchange<E: Float>(group: &mut Communicator, sent: Vec<E>) -> Result<Vec<E>, Error> {
    let mut received = vec![E::zeroed(); sent.len()];
    group.all_to_all(&sent, &mut received)?;
    Ok(received)
}

fn add(sums: &mut [f32], row: &[f32]) {
    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
}
