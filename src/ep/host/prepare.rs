//! Layouts before rows: what a routing asks for, known to all ranks while the tokens may not be
//! there yet.
//!
//! ```text
//!   dispatch    counts | placement | weights and ids, rows        =  prepare, then a cached dispatch
//!   prepare     counts | placement | weights and ids
//! ```
//!
//! It is a dispatch whose rows have no bytes: the same programs, judgements and refusals, whose
//! slots for rows stay empty.

use super::exchange::HostExchange;
use super::handle::HostHandle;
use crate::error::{CallKind, Error};
use crate::gate::Routing;

impl HostExchange {
    /// The layout of a dispatch, and what goes with its rows.
    pub fn prepare(&mut self, routing: Result<&Routing<'_>, Error>) -> Result<HostHandle, Error> {
        let (routing, checked) = routing.map_or_else(|error| (None, Err(error)), |one| (Some(one), Ok(())));
        let checked = checked.and_then(|()| routing.map_or(Ok(()), |one| self.check_routing(one)));
        let mut flight = self.placing(CallKind::Prepare, checked, false);
        let machine = self.start_placing(&mut flight, routing)?;
        self.finish_placing(machine, &mut flight, (&[], routing))?;
        Ok(self.handle_of(flight.made))
    }
}
