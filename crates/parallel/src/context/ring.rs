//! Ring attention: blocks of keys and values travel round, and queries stay.
//!
//! ```text
//!   3 ranks      step 0    step 1    step 2         backward: a block and its gradients
//!   rank 0 sees  block 0   block 2   block 1        block 0  visits ranks 0, 1, 2, and its
//!   rank 1 sees  block 1   block 0   block 2                 gradients return to 0
//!   rank 2 sees  block 2   block 1   block 0
//! ```
//!
//! Messages to a rank wait for its receive once two slots are full. So ranks of even numbers send
//! first and others receive first: ranks that all send first would wait for each other for ever.

use std::marker::PhantomData;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};

use super::attention::{Attended, Block};
use super::shape::{AttentionGradients, AttentionShape};
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
        let checked = self.shape.tokens(query, key, value).and_then(|tokens| {
            if self.shape.causal { zig_zag::piece_tokens(tokens).map(|_| tokens) } else { Ok(tokens) }
        });
        let tokens = self.agree(group, checked)?;
        let mut attended = Attended::new(self.shape, E::widened(query).into_owned());
        let own = [key, value].concat();
        let mut block = own.clone();
        for (step, from) in self.order().enumerate() {
            if step > 0 {
                self.pass_on(group, &mut block)?;
            }
            let values = E::widened(&block);
            let (key, value) = values.split_at(key.len());
            attended.see(Block { key, value }, self.visible(tokens, from));
        }
        Ok((E::rounded(attended.finish()), RingTape { attention: *self, attended, block: own }))
    }

    /// Messages have no entry that a rank could refuse, so all ranks gather their numbers of tokens
    /// first.
    fn agree(&self, group: &mut Communicator, checked: Result<usize, PlanError>) -> Result<usize, Error> {
        let checked = self.member.check(group).and(checked);
        let tokens = checked.map_err(|error| group.refuse(CallKind::AllGather, error.into()))?;
        alike(group, &[("tokens", tokens as u64), ("bytes of an element", size_of::<E>() as u64)])?;
        Ok(tokens)
    }

    fn order(&self) -> impl Iterator<Item = u32> + use<E> {
        ring_order(self.member.part())
    }

    /// Gives a block to the next rank, and takes that of the rank before.
    fn pass_on(&self, group: &mut Communicator, block: &mut Vec<E>) -> Result<(), Error> {
        let (rank, ranks) = self.member.part();
        if ranks == 1 {
            return Ok(());
        }
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let mut received = vec![E::zeroed(); block.len()];
        if rank.is_multiple_of(2) {
            group.send(next, block)?;
            group.receive(before, &mut received)?;
        } else {
            group.receive(before, &mut received)?;
            group.send(next, block)?;
        }
        *block = received;
        Ok(())
    }

    /// Keys of a block that a token of this rank sees.
    fn visible(&self, tokens: usize, from: u32) -> impl Fn(usize) -> usize + use<E> {
        let RingAttention { shape, member: Member { rank, ranks }, .. } = *self;
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
        let (attention, shape) = (&self.attention, &self.attention.shape);
        let tokens = self.attended.len() / shape.query_width();
        let checked = has_shape("gradients of outputs", of_output.len(), tokens, shape.query_width());
        attention.agree(group, checked.map(|()| tokens))?;
        let of_output = E::widened(of_output);
        let of_output = self.attended.output_gradients(&of_output);
        let mut query = vec![0.0; self.attended.len()];
        // Keys, values and the gradients of both.
        let mut block = self.block.clone();
        block.resize(2 * self.block.len(), E::zeroed());
        let keys = self.block.len() / 2;
        for (step, from) in attention.order().enumerate() {
            if step > 0 {
                attention.pass_on(group, &mut block)?;
            }
            let (values, gradients) = block.split_at_mut(2 * keys);
            let values = E::widened(values);
            let (key, value) = values.split_at(keys);
            let visible = attention.visible(tokens, from);
            E::in_f32(gradients, |gradients| {
                let (of_key, of_value) = gradients.split_at_mut(keys);
                let (seen, of_seen) = (Block { key, value }, Block { key: of_key, value: of_value });
                self.attended.add_gradients(seen, &of_output, visible, &mut query, of_seen);
            });
        }
        // The last rank that a block visits is the one before its own.
        let mut key = block.split_off(2 * keys);
        attention.pass_on(group, &mut key)?;
        let value = key.split_off(keys);
        Ok(AttentionGradients { query: E::rounded(query), key, value })
    }
}
