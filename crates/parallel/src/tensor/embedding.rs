//! Embedding, cut by vocabulary.
//!
//! ```text
//!   vocabulary 50,000 on 2 ranks        ids       0      1      25000   25001
//!   rank 0 has rows     0..25000        lookup    row    row    0       0
//!   rank 1 has rows 25000..50000        lookup    0      0      row     row          reduce: the sum over ranks
//! ```
//!
//! All addends of an element but one are zeros, so the sum has the bits of the row. A -0 becomes
//! +0.

use std::marker::PhantomData;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::PlanError;

use super::activations::{Activations, refuse};
use crate::check::{at_least_one, has_ranks, has_shape, part_of};
use crate::float::Float;

/// The rows that a rank holds.
#[derive(Clone, Debug)]
struct Part {
    vocabulary: usize,
    hidden: usize,
    /// The first id of this rank, and how many it has.
    first: usize,
    rows: usize,
    ranks: usize,
    activations: Activations,
    weight: Vec<f32>,
}

impl Part {
    /// The row of an id, if this rank has it.
    fn own(&self, id: u32) -> Result<Option<usize>, PlanError> {
        if id as usize >= self.vocabulary {
            let (parameter, expected) = ("token id", "an id of the vocabulary");
            return Err(PlanError::BadParameter { parameter, seen: id.into(), expected });
        }
        Ok((id as usize).checked_sub(self.first).filter(|row| *row < self.rows))
    }
}

/// An embedding of which each rank holds the rows of a part of the vocabulary.
#[derive(Clone, Debug)]
pub struct VocabularyParallelEmbedding<E = f32>(Part, PhantomData<E>);

impl VocabularyParallelEmbedding {
    /// This rank's rows: `weight` is `[vocabulary / ranks, hidden]`. Pad a vocabulary that is not a
    /// multiple of the ranks.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] for weights of another length, [`PlanError::BadParameter`] if the
    /// vocabulary does not make equal parts.
    pub fn new(
        group: &Communicator,
        vocabulary: usize,
        hidden: usize,
        activations: Activations,
        weight: Vec<f32>,
    ) -> Result<Self, PlanError> {
        let (rank, ranks) = (group.rank(), group.size());
        at_least_one("hidden", hidden)?;
        let rows = part_of("vocabulary", vocabulary, (rank, ranks))?;
        has_shape("rows of the embedding", weight.len(), rows, hidden)?;
        let (first, ranks) = (rank as usize * rows, ranks as usize);
        let part = Part { vocabulary, hidden, first, rows, ranks, activations, weight };
        Ok(VocabularyParallelEmbedding(part, PhantomData))
    }
}

impl<E: Float> VocabularyParallelEmbedding<E> {
    /// The same embedding with rows of other elements: `with_rows::<bf16>()`. The weights stay
    /// `f32`, and are rounded where they are looked up.
    pub fn with_rows<F: Float>(self) -> VocabularyParallelEmbedding<F> {
        VocabularyParallelEmbedding(self.0, PhantomData)
    }

    /// Rows of this rank's ids, and zeros for the others: `[T, hidden]`, before the sum over ranks.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for an id outside the vocabulary.
    pub fn lookup(&self, ids: &[u32]) -> Result<Vec<E>, PlanError> {
        let part = &self.0;
        let mut rows = vec![E::zeroed(); ids.len() * part.hidden];
        for (row, &id) in rows.chunks_exact_mut(part.hidden).zip(ids) {
            if let Some(own) = part.own(id)? {
                let weight = &part.weight[own * part.hidden..][..part.hidden];
                E::in_f32(row, |row| row.copy_from_slice(weight));
            }
        }
        Ok(rows)
    }

    /// Rows of the ids, `[T, hidden]`, or this rank's tokens of them. All ranks give the same ids.
    /// Collective.
    ///
    /// # Errors
    /// As [`lookup`](VocabularyParallelEmbedding::lookup); [`PlanError::BadParameter`] if tokens do
    /// not make equal parts; as [`Communicator::all_reduce`] and [`Communicator::reduce_scatter`].
    pub fn forward(&self, group: &mut Communicator, ids: &[u32]) -> Result<Vec<E>, Error> {
        let part = &self.0;
        let rows = has_ranks(group, part.ranks)
            .and_then(|()| part.activations.outside(ids.len(), part.ranks))
            .and_then(|_| self.lookup(ids));
        match rows {
            Ok(rows) => part.activations.reduce(group, rows),
            Err(error) => Err(refuse(group, part.activations.reduce_call(), error)),
        }
    }

    /// Gradient of this rank's rows, from that of the outputs in their shape. Tokens of an id are
    /// summed in order. Collective if activations are sequence parallel.
    ///
    /// # Errors
    /// As [`forward`](VocabularyParallelEmbedding::forward), [`PlanError::WrongShape`], and
    /// [`Communicator::all_gather`].
    pub fn backward(
        &self,
        group: &mut Communicator,
        ids: &[u32],
        of_output: &[E],
    ) -> Result<Vec<f32>, Error> {
        let part = &self.0;
        let places = has_ranks(group, part.ranks).and_then(|()| {
            let tokens = part.activations.outside(ids.len(), part.ranks)?;
            has_shape("gradients of rows", of_output.len(), tokens, part.hidden)?;
            ids.iter().map(|&id| part.own(id)).collect::<Result<Vec<_>, _>>()
        });
        let places = match places {
            Ok(places) => places,
            Err(error) => return Err(refuse(group, part.activations.gather_call(), error)),
        };
        let of_output = part.activations.gather(group, of_output)?;
        let of_output = E::widened(&of_output);
        let mut weight = vec![0.0; part.weight.len()];
        for (own, of_row) in places.into_iter().zip(of_output.chunks_exact(part.hidden)) {
            let Some(own) = own else { continue };
            let row = &mut weight[own * part.hidden..][..part.hidden];
            row.iter_mut().zip(of_row).for_each(|(sum, of)| *sum += of);
        }
        Ok(weight)
    }

    /// This rank's rows, `[vocabulary / ranks, hidden]`.
    pub fn weight_mut(&mut self) -> &mut [f32] {
        &mut self.0.weight
    }
}
