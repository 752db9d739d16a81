//! Entering a call to refuse it: for callers above this room that cannot bring what a call needs, while the other ranks are in
//! it. All get an error, nothing moves, and the next call works.

use super::combine::Return;
use super::{Contribution, ExpertParallel, Handle};
use crate::error::{CallKind, Error, PlanError};
use crate::gate::Routing;
use crate::schedule::Parts;

impl ExpertParallel {
    /// In place of a dispatch.
    pub(crate) fn refuse_dispatch(&mut self, error: Error) -> Error {
        let top_k = self.top_k();
        let refused = Routing::new(top_k, Vec::new(), Vec::new()).map_err(Error::from).and_then(|nothing| {
            let opened = self.begin(CallKind::Dispatch, Err(error), &nothing, false)?;
            self.receive(opened, &[], top_k, &[])
        });
        reason(refused)
    }

    /// In place of a combine.
    pub(crate) fn refuse_combine(&mut self, handle: &Handle, error: Error) -> Error {
        self.refuse_return(self.combine_call(), handle, error)
    }

    /// In place of the gradient of a dispatch, with those of row weights.
    pub(crate) fn refuse_dispatch_backward(&mut self, handle: &Handle, error: Error) -> Error {
        let parts = Parts { rows: true, weights: true };
        let call = Return { kind: CallKind::DispatchBackward, parts, weighted: false, keep: false };
        self.refuse_return(call, handle, error)
    }

    /// In place of the gradient of a combine that is not weighted.
    pub(crate) fn refuse_combine_backward(&mut self, handle: &Handle, error: Error) -> Error {
        reason(self.cached::<u8>(CallKind::CombineBackward, 0, Err(error), &[], handle))
    }

    fn refuse_return(&mut self, call: Return, handle: &Handle, error: Error) -> Error {
        let nothing = Contribution::Elsewhere { bytes: &[], dtype: self.spec().dtype };
        let started = self.start_return(call, nothing, None, handle, Err(error), false);
        reason(started.and_then(|started| self.finish_return(started, handle, None)))
    }
}

/// A call that a rank refuses has no other end.
fn reason<T>(refused: Result<T, Error>) -> Error {
    refused.err().unwrap_or_else(|| PlanError::RefusedHere.into())
}
