//! What kernels read and write.

use std::iter;

use sidelane_core::schedule::Flag;
use sidelane_core::schedule::call::{SlotCall, Work};
use sidelane_core::schedule::stream::Slots;

use super::{StreamBug, Teller};
use crate::unroll::Bytes;
use crate::unroll::HostAccess;

impl Teller<'_> {
    /// What experts have read before a call that answers a dispatch. No program runs them.
    pub fn experts(&self, call: usize, me: u32) -> Vec<HostAccess> {
        match self.script.calls[call].call() {
            SlotCall::Dispatch => Vec::new(),
            SlotCall::Combine | SlotCall::Release => self.landed(call, me),
        }
    }

    /// Reads and writes of a step of a call. A check reads no bytes but those that experts read
    /// behind it.
    pub fn touches(&self, work: Work, call: usize, me: u32) -> Vec<HostAccess> {
        let (slots, slip) = (self.script.slots, self.script.slip);
        match work {
            Work::Pack => {
                let packed =
                    slip == Some(StreamBug::PackAhead) && self.turns.before(call, Flag::Landed).is_some();
                let send = if packed { Vec::new() } else { self.pack(call, me) };
                let own = self.touch("own rows", true, call, (me, slots.receive(me)), self.slot());
                send.into_iter().chain([own]).collect()
            }
            Work::Partials => {
                let at = |of| (me, slots.partial(of));
                let partial = |of| self.touch("partial rows", true, call, at(of), slots.home_bytes());
                (0..slots.ranks()).map(partial).collect()
            }
            Work::Sum if slip != Some(StreamBug::SumLate) => self.sum(call, me),
            _ => Vec::new(),
        }
    }

    /// Accesses that a seeded bug adds to kernels at the end of a call.
    pub fn slipped(&self, call: usize, me: u32) -> Vec<HostAccess> {
        match (self.script.slip, self.script.calls[call].call()) {
            (Some(StreamBug::SumLate), SlotCall::Dispatch) => {
                let before = self.turns.before(call, Flag::Returned);
                let combine = before.filter(|&c| self.script.calls[c].call() == SlotCall::Combine);
                combine.map_or_else(Vec::new, |combine| self.sum(combine, me))
            }
            (Some(StreamBug::PackAhead), SlotCall::Dispatch) => {
                let next = self.turns.after(call, Flag::Landed);
                next.map_or_else(Vec::new, |next| self.pack(next, me))
            }
            (Some(StreamBug::KeepSlots), SlotCall::Combine | SlotCall::Release) => self.landed(call, me),
            _ => Vec::new(),
        }
    }

    /// Rows for every peer are packed.
    fn pack(&self, call: usize, me: u32) -> Vec<HostAccess> {
        let slot = |to| self.touch("slot", true, call, (me, self.script.slots.send(to)), self.slot());
        self.peers(me).map(slot).collect()
    }

    /// What has landed is read, own rows included.
    fn landed(&self, call: usize, me: u32) -> Vec<HostAccess> {
        let (slots, dispatch) = (self.script.slots, self.turns.slots_of[call]);
        let slot = |of| self.touch("landed rows", false, dispatch, (me, slots.receive(of)), self.slot());
        (0..slots.ranks()).map(slot).collect()
    }

    /// Sums the returned rows with the partial rows of this rank itself.
    fn sum(&self, call: usize, me: u32) -> Vec<HostAccess> {
        let (slots, bytes) = (self.script.slots, self.script.slots.home_bytes());
        let read = |what, at| self.touch(what, false, call, (me, at), bytes);
        let home = self.peers(me).map(|peer| read("rows that came home", slots.home(peer)));
        iter::once(read("own partial rows", slots.partial(me))).chain(home).collect()
    }

    fn touch(
        &self,
        what: &'static str,
        write: bool,
        of: usize,
        (me, at): (u32, u64),
        len: u64,
    ) -> HostAccess {
        let first = u64::from(self.turns.words[of].0) * self.script.slots.bytes();
        HostAccess { what, bytes: Bytes::new(me, Slots::WINDOW, first + at, len), write, of }
    }

    fn slot(&self) -> u64 {
        self.script.slots.slot_bytes()
    }

    fn peers(&self, me: u32) -> impl Iterator<Item = u32> + use<> {
        (0..self.script.slots.ranks()).filter(move |&peer| peer != me)
    }
}
