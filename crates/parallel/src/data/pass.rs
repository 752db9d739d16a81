//! The collective calls of a pass: all ranks make them in one order, and a rank that fails between
//! two of them refuses the next, so that no rank waits for it.

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallKind, OverlapError, PlanError};

use super::error::DataError;

/// The calls of a pass that are still to come.
pub(super) struct Pass<'g> {
    group: &'g mut Communicator,
    calls: std::vec::IntoIter<CallKind>,
    /// A call failed on all ranks, so none waits for this one.
    failed: bool,
}

impl<'g> Pass<'g> {
    pub fn new(group: &'g mut Communicator, calls: Vec<CallKind>) -> Self {
        Pass { group, calls: calls.into_iter(), failed: false }
    }

    /// Makes the next call.
    pub fn call(&mut self, make: impl FnOnce(&mut Communicator) -> Result<(), Error>) -> Result<(), Error> {
        self.calls.next();
        let made = make(self.group);
        self.failed |= made.is_err();
        made
    }

    /// Whether calls are left.
    pub fn is_unfinished(&self) -> bool {
        self.calls.len() > 0
    }

    /// Refuses the next call, if other ranks wait for this one in it. Returns the error to report.
    pub fn refuse(&mut self, error: DataError) -> DataError {
        if let Some(kind) = self.calls.next()
            && !self.failed
        {
            let refused = self.group.refuse(kind, PlanError::RefusedHere.into());
            if !matches!(refused, Error::Plan(PlanError::RefusedHere)) {
                return refused.into();
            }
        }
        error
    }
}

/// An error of the caller's code or of a graph, as this module reports it.
pub(super) fn reason(said: Option<DataError>, run: OverlapError) -> DataError {
    match (said, run) {
        (Some(error), _) => error,
        (None, OverlapError::Failed { error, .. }) => DataError::Call(*error),
        (None, run) => DataError::Call(run.into()),
    }
}

/// Keeps an error of the caller's code for [`reason`], and ends its node.
pub(super) fn keep<T>(said: &mut Option<DataError>, result: Result<T, DataError>) -> Result<T, Error> {
    result.map_err(|error| {
        *said = Some(error);
        PlanError::RefusedHere.into()
    })
}

/// Turns sums over the ranks into means: a division for each, rounded once.
pub(super) fn mean(sums: &mut [f32], ranks: u32) {
    let ranks = ranks as f32;
    sums.iter_mut().for_each(|sum| *sum /= ranks);
}
