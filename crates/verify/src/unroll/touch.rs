//! What planners and callers touch in the windows between two stages.

use sidelane_core::error::CallKind;
use sidelane_core::plan::{Block, DispatchLayout, RelayPlan, RowBuffer};
use sidelane_core::schedule::{ControlLayout, Flag, ReturnParts, Tag, WindowId};

use super::state::{Extent, Unroller};
use super::{Bytes, HostAccess, SeededBug};

impl Unroller<'_> {
    pub(super) fn tags_read(
        &self,
        me: u32,
        flag: Flag,
        of: impl IntoIterator<Item = u32>,
    ) -> Vec<HostAccess> {
        let (ranks, parity) = (self.script.nodes.ranks(), self.tag_parity(me));
        let tag = |of| {
            self.read(
                "tag",
                control(me, ControlLayout::tag(of, flag, ranks, parity), ControlLayout::TAG_BYTES),
            )
        };
        of.into_iter().map(tag).collect()
    }

    /// What engines brought here, which is added up then.
    pub(super) fn home_read(&self, me: u32, start: u64, len: u64) -> Vec<HostAccess> {
        vec![self.read("rows at home", Bytes::new(me, WindowId::POOL, start, len))]
    }

    pub(super) fn counts_written(&self, me: u32) -> Vec<HostAccess> {
        vec![self.write("counts", self.publication(me, me))]
    }

    /// Those of these ranks of the node, in their own windows.
    pub(super) fn counts_read(&self, me: u32, of: impl Iterator<Item = u32>) -> Vec<HostAccess> {
        of.map(|owner| self.read("counts", self.publication(owner, me))).collect()
    }

    pub(super) fn messages_written(&self, me: u32, counts: bool) -> Vec<HostAccess> {
        let (paths, parity) = (self.paths(me), self.parity(me, SeededBug::OneMessage));
        let out = |source| self.control.message_out(paths.place_of_told(source), parity);
        let len = self.control.message_len(counts);
        paths.count_receivers().map(|source| self.write("message", control(me, out(source), len))).collect()
    }

    /// Those of all other nodes, with or without their counts.
    pub(super) fn messages_read(&self, me: u32, counts: bool) -> Vec<HostAccess> {
        let (nodes, parity) = (self.script.nodes, self.parity(me, SeededBug::OneMessage));
        let len = self.control.message_len(counts);
        (0..nodes.nodes())
            .filter(|&node| node != nodes.node_of(me))
            .map(|node| self.read("message", control(me, self.control.message_in(node, parity), len)))
            .collect()
    }

    pub(super) fn headers_written(&self, me: u32, layout: &DispatchLayout) -> Vec<HostAccess> {
        let parity = self.parity(me, SeededBug::OneHeader);
        let header = |(nth, block): (u32, &Block)| {
            let len = self.control.header_len(block.entries());
            self.write("header", control(me, self.control.header_out(nth, parity), len))
        };
        (0..).zip(&layout.blocks).map(header).collect()
    }

    pub(super) fn headers_read(&self, me: u32, forward: &RelayPlan) -> Vec<HostAccess> {
        let (paths, parity) = (self.paths(me), self.parity(me, SeededBug::OneHeader));
        let header = |(source, block): (u32, &Block)| {
            let at = self.control.header_in(paths.of(source).place_at(me), parity);
            self.read("header", control(me, at, self.control.header_len(block.entries())))
        };
        paths.sources().zip(&forward.blocks).map(header).collect()
    }

    /// Rows that landed in a call.
    pub(super) fn landed_read(
        &self,
        me: u32,
        layout: &DispatchLayout,
        extent: &Extent,
        of: usize,
    ) -> HostAccess {
        let bytes_of_rows = u64::from(layout.landed) * self.sizing.row_bytes;
        let rows = Bytes::new(me, WindowId::POOL, extent.start, bytes_of_rows);
        HostAccess { of, ..self.read("landed rows", rows) }
    }

    /// Metadata of the rows that landed along the layout of a handle, in a call.
    pub(super) fn notes_read(
        &self,
        me: u32,
        layout: &DispatchLayout,
        extent: &Extent,
        (handle, of): (usize, usize),
    ) -> HostAccess {
        let at = self.rows_setting(me, 0, handle).notes_at(me, extent.start, layout.landed);
        let notes = Bytes::new(me, WindowId::POOL, at, self.sizing.landing(layout.landed).notes * 4);
        HostAccess { of, ..self.read("landed notes", notes) }
    }

    pub(super) fn chunk_written(
        &self,
        me: u32,
        layout: &DispatchLayout,
        extent: &Extent,
        parts: ReturnParts,
    ) -> Vec<HostAccess> {
        let pieces = chunk(me, self.sizing.offer(layout.landed), extent);
        let wanted = [parts.rows, parts.weights].into_iter().zip(pieces);
        wanted.filter(|(wanted, _)| *wanted).map(|(_, bytes)| self.write("chunk", bytes)).collect()
    }

    /// The publication of `owner`, where `me` looks for it.
    fn publication(&self, owner: u32, me: u32) -> Bytes {
        let parity = self.parity(me, SeededBug::OnePublication);
        control(owner, self.control.publication(parity), u64::from(self.control.words()) * 4)
    }

    pub(super) fn read(&self, what: &'static str, bytes: Bytes) -> HostAccess {
        HostAccess { what, bytes, write: false, of: self.call }
    }

    pub(super) fn write(&self, what: &'static str, bytes: Bytes) -> HostAccess {
        HostAccess { what, bytes, write: true, of: self.call }
    }

    pub(super) fn tag(&self, kind: CallKind, handle: u64, base: u64) -> Tag {
        Tag { kind, handle, base, ..Tag::default() }
    }

    /// Which of two places a rank takes in the running call; `one` is the seeded bug of a rank with
    /// one place.
    pub(super) fn parity(&self, me: u32, one: SeededBug) -> u64 {
        let member = &self.members[me as usize];
        match self.script.slip {
            Some(slip) if slip == one => 0,
            Some(SeededBug::CountDispatches) if one == SeededBug::OnePublication => member.dispatches,
            _ => member.calls.parity(),
        }
    }

    /// Which tags it takes.
    pub(super) fn tag_parity(&self, me: u32) -> u64 {
        if self.script.slip == Some(SeededBug::OneTag) { 0 } else { self.members[me as usize].calls.parity() }
    }
}

fn control(owner: u32, start: u64, len: u64) -> Bytes {
    Bytes::new(owner, WindowId::CONTROL, start, len)
}

/// The rows of an extent, and what lies behind them.
pub(super) fn chunk(me: u32, chunk: RowBuffer, extent: &Extent) -> [Bytes; 2] {
    let (rows, behind) = (u64::from(chunk.rows) * chunk.row_bytes, extent.start + chunk.notes_at());
    [
        Bytes::new(me, WindowId::POOL, extent.start, rows),
        Bytes::new(me, WindowId::POOL, behind, chunk.notes * 4),
    ]
}
