//! Entering a call to refuse it: for callers above this room that cannot bring what a call needs, while the other ranks are in
//! it. All get an error, nothing moves, and the next call works.

use super::flight::{Flight, Lent};
use super::{ExpertParallel, Handle};
use crate::error::{CallKind, Error, PlanError};
use crate::exec::Until;
use crate::gate::Routing;
use crate::schedule::Parts;

impl ExpertParallel {
    /// In place of a dispatch.
    pub(crate) fn refuse_dispatch(&mut self, error: Error) -> Error {
        let top_k = self.top_k();
        let refused = Routing::new(top_k, Vec::new(), Vec::new()).map_err(Error::from).and_then(|nothing| {
            let mut flight = self.placing(CallKind::Dispatch, Err(error), false);
            self.start_placing(&mut flight, &nothing)?;
            self.finish_placing(&mut flight, (&[], &nothing))
        });
        reason(refused)
    }

    /// In place of a combine.
    pub(crate) fn refuse_combine(&mut self, handle: &Handle, error: Error) -> Error {
        self.refuse_return(self.combining(), handle, error)
    }

    /// In place of the gradient of a dispatch, with those of row weights.
    pub(crate) fn refuse_dispatch_backward(&mut self, handle: &Handle, error: Error) -> Error {
        let parts = Parts { rows: true, weights: true };
        self.refuse_return(Flight::returning(CallKind::DispatchBackward, parts, false), handle, error)
    }

    /// In place of the gradient of a combine that is not weighted.
    pub(crate) fn refuse_combine_backward(&mut self, handle: &Handle, error: Error) -> Error {
        reason(self.cached::<u8>(CallKind::CombineBackward, 0, Err(error), &[], handle))
    }

    fn refuse_return(&mut self, mut flight: Flight, handle: &Handle, error: Error) -> Error {
        flight.refuse(Err(error));
        let lent = Lent { handle: Some(handle), ..Lent::default() };
        reason(self.enter(&mut flight, lent, Until::End))
    }
}

/// A call that a rank refuses has no other end.
fn reason<T>(refused: Result<T, Error>) -> Error {
    refused.err().unwrap_or_else(|| PlanError::RefusedHere.into())
}
