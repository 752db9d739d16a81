//! The collective calls of a pass: all ranks make them in one order, and a rank that fails between
//! two of them refuses the next, so that no rank waits for it.

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallKind, OverlapError, PlanError};

/// The calls of a pass that are still to come.
pub(crate) struct Calls<'g> {
    group: &'g mut Communicator,
    left: std::vec::IntoIter<CallKind>,
    /// A call failed on all ranks, so none waits for this one.
    failed: bool,
}

impl<'g> Calls<'g> {
    pub fn new(group: &'g mut Communicator, calls: Vec<CallKind>) -> Self {
        Calls { group, left: calls.into_iter(), failed: false }
    }

    /// Makes the next call.
    pub fn call(&mut self, make: impl FnOnce(&mut Communicator) -> Result<(), Error>) -> Result<(), Error> {
        self.left.next();
        let made = make(self.group);
        self.failed |= made.is_err();
        made
    }

    /// Refuses the next call, if other ranks wait for this one in it. Returns the error to report.
    pub fn refuse<E: From<Error>>(&mut self, error: E) -> E {
        if let Some(kind) = self.left.next()
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

/// The error of a node, or that of the run.
pub(crate) fn reason(run: OverlapError) -> Error {
    match run {
        OverlapError::Failed { error, .. } => *error,
        run => run.into(),
    }
}
