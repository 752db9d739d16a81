//! Layouts before rows: what a routing asks for, known to all ranks while the tokens may not be there yet.
//!
//! ```text
//!   dispatch    counts | placement | weights and ids, rows        =  prepare, then a cached dispatch
//!   prepare     counts | placement | weights and ids
//! ```
//!
//! It is a dispatch whose rows have no bytes: the same programs, judgements and refusals, whose slots for rows stay empty.

use super::{ExpertParallel, Handle};
use crate::error::{CallKind, Error};
use crate::gate::Routing;

impl ExpertParallel {
    /// The layout of a dispatch, and what goes with its rows; no row moves. Collective.
    ///
    /// Rows follow by [`ExpertParallel::dispatch_cached`], as often as there are tokens for this routing, `[tokens, top_k]`: the
    /// same rows as by [`ExpertParallel::dispatch`], and with the same bits. Meanwhile the handle says how many rows each expert
    /// gets, with which weights; its report says what moved beside them. Memory for rows is taken by the calls that bring them, which
    /// may find that there is none.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`].
    pub fn prepare(&mut self, routing: &Routing<'_>) -> Result<Handle, Error> {
        let checked = self.check_routing(routing);
        let mut flight = self.placing(CallKind::Prepare, checked, false);
        self.start_placing(&mut flight, routing)?;
        self.finish_placing(&mut flight, (&[], routing))?;
        Ok(self.handle_of(flight.made))
    }
}
