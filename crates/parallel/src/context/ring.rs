//! Ring attention: blocks of keys and values travel round, and queries stay.
//!
//! ```text
//!   3 ranks      step 0    step 1    step 2         backward: a block and its gradients
//!   rank 0 sees  block 0   block 2   block 1        block 0  visits ranks 0, 1, 2, and its
//!   rank 1 sees  block 1   block 0   block 2                 gradients return to 0
//!   rank 2 sees  block 2   block 1   block 0
//! ```
//!
//! A block travels while the one before is seen ([`visits`](super::visits)).

use std::marker::PhantomData;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};
use sidelane::overlap::{Handoff, HostExecutor};

use super::attention::{Attended, Block, Queries, Seen};
use super::shape::{AttentionGradients, AttentionShape};
use super::visits::{Visits, pass_on};
use super::zig_zag;
use crate::check::{Member, alike, has_shape};
use crate::float::Float;

/// Ranks whose blocks a rank sees, in this order: its own, then those of the ranks before it.
///
/// ```
/// use sidelane_parallel::context::ring_order;
///
/// assert_eq!(ring_order((1, 3)).collect::<Vec<_>>(), [1, 0, 2]);
/// ```
pub fn ring_order((rank, ranks): (u32, u32)) -> impl Iterator<Item = u32> {
    (0..=rank).rev().chain((rank..ranks).skip(1).rev())
}

/// Attention of which each rank has a part of the tokens, with keys and values that travel.
///
/// If attention is causal, rank `r` has the tokens of its two [`zig_zag_pieces`]
/// ([`cut_zig_zag`]), else any tokens.
///
/// [`zig_zag_pieces`]: super::zig_zag_pieces
/// [`cut_zig_zag`]: super::cut_zig_zag
///
/// ```
/// use sidelane::{World, collective::Communicator};
/// use sidelane_parallel::context::{AttentionShape, RingAttention};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut group = Communicator::builder(&world.all()?).build()?;
///         let shape = AttentionShape { query_heads: 1, kv_heads: 1, head_dim: 1, causal: true };
///         let attention = RingAttention::new(&mut group, shape)?;
///         let value = [[0.0, 6.0], [2.0, 4.0]][world.rank() as usize];            // tokens 0 and 3, 1 and 2
///         let (output, tape) = attention.forward(&mut group, &[0.0; 2], &[0.0; 2], &value)?;
///         assert_eq!(output, [[0.0, 3.0], [1.0, 2.0]][world.rank() as usize]);    // a mean of the values so far
///         let gradients = tape.backward(&mut group, &[0.0, 1.0])?;                // of tokens 3 and 2
///         let third = 1.0 / 3.0;
///         assert_eq!(gradients.value, [[0.25 + third, 0.25], [0.25 + third; 2]][world.rank() as usize]);
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAttention<E = f32> {
    shape: AttentionShape,
    member: Member,
    elements: PhantomData<E>,
}

/// This rank's tokens, as a forward pass leaves them for the backward pass.
#[derive(Clone, Debug)]
pub struct RingTape<E = f32> {
    attention: RingAttention<E>,
    attended: Attended,
    /// This rank's keys, and its values behind them.
    block: Vec<E>,
}

impl RingAttention {
    /// Attention of this shape over the ranks of a group. Collective: ranks compare their shapes.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if query heads are not a multiple of the KV heads;
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer) if ranks have different shapes.
    pub fn new(group: &mut Communicator, shape: AttentionShape) -> Result<Self, Error> {
        shape.agree(group, shape.check())?;
        Ok(RingAttention { shape, member: Member::of(group), elements: PhantomData })
    }
}

impl<E: Float> RingAttention<E> {
    /// The same attention for rows of other elements: `with_rows::<bf16>()`.
    pub fn with_rows<F: Float>(self) -> RingAttention<F> {
        let RingAttention { shape, member, .. } = self;
        RingAttention { shape, member, elements: PhantomData }
    }

    /// Outputs of this rank's tokens, `[T / ranks, query_heads, head_dim]`. Queries have the same
    /// shape, keys and values are `[T / ranks, kv_heads, head_dim]`. Collective.
    ///
    /// # Errors
    /// On every rank, before a block moves: [`PlanError`] for arguments that do not fit, and for an
    /// odd number of tokens if attention is causal;
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer) if ranks have different numbers
    /// of tokens; as [`Communicator::all_gather`]. Later as [`Communicator::send`] and
    /// [`Communicator::receive`].
    pub fn forward(
        &self,
        group: &mut Communicator,
        query: &[E],
        key: &[E],
        value: &[E],
    ) -> Result<(Vec<E>, RingTape<E>), Error> {
        self.forward_overlapped(group, query, key, value, &HostExecutor::new().overlap(false))
    }

    /// As [`forward`](Self::forward), to the same bits: a block travels next to the attention of
    /// the one before, and so does the correction of the softmax.
    ///
    /// Messages have no entry that a rank could refuse. So a rank whose executor gives up alone, by
    /// its `limit` for example, leaves the others waiting for its block until the deadline of the
    /// world. End the world in [`HostExecutor::on_error`], by
    /// [`World::cancel`](sidelane::World::cancel).
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`OverlapError`](sidelane::error::OverlapError).
    pub fn forward_overlapped(
        &self,
        group: &mut Communicator,
        query: &[E],
        key: &[E],
        value: &[E],
        executor: &HostExecutor<'_>,
    ) -> Result<(Vec<E>, RingTape<E>), Error> {
        let checked = self.shape.tokens(query, key, value).and_then(|tokens| {
            if self.shape.causal { zig_zag::piece_tokens(tokens).map(|_| tokens) } else { Ok(tokens) }
        });
        let tokens = self.agree(group, checked)?;
        let queries = Queries::new(self.shape, E::widened(query).into_owned());
        let block = [key, value].concat();
        let see = |step, block: &[E]| {
            let values = E::widened(block);
            let (key, value) = values.split_at(key.len());
            Ok(queries.see(Block { key, value }, self.visible(tokens, step)))
        };
        let add = |seen: Option<Seen>, of_block: Seen| match seen {
            None => of_block,
            Some(mut seen) => {
                seen.add(&of_block);
                seen
            }
        };
        let seen = Visits { see: &see, add: &add, pass: None }.run(group, &block, executor)?;
        let (output, attended) = queries.finish(seen);
        Ok((E::rounded(output), RingTape { attention: *self, attended, block }))
    }

    /// Messages have no entry that a rank could refuse, so all ranks gather their numbers of tokens
    /// first.
    fn agree(&self, group: &mut Communicator, checked: Result<usize, PlanError>) -> Result<usize, Error> {
        let checked = self.member.check(group).and(checked);
        let tokens = checked.map_err(|error| group.refuse(CallKind::AllGather, error.into()))?;
        alike(group, &[("tokens", tokens as u64), ("bytes of an element", size_of::<E>() as u64)])?;
        Ok(tokens)
    }

    /// Keys that a token of this rank sees of the block of so many ranks before it.
    fn visible(&self, tokens: usize, step: u32) -> impl Fn(usize) -> usize + use<E> {
        let RingAttention { shape, member: Member { rank, ranks }, .. } = *self;
        let from = (rank + ranks - step) % ranks;
        move |token| match shape.causal {
            true => zig_zag::visible(tokens, ranks as usize, (rank as usize, token), from as usize),
            false => tokens,
        }
    }
}

impl<E: Float> RingTape<E> {
    /// Gradients of this rank's tokens from those of their outputs,
    /// `[T / ranks, query_heads, head_dim]`. Collective.
    ///
    /// # Errors
    /// As [`RingAttention::forward`].
    pub fn backward(
        &self,
        group: &mut Communicator,
        of_output: &[E],
    ) -> Result<AttentionGradients<E>, Error> {
        self.backward_overlapped(group, of_output, &HostExecutor::new().overlap(false))
    }

    /// As [`backward`](Self::backward), to the same bits: a block travels next to the gradients of
    /// the one before, and its own gradients follow next to those of the one behind. What
    /// [`forward_overlapped`](RingAttention::forward_overlapped) says of an executor that gives up
    /// alone holds here, too.
    ///
    /// # Errors
    /// As [`backward`](Self::backward); [`OverlapError`](sidelane::error::OverlapError).
    pub fn backward_overlapped(
        &self,
        group: &mut Communicator,
        of_output: &[E],
        executor: &HostExecutor<'_>,
    ) -> Result<AttentionGradients<E>, Error> {
        let (attention, shape) = (&self.attention, &self.attention.shape);
        let tokens = self.attended.len() / shape.query_width();
        let checked = has_shape("gradients of outputs", of_output.len(), tokens, shape.query_width());
        attention.agree(group, checked.map(|()| tokens))?;
        let of_output = E::widened(of_output);
        let of_output = self.attended.output_gradients(&of_output);
        let query = Handoff::new(vec![0.0; self.attended.len()]);
        let keys = self.block.len() / 2;
        let see = |step, block: &[E]| {
            let values = E::widened(block);
            let (key, value) = values.split_at(keys);
            let mut gradients = vec![0.0; 2 * keys];
            let (of_key, of_value) = gradients.split_at_mut(keys);
            let (seen, of_seen) = (Block { key, value }, Block { key: of_key, value: of_value });
            let visible = attention.visible(tokens, step);
            query.with(|query| {
                self.attended.add_gradients(seen, &of_output, visible, query, of_seen);
                Ok(())
            })?;
            Ok(gradients)
        };
        let add = |sum: Option<Vec<E>>, gradients: Vec<f32>| match sum {
            None => E::rounded(gradients),
            Some(mut sum) => {
                E::in_f32(&mut sum, |sum| {
                    sum.iter_mut().zip(&gradients).for_each(|(sum, value)| *sum += value);
                });
                sum
            }
        };
        let pass = |group: &mut Communicator, sum: Vec<E>| pass_on(group, &sum);
        let mut key = Visits { see: &see, add: &add, pass: Some(&pass) }.run(group, &self.block, executor)?;
        let value = key.split_off(keys);
        Ok(AttentionGradients { query: E::rounded(query.take()?), key, value })
    }
}
