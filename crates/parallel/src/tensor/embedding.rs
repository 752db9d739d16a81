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
//!
//! A tied output layer has these rows as its weights ([`output`]), so a model holds them once.
//!
//! [`output`]: VocabularyParallelEmbedding::output

use std::marker::PhantomData;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::PlanError;

use super::activations::{Activations, refuse};
use super::linear::{ColumnParallelLinear, Part};
use crate::check::{agreed, at_least_one, has_ranks, has_shape, part_of};
use crate::float::Float;

/// An embedding of which each rank holds the rows of a part of the vocabulary.
#[derive(Clone, Debug)]
pub struct VocabularyParallelEmbedding<E = f32> {
    vocabulary: usize,
    /// The first id of this rank.
    first: usize,
    /// With this rank's rows as its weights.
    output: ColumnParallelLinear<E>,
}

impl VocabularyParallelEmbedding {
    /// This rank's rows: `weight` is `[vocabulary / ranks, hidden]`. Pad a vocabulary that is not a
    /// multiple of the ranks. Collective: ranks compare sizes and activations.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] for weights of another length, [`PlanError::BadParameter`] if the
    /// vocabulary does not make equal parts, and
    /// [`PeerRefused`](sidelane::error::CallError::PeerRefused) on the other ranks;
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer).
    pub fn new(
        group: &mut Communicator,
        vocabulary: usize,
        hidden: usize,
        activations: Activations,
        weight: Vec<f32>,
    ) -> Result<Self, Error> {
        let (rank, ranks) = (group.rank(), group.size());
        let part = at_least_one("hidden", hidden).and_then(|()| {
            let rows = part_of("vocabulary", vocabulary, (rank, ranks))?;
            has_shape("rows of the embedding", weight.len(), rows, hidden)?;
            let ranks = ranks as usize;
            Ok(Part { inputs: hidden, outputs: rows, ranks, activations, weight, bias: None })
        });
        let part = agreed(group, part, |part| {
            vec![
                ("vocabulary", vocabulary as u64),
                ("hidden", hidden as u64),
                ("sequence parallel activations", part.activations.is_sequence_parallel().into()),
            ]
        })?;
        let first = rank as usize * part.outputs;
        Ok(VocabularyParallelEmbedding { vocabulary, first, output: ColumnParallelLinear(part, PhantomData) })
    }
}

impl<E: Float> VocabularyParallelEmbedding<E> {
    /// The same embedding with rows of other elements: `with_rows::<bf16>()`. The weights stay
    /// `f32`, and are rounded where they are looked up.
    pub fn with_rows<F: Float>(self) -> VocabularyParallelEmbedding<F> {
        let VocabularyParallelEmbedding { vocabulary, first, output } = self;
        VocabularyParallelEmbedding { vocabulary, first, output: output.with_rows() }
    }

    /// The tied output layer: its weights are the rows of this embedding, and its outputs are the
    /// logits of this rank's part of the vocabulary, `[T, vocabulary / ranks]`, for
    /// [`VocabularyParallelCrossEntropy`](super::VocabularyParallelCrossEntropy). The gradient of
    /// the rows is that of [`backward`](VocabularyParallelEmbedding::backward) plus that of the
    /// output layer's weights. [`TiedWeights`](super::TiedWeights) adds them if the two are on
    /// different stages of a pipeline.
    pub fn output(&self) -> &ColumnParallelLinear<E> {
        &self.output
    }

    /// Rows of this rank's ids, and zeros for the others: `[T, hidden]`, before the sum over ranks.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for an id outside the vocabulary.
    pub fn lookup(&self, ids: &[u32]) -> Result<Vec<E>, PlanError> {
        let part = &self.output.0;
        let mut rows = vec![E::zeroed(); ids.len() * part.inputs];
        for (row, &id) in rows.chunks_exact_mut(part.inputs).zip(ids) {
            if let Some(own) = self.own(id)? {
                let weight = &part.weight[own * part.inputs..][..part.inputs];
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
        let part = &self.output.0;
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
        let part = &self.output.0;
        let places = has_ranks(group, part.ranks).and_then(|()| {
            let tokens = part.activations.outside(ids.len(), part.ranks)?;
            has_shape("gradients of rows", of_output.len(), tokens, part.inputs)?;
            ids.iter().map(|&id| self.own(id)).collect::<Result<Vec<_>, _>>()
        });
        let places = match places {
            Ok(places) => places,
            Err(error) => return Err(refuse(group, part.activations.gather_call(), error)),
        };
        let of_output = part.activations.gather(group, of_output)?;
        let of_output = E::widened(&of_output);
        let mut weight = vec![0.0; part.weight.len()];
        for (own, of_row) in places.into_iter().zip(of_output.chunks_exact(part.inputs)) {
            let Some(own) = own else { continue };
            let row = &mut weight[own * part.inputs..][..part.inputs];
            row.iter_mut().zip(of_row).for_each(|(sum, of)| *sum += of);
        }
        Ok(weight)
    }

    /// This rank's rows, `[vocabulary / ranks, hidden]`.
    pub fn weight_mut(&mut self) -> &mut [f32] {
        self.output.weight_mut()
    }

    /// The row of an id, if this rank has it.
    fn own(&self, id: u32) -> Result<Option<usize>, PlanError> {
        if id as usize >= self.vocabulary {
            let (parameter, expected) = ("token id", "an id of the vocabulary");
            return Err(PlanError::BadParameter { parameter, seen: id.into(), expected });
        }
        Ok((id as usize).checked_sub(self.first).filter(|row| *row < self.output.0.outputs))
    }
}
