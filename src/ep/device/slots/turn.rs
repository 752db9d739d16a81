//! Order of calls: an exchange has one dispatch in flight, and each of its halves is made once.

use crate::schedule::call::{CallMachine, SlotCall};

/// The next call of an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallState {
    /// A dispatch, or what answers one.
    pub call: SlotCall,
    /// It stands at its half.
    pub pending: Option<CallMachine>,
    /// Tokens of the last dispatch.
    pub tokens: u32,
}

impl CallState {
    /// The calls that are right now.
    pub fn name(&self) -> &'static str {
        match (self.call, self.pending) {
            (SlotCall::Dispatch, None) => "start_dispatch",
            (SlotCall::Dispatch, Some(_)) => "finish_dispatch",
            (_, None) => "start_combine or release",
            (_, Some(_)) => "finish_combine",
        }
    }
}
