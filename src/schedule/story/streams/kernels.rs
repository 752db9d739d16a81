//! What the caller's kernels read and write.

use std::iter;

use super::{StreamCall, StreamSlip, Teller};
use crate::schedule::Flag;
use crate::schedule::story::Touch;
use crate::schedule::story::effect::bytes;
use crate::schedule::stream::Slots;

impl Teller<'_> {
    /// What kernels do before the stage.
    pub fn before(&self, call: usize, me: u32) -> Vec<Touch> {
        match self.script.calls[call] {
            StreamCall::Dispatch(_) => {
                let packed = self.script.slip == Some(StreamSlip::PackAhead)
                    && self.turns.before(call, Flag::Landed).is_some();
                let send = if packed { Vec::new() } else { self.pack(call, me) };
                let own =
                    self.touch("own rows", true, call, (me, self.script.slots.receive(me)), self.slot());
                send.into_iter().chain([own]).collect()
            }
            StreamCall::Combine(_) => {
                let (slots, bytes) = (self.script.slots, self.script.slots.home_bytes());
                let partial = |of| self.touch("partial rows", true, call, (me, slots.partial(of)), bytes);
                self.landed(call, me).into_iter().chain((0..slots.ranks()).map(partial)).collect()
            }
            StreamCall::Release(_) => self.landed(call, me),
        }
    }

    /// What they do behind it.
    pub fn after(&self, call: usize, me: u32) -> Vec<Touch> {
        let late = self.script.slip == Some(StreamSlip::SumLate);
        let mut touches = Vec::new();
        match self.script.calls[call] {
            StreamCall::Dispatch(_) if late => {
                let combine = self.turns.before(call, Flag::Home);
                let combine = combine.filter(|&c| matches!(self.script.calls[c], StreamCall::Combine(_)));
                touches.extend(combine.into_iter().flat_map(|combine| self.sum(combine, me)));
            }
            StreamCall::Combine(_) if !late => touches = self.sum(call, me),
            _ => {}
        }
        match (self.script.slip, self.script.calls[call].flag()) {
            (Some(StreamSlip::PackAhead), Flag::Landed) => {
                let next = self.turns.after(call, Flag::Landed);
                touches.extend(next.into_iter().flat_map(|next| self.pack(next, me)));
            }
            (Some(StreamSlip::KeepSlots), Flag::Home) => touches.extend(self.landed(call, me)),
            _ => {}
        }
        touches
    }

    /// Rows for every peer are packed.
    fn pack(&self, call: usize, me: u32) -> Vec<Touch> {
        let slot = |to| self.touch("slot", true, call, (me, self.script.slots.send(to)), self.slot());
        self.peers(me).map(slot).collect()
    }

    /// What has landed is read, own rows included.
    fn landed(&self, call: usize, me: u32) -> Vec<Touch> {
        let (slots, dispatch) = (self.script.slots, self.turns.slots_of[call]);
        let slot = |of| self.touch("landed rows", false, dispatch, (me, slots.receive(of)), self.slot());
        (0..slots.ranks()).map(slot).collect()
    }

    /// What came home is summed, with the partial rows of this rank itself.
    fn sum(&self, call: usize, me: u32) -> Vec<Touch> {
        let (slots, bytes) = (self.script.slots, self.script.slots.home_bytes());
        let read = |what, at| self.touch(what, false, call, (me, at), bytes);
        let home = self.peers(me).map(|peer| read("rows that came home", slots.home(peer)));
        iter::once(read("own partial rows", slots.partial(me))).chain(home).collect()
    }

    fn touch(&self, what: &'static str, write: bool, of: usize, (me, at): (u32, u64), len: u64) -> Touch {
        let first = u64::from(self.turns.words[of].0) * self.script.slots.bytes();
        Touch { what, bytes: bytes(me, Slots::WINDOW, first + at, len), write, of }
    }

    fn slot(&self) -> u64 {
        self.script.slots.slot_bytes()
    }

    fn peers(&self, me: u32) -> impl Iterator<Item = u32> + use<> {
        (0..self.script.slots.ranks()).filter(move |&peer| peer != me)
    }
}
