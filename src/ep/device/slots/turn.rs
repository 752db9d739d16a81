//! Order of calls: an exchange has one dispatch in flight, and each of its halves is made once.

use crate::schedule::call::SlotCall;

/// The next call of an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallState {
    /// A dispatch, or what answers one.
    pub call: SlotCall,
    /// It stands at its half.
    pub pending: bool,
    /// Dispatches so far.
    pub dispatches: u64,
    /// Tokens of the last one.
    pub tokens: u32,
}

impl CallState {
    /// The calls that are right now.
    pub fn name(&self) -> &'static str {
        match (self.call, self.pending) {
            (SlotCall::Dispatch, false) => "start_dispatch",
            (SlotCall::Dispatch, true) => "finish_dispatch",
            (_, false) => "start_combine or release",
            (_, true) => "finish_combine",
        }
    }
}
