//! Which call follows which.

use sidelane_core::error::PlanError;
use sidelane_core::schedule::Flag;
use sidelane_core::schedule::call::SlotCall;

use super::{StreamBug, StreamCall, StreamScenario};
use crate::unroll::state::bad;

/// Which call follows which.
#[derive(Debug)]
pub struct Turns {
    /// Number of microbatches.
    pub sets: u32,
    /// Per call: its windows and flags, and its words.
    pub words: Vec<(u32, Flag)>,
    /// Per call: its kind, which decides whose request flag it sets.
    calls: Vec<SlotCall>,
    /// Per call: the dispatch whose slots it uses; itself, if it is one.
    pub slots_of: Vec<usize>,
}

impl Turns {
    pub fn of(script: &StreamScenario) -> Result<Self, PlanError> {
        let sets = script.calls.iter().map(|call| call.microbatch() + 1).max().unwrap_or(1);
        let mut turns = Turns { sets, words: Vec::new(), calls: Vec::new(), slots_of: Vec::new() };
        let mut dispatched: Vec<Option<usize>> = vec![None; sets as usize];
        for (number, call) in script.calls.iter().enumerate() {
            let of = call.microbatch();
            let open = &mut dispatched[of as usize];
            let slots_of = match (call, *open) {
                (StreamCall::Dispatch(_), Some(_)) if script.slip != Some(StreamBug::Unreleased) => None,
                (StreamCall::Dispatch(_), _) => Some(number),
                (_, open) => open,
            };
            let expected = "dispatch and combine (or release) of each microbatch in turn";
            turns.slots_of.push(slots_of.ok_or(bad("call", number, expected))?);
            *open = slots_of.filter(|&dispatch| dispatch == number);
            let set = if script.slip == Some(StreamBug::Share) { 0 } else { of };
            turns.words.push((set, call.call().flag()));
            turns.calls.push(call.call());
        }
        Ok(turns)
    }

    /// The call before (or after) this one that has the same words.
    fn next<'t>(
        &'t self,
        call: usize,
        flag: Flag,
        mut others: impl Iterator<Item = usize> + 't,
    ) -> Option<usize> {
        others.find(|&other| self.words[other] == (self.words[call].0, flag))
    }

    pub fn before(&self, call: usize, flag: Flag) -> Option<usize> {
        self.next(call, flag, (0..call).rev())
    }

    /// The previous call that sets the same request flag.
    pub fn rung(&self, call: usize) -> Option<usize> {
        let same = |other: &usize| (self.words[*other].0, self.calls[*other]);
        (0..call).rev().find(|other| same(other) == same(&call))
    }

    pub fn after(&self, call: usize, flag: Flag) -> Option<usize> {
        self.next(call, flag, call + 1..self.words.len())
    }
}
