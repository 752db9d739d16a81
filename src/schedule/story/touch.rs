//! What planner and caller touch in the windows between two stages.

use super::effect::bytes;
use super::tell::{Extent, Teller};
use super::{Bytes, Slip, Touch};
use crate::error::CallKind;
use crate::plan::{Layout, Sorted, entries_to};
use crate::schedule::{Control, Parts, Tag, WindowId, chunk_weights_offset};

impl Teller<'_> {
    /// Header and counts, and the weights (those for `to`, or all) of `source`'s publication as `me` finds it.
    pub(super) fn publication(
        &self,
        source: u32,
        me: u32,
        sorted: &Sorted,
        to: Option<u32>,
    ) -> impl Iterator<Item = Bytes> + use<> {
        let (map, control) = (self.script.map, &self.control);
        let entries = to.map_or(sorted.entries() as u32, |to| entries_to(map, sorted, to));
        let (owner, start) = control.published(&self.at(me), source, self.parity(me));
        // A publication holds all weights, a mailbox only those for its owner.
        let first = match to {
            Some(to) if owner == source => sorted.starts[map.slots_of(to).start as usize],
            _ => 0,
        };
        let weights = start + control.weights() + u64::from(first) * 4;
        [(start, control.head_bytes()), (weights, u64::from(entries) * 4)]
            .into_iter()
            .map(move |(start, len)| bytes(owner, WindowId::CONTROL, start, len))
    }

    pub(super) fn tags_read(&self, me: u32) -> Vec<Touch> {
        let ranks = self.script.nodes.ranks();
        let tag = |peer| Control::tag(peer, ranks, self.tag_parity(me));
        self.ranks()
            .filter(|&peer| peer != me)
            .map(|peer| self.read("tag", bytes(me, WindowId::CONTROL, tag(peer), Control::TAG_BYTES)))
            .collect()
    }

    pub(super) fn rows_read(&self, me: u32, layout: &Layout, extent: &Extent, of: usize) -> Touch {
        let len = u64::from(layout.landed) * self.script.row_bytes;
        Touch { of, ..self.read("landed rows", bytes(me, WindowId::POOL, extent.start, len)) }
    }

    pub(super) fn chunk_written(&self, me: u32, layout: &Layout, chunk: &Extent, parts: Parts) -> Vec<Touch> {
        let (rows, row_bytes) = (u64::from(layout.landed), self.script.row_bytes);
        let weights = chunk.start + chunk_weights_offset(layout.landed, row_bytes);
        let all = [(parts.rows, chunk.start, rows * row_bytes), (parts.weights, weights, rows * 4)];
        all.into_iter()
            .filter(|&(wanted, ..)| wanted)
            .map(|(_, start, len)| self.write("chunk", bytes(me, WindowId::POOL, start, len)))
            .collect()
    }

    pub(super) fn read(&self, what: &'static str, bytes: Bytes) -> Touch {
        Touch { what, bytes, write: false, of: self.call }
    }

    pub(super) fn write(&self, what: &'static str, bytes: Bytes) -> Touch {
        Touch { what, bytes, write: true, of: self.call }
    }

    pub(super) fn tag(&self, kind: CallKind, handle: u64, base: u64) -> Tag {
        Tag { kind, handle, base, ..Tag::default() }
    }

    /// Which publication and mailboxes a rank takes in the running call.
    pub(super) fn parity(&self, me: u32) -> u64 {
        let member = &self.members[me as usize];
        match self.script.slip {
            Some(Slip::OnePublication) => 0,
            Some(Slip::CountDispatches) => member.dispatches,
            _ => member.calls.parity(),
        }
    }

    /// Which tags it takes.
    pub(super) fn tag_parity(&self, me: u32) -> u64 {
        if self.script.slip == Some(Slip::OneTag) { 0 } else { self.members[me as usize].calls.parity() }
    }
}
