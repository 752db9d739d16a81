//! Where activations lie between blocks, and the operators at the borders of a block.

use std::borrow::Cow;

use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};
use sidelane::{Element, Error};

/// Activations between the blocks of tensor parallel layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// Each rank has all tokens.
    #[default]
    Replicated,
    /// Rank `r` has the `r`-th part of the tokens. Layers between blocks, such as norms and
    /// dropout, then hold and compute no token twice.
    SequenceParallel,
}

impl Activations {
    /// Into a block: rows of all tokens. The gradient of [`reduce`](Activations::reduce).
    ///
    /// # Errors
    /// As [`Communicator::all_gather`].
    pub fn gather<'a, E: Element>(
        self,
        group: &mut Communicator,
        rows: &'a [E],
    ) -> Result<Cow<'a, [E]>, Error> {
        match self {
            Activations::Replicated => Ok(Cow::Borrowed(rows)),
            Activations::SequenceParallel => {
                let mut all = vec![E::zeroed(); rows.len() * group.size() as usize];
                group.all_gather(rows, &mut all)?;
                Ok(Cow::Owned(all))
            }
        }
    }

    /// Out of a block: sums of rows over the ranks, of all tokens or of this rank's. The gradient
    /// of [`gather`](Activations::gather).
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`] and [`Communicator::reduce_scatter`].
    pub fn reduce<E: Element>(self, group: &mut Communicator, mut rows: Vec<E>) -> Result<Vec<E>, Error> {
        match self {
            Activations::Replicated => {
                group.all_reduce(&mut rows)?;
                Ok(rows)
            }
            Activations::SequenceParallel => {
                let mut part = vec![E::zeroed(); rows.len() / group.size() as usize];
                group.reduce_scatter(&rows, &mut part)?;
                Ok(part)
            }
        }
    }

    pub(super) fn is_sequence_parallel(self) -> bool {
        self == Activations::SequenceParallel
    }

    /// The call that [`gather`](Activations::gather) makes, if any.
    pub(super) fn gather_call(self) -> Option<CallKind> {
        self.is_sequence_parallel().then_some(CallKind::AllGather)
    }

    /// The call that [`reduce`](Activations::reduce) makes.
    pub(super) fn reduce_call(self) -> Option<CallKind> {
        Some(match self {
            Activations::Replicated => CallKind::AllReduce,
            Activations::SequenceParallel => CallKind::ReduceScatter,
        })
    }

    /// Tokens of a rank when a block has so many; they must make equal parts.
    pub(super) fn outside(self, tokens: usize, ranks: usize) -> Result<usize, PlanError> {
        match self {
            Activations::Replicated => Ok(tokens),
            Activations::SequenceParallel if tokens.is_multiple_of(ranks) => Ok(tokens / ranks),
            Activations::SequenceParallel => Err(PlanError::BadParameter {
                parameter: "tokens",
                seen: tokens as u64,
                expected: "a multiple of the ranks of the group",
            }),
        }
    }

    /// Tokens of a block when a rank has so many outside.
    pub(super) fn inside(self, tokens: usize, ranks: usize) -> usize {
        match self {
            Activations::Replicated => tokens,
            Activations::SequenceParallel => tokens * ranks,
        }
    }
}

/// Refuses a call for wrong arguments. If the call communicates, the other ranks hear of it.
pub(super) fn refuse(group: &mut Communicator, call: Option<CallKind>, error: PlanError) -> Error {
    match call {
        Some(kind) => group.refuse(kind, error.into()),
        None => error.into(),
    }
}
