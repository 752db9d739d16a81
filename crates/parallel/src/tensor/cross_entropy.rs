//! Cross-entropy of logits that are cut by vocabulary. No rank ever has all logits of a token.
//!
//! ```text
//!   loss = log(sum of e^(logit - largest)) - (logit of the target - largest)
//!
//!   largest                             all-gather of one value a token, and the largest of them
//!   logit of the target, sum of e^..    one all-reduce of two values a token
//! ```
//!
//! Megatron takes three all-reduces, one of them of maxima. Sidelane's communicator sums only, and
//! one call for both sums saves a meeting. A gather of the logits would move `vocabulary` values a
//! token.
//!
//! Logits may be bf16. What ranks exchange is `f32` for them, too, and so are losses and the tape.

use std::marker::PhantomData;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};

use super::activations::refuse;
use crate::check::{at_least_one, has_shape, part_of};
use crate::float::Float;

/// Cross-entropy of logits of which each rank has a part of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularyParallelCrossEntropy {
    /// Size of the whole vocabulary.
    pub vocabulary: usize,
    /// Target of tokens without a loss. The -100 of torch is `-100i32 as u32`.
    pub ignore: Option<u32>,
}

/// What a backward pass needs of a forward pass.
#[derive(Clone, Debug)]
pub struct CrossEntropyTape<E = f32> {
    /// Softmax of this rank's logits.
    softmax: Vec<f32>,
    columns: usize,
    targets: Vec<Target>,
    elements: PhantomData<E>,
}

/// Target of a token, as a rank sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Ignored,
    /// Another rank has its logit.
    Elsewhere,
    /// This rank has it, in this column.
    Own(usize),
}

impl VocabularyParallelCrossEntropy {
    /// Loss of each token, `[T]`, the same on all ranks: 0 where it is ignored. `logits` is
    /// `[T, vocabulary / ranks]`, `targets` is `[T]`, the same on all ranks. Collective.
    ///
    /// A mean is the caller's: over the tokens that are not ignored, of all data parallel ranks.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] for logits of another length, [`PlanError::BadParameter`] for a
    /// target outside the vocabulary, or a vocabulary that does not make equal parts; as
    /// [`Communicator::all_gather`] and [`Communicator::all_reduce`].
    pub fn forward<E: Float>(
        &self,
        group: &mut Communicator,
        logits: &[E],
        targets: &[u32],
    ) -> Result<(Vec<f32>, CrossEntropyTape<E>), Error> {
        let (columns, targets) = match self.check(group, logits.len(), targets) {
            Ok(checked) => checked,
            Err(error) => return Err(refuse(group, Some(CallKind::AllGather), error)),
        };
        let tokens = targets.len();
        let mut softmax = E::widened(logits).into_owned();
        let largest = self.largest(group, &softmax, columns)?;
        // Logits of targets, and behind them the sums.
        let mut sums = vec![0.0; 2 * tokens];
        for (token, row) in softmax.chunks_exact_mut(columns).enumerate() {
            row.iter_mut().for_each(|logit| *logit -= largest[token]);
            if let Target::Own(column) = targets[token] {
                sums[token] = row[column];
            }
            row.iter_mut().for_each(|logit| *logit = libm::expf(*logit));
            sums[tokens + token] = row.iter().sum();
        }
        group.all_reduce(&mut sums)?;

        let (of_targets, sums) = sums.split_at(tokens);
        for (row, sum) in softmax.chunks_exact_mut(columns).zip(sums) {
            row.iter_mut().for_each(|value| *value /= sum);
        }
        let losses = targets.iter().zip(of_targets.iter().zip(sums)).map(|(target, (of_target, sum))| {
            if *target == Target::Ignored { 0.0 } else { libm::logf(*sum) - of_target }
        });
        let elements = PhantomData;
        Ok((losses.collect(), CrossEntropyTape { softmax, columns, targets, elements }))
    }

    /// Gradient of this rank's logits, `[T, vocabulary / ranks]`, from that of the losses, `[T]`:
    /// rounded once if logits are bf16. Ranks need not talk.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] if there is not one value for each token.
    pub fn backward<E: Float>(
        &self,
        tape: CrossEntropyTape<E>,
        of_losses: &[f32],
    ) -> Result<Vec<E>, PlanError> {
        let CrossEntropyTape { softmax: mut gradient, columns, targets, .. } = tape;
        has_shape("gradients of losses", of_losses.len(), targets.len(), 1)?;
        let rows = gradient.chunks_exact_mut(columns);
        for (row, (target, of_loss)) in rows.zip(targets.into_iter().zip(of_losses)) {
            match target {
                // Not 0 times a gradient, which may be that of a mean over no token.
                Target::Ignored => {
                    row.fill(0.0);
                    continue;
                }
                Target::Elsewhere => {}
                Target::Own(column) => row[column] -= 1.0,
            }
            row.iter_mut().for_each(|value| *value *= of_loss);
        }
        Ok(E::rounded(gradient))
    }

    /// Logits of a token on this rank, and where targets are.
    fn check(
        &self,
        group: &Communicator,
        logits: usize,
        targets: &[u32],
    ) -> Result<(usize, Vec<Target>), PlanError> {
        at_least_one("vocabulary", self.vocabulary)?;
        let columns = part_of("vocabulary", self.vocabulary, (group.rank(), group.size()))?;
        has_shape("logits", logits, targets.len(), columns)?;
        let first = group.rank() as usize * columns;
        let target = |&target: &u32| {
            if Some(target) == self.ignore {
                return Ok(Target::Ignored);
            }
            if target as usize >= self.vocabulary {
                let (parameter, expected) = ("target", "an id of the vocabulary, or the one to ignore");
                return Err(PlanError::BadParameter { parameter, seen: target.into(), expected });
            }
            let own = (target as usize).checked_sub(first).filter(|column| *column < columns);
            Ok(own.map_or(Target::Elsewhere, Target::Own))
        };
        Ok((columns, targets.iter().map(target).collect::<Result<_, _>>()?))
    }

    /// The largest logit of each token, over all ranks.
    fn largest(&self, group: &mut Communicator, logits: &[f32], columns: usize) -> Result<Vec<f32>, Error> {
        let rows = logits.chunks_exact(columns);
        let own: Vec<f32> = rows.map(|row| row.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
        let mut all = vec![0.0; own.len() * group.size() as usize];
        group.all_gather(&own, &mut all)?;
        let mut largest = own;
        for (at, &value) in all.iter().enumerate() {
            let token = at % largest.len();
            largest[token] = largest[token].max(value);
        }
        Ok(largest)
    }
}
