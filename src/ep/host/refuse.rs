//! Entering a call to refuse it, for callers that cannot bring what the call needs while the other
//! ranks are in it.

use super::exchange::HostExchange;
use super::flight::Flight;
use super::handle::HostHandle;
use crate::error::{CallKind, Error, PlanError};
use crate::schedule::ReturnParts;

impl HostExchange {
    /// In place of a call of this kind.
    pub fn refuse(&mut self, kind: CallKind, handle: Option<&HostHandle>, error: Error) -> Error {
        // Whatever is missing is of no account beside the error that came first.
        let none = || Error::from(PlanError::RefusedHere);
        let handle = handle.ok_or_else(none);
        let refused = match kind {
            CallKind::Dispatch => self
                .start_dispatch(Err(none()), Err(error.clone()), false)
                .and_then(|started| started.finish().map(drop)),
            CallKind::Prepare => self.prepare(Err(error.clone())).map(drop),
            CallKind::ExpertMap => self.set_expert_map(Err(error.clone())),
            CallKind::CachedDispatch | CallKind::CombineBackward => {
                let along = handle.map_err(|_| error.clone());
                self.cached((kind, 0), Err(error.clone()), along).map(drop)
            }
            CallKind::Combine => self.refuse_return(self.combining(), handle, error.clone()),
            _ => {
                let parts = ReturnParts { rows: true, weights: true };
                self.refuse_return(Flight::returning(kind, parts, false), handle, error.clone())
            }
        };
        // A call that a rank refuses has no other end.
        refused.err().unwrap_or(error)
    }

    fn refuse_return(
        &mut self,
        mut flight: Flight,
        handle: Result<&HostHandle, Error>,
        error: Error,
    ) -> Result<(), Error> {
        flight.refuse(Err(error.clone()));
        self.ret(&mut flight, Err(error), handle, Default::default())
    }
}
