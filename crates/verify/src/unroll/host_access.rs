//! Accesses of planners, callers and kernels to the windows between two stages.
//!
//! No executor runs them, so a proof needs them by name: each function gives the bytes that one
//! step of a call reads or writes.
//!
//! ```text
//!   control window   tags, counts, messages, headers        by planners
//!   pool             landed rows, metadata, offered chunks  by callers and kernels
//!   host staging     index and metadata of arrivals         by hosts whose engines relay
//!   tables           where rows are, their order, own runs  by hosts that enqueue, streams that copy, kernels
//! ```

use sidelane_core::error::CallKind;
use sidelane_core::plan::{Block, DispatchLayout, RelayPlan, RowBuffer, RowRun, Segment, first_of};
use sidelane_core::schedule::{ControlLayout, Flag, ReturnParts, Tag, WindowId};

use super::call_sequence::{Extent, RowPlaces, Table, Unroller};
use super::stage_runs::SentTable;
use super::{Bytes, HostAccess, SeededBug};

impl Unroller<'_> {
    pub(super) fn tags_read(
        &self,
        me: u32,
        flag: Flag,
        of: impl IntoIterator<Item = u32>,
    ) -> Vec<HostAccess> {
        let (ranks, parity) = (self.scenario.nodes.ranks(), self.tag_parity(me));
        let tag = |of| {
            self.read(
                "tag",
                control(me, ControlLayout::tag(of, flag, ranks, parity), ControlLayout::TAG_BYTES),
            )
        };
        of.into_iter().map(tag).collect()
    }

    /// Rows that a kernel adds up: those that engines brought to `staging`, in the order in which
    /// they left, and between these own rows, where this rank offers them.
    pub(super) fn summed(
        &self,
        me: u32,
        layout: &DispatchLayout,
        ((staging, offered), count): ((u64, u64), u32),
        row_bytes: u64,
    ) -> Vec<HostAccess> {
        let rows = |what, at: u64, first: u32, count: u32| {
            let (first, len) = (u64::from(first) * row_bytes, u64::from(count) * row_bytes);
            self.read(what, Bytes::new(me, WindowId::POOL, at + first, len))
        };
        let runs = layout.runs_to(me);
        let own = layout.runs[runs.start as usize..runs.end as usize].iter().filter(|run| run.count > 0);
        let mut own: Vec<&RowRun> = own.collect();
        own.sort_unstable_by_key(|run| run.first);
        let (mut reads, mut next) = (Vec::new(), 0);
        for run in own {
            reads.push(rows("returned rows", staging, next, run.first - next));
            reads.push(rows("own outputs", offered, run.to_row, run.count));
            next = run.first + run.count;
        }
        reads.push(rows("returned rows", staging, next, count - next));
        reads.retain(|read| !read.bytes.range.is_empty());
        reads
    }

    /// The same where relays sum: rows of this node, and the sums of each relay.
    pub(super) fn node_sums_added(
        &self,
        me: u32,
        layout: &DispatchLayout,
        places: (u64, u64),
        row_bytes: u64,
    ) -> Vec<HostAccess> {
        let paths = self.paths(me);
        let near = paths
            .relays()
            .next()
            .map_or(layout.terms.len() as u32, |relay| layout.returned_at(&paths, relay, false));
        let mut reads = self.summed(me, layout, (places, near), row_bytes);
        reads.extend(paths.relays().zip(&layout.blocks).map(|(relay, block)| {
            let first = u64::from(layout.returned_at(&paths, relay, false)) * row_bytes;
            let len = u64::from(block.rows) * row_bytes;
            self.read("returned sums", Bytes::new(me, WindowId::POOL, places.0 + first, len))
        }));
        reads.retain(|read| !read.bytes.range.is_empty());
        reads
    }

    /// The same of sums by rank: those that engines brought to `staging`, and own ones where they
    /// lie.
    pub(super) fn rank_sums_added(
        &self,
        me: u32,
        layout: &DispatchLayout,
        (staging, offered): (u64, u64),
        row_bytes: u64,
    ) -> Vec<HostAccess> {
        let added = |(rank, run): (u32, &RowRun)| {
            let (what, at, first) = match rank == me {
                true => ("own sums", offered, run.to_row),
                false => ("returned sums", staging, run.first),
            };
            let (first, len) = (u64::from(first) * row_bytes, u64::from(run.count) * row_bytes);
            self.read(what, Bytes::new(me, WindowId::POOL, at + first, len))
        };
        let runs = (0..).zip(&layout.rank_sums).filter(|(_, run)| run.count > 0);
        runs.map(added).collect()
    }

    /// A kernel sums each token's rows of a chunk.
    pub(super) fn summed_by_rank(
        &self,
        me: u32,
        layout: &DispatchLayout,
        extent: &Extent,
        sums: &Extent,
    ) -> Vec<HostAccess> {
        let [rows, _] = chunk(me, self.sizing.offer(layout.landed), extent);
        let len = u64::from(layout.received()) * self.sizing.return_bytes;
        let sums = Bytes::new(me, WindowId::POOL, sums.start, len);
        vec![self.read("outputs", rows), self.write("sums by rank", sums)]
    }

    /// A host writes a table of a handle, and a stream brings it to the device.
    pub(super) fn table_sent(&self, me: u32, table: Table, handle: usize) -> SentTable {
        self.table_sent_to(me, table, self.table(me, table, Some(handle)))
    }

    /// The same to a place of its own.
    pub(super) fn table_sent_to(&self, me: u32, table: Table, to: Bytes) -> SentTable {
        SentTable {
            written: self.host_table_written(me, table),
            copied: vec![self.host_table_read(me, table), self.write(table.name(), to)],
        }
    }

    /// A kernel writes a table of a handle.
    pub(super) fn table_written(&self, me: u32, table: Table, handle: usize) -> HostAccess {
        self.write(table.name(), self.table(me, table, Some(handle)))
    }

    /// A kernel reads a table of a handle, which call `of` has made.
    pub(super) fn table_read(&self, me: u32, table: Table, (handle, of): (usize, usize)) -> HostAccess {
        HostAccess { of, ..self.read(table.name(), self.table(me, table, Some(handle))) }
    }

    /// It is written in memory of the host.
    pub(super) fn host_table_written(&self, me: u32, table: Table) -> HostAccess {
        self.write(table.name(), self.table(me, table, None))
    }

    /// It is read there.
    pub(super) fn host_table_read(&self, me: u32, table: Table) -> HostAccess {
        self.read(table.name(), self.table(me, table, None))
    }

    fn table(&self, me: u32, table: Table, handle: Option<usize>) -> Bytes {
        let (at, len) = self.members[me as usize].table(table, handle);
        Bytes::new(me, WindowId::POOL, at, len)
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
        let out = |source| self.control.message_out(paths.place_of_receiver(source), parity);
        let len = self.control.message_len(counts);
        paths.count_receivers().map(|source| self.write("message", control(me, out(source), len))).collect()
    }

    /// Those of all other nodes, with or without their counts.
    pub(super) fn messages_read(&self, me: u32, counts: bool) -> Vec<HostAccess> {
        let (nodes, parity) = (self.scenario.nodes, self.parity(me, SeededBug::OneMessage));
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
    pub(super) fn metadata_read(
        &self,
        me: u32,
        layout: &DispatchLayout,
        extent: &Extent,
        (handle, of): (usize, usize),
    ) -> HostAccess {
        let at = self.rows_setting(me, 0, handle).metadata_at(me, extent.start, layout.landed);
        let metadata = Bytes::new(me, WindowId::POOL, at, self.sizing.landing(layout.landed).metadata * 4);
        HostAccess { of, ..self.read("landed metadata", metadata) }
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
        match self.scenario.seeded {
            Some(seeded) if seeded == one => 0,
            Some(SeededBug::CountDispatches) if one == SeededBug::OnePublication => member.dispatches,
            _ => member.calls.parity(),
        }
    }

    /// Which tags it takes.
    pub(super) fn tag_parity(&self, me: u32) -> u64 {
        if self.scenario.seeded == Some(SeededBug::OneTag) {
            0
        } else {
            self.members[me as usize].calls.parity()
        }
    }
}

fn control(owner: u32, start: u64, len: u64) -> Bytes {
    Bytes::new(owner, WindowId::CONTROL, start, len)
}

/// The rows of an extent, and what lies behind them.
pub(super) fn chunk(me: u32, chunk: RowBuffer, extent: &Extent) -> [Bytes; 2] {
    let (rows, behind) = (u64::from(chunk.rows) * chunk.row_bytes, extent.start + chunk.metadata_at());
    [
        Bytes::new(me, WindowId::POOL, extent.start, rows),
        Bytes::new(me, WindowId::POOL, behind, chunk.metadata * 4),
    ]
}

impl Unroller<'_> {
    /// First row and length, pads counted, of what comes to a rank from other nodes.
    pub(super) fn far_segments(&self, me: u32, placed: &RowPlaces) -> Vec<(u32, u32)> {
        let far = self.ranks().filter(|&source| !self.paths(me).same_node(source));
        let segments = far.flat_map(|source| self.segments_of(me, source, placed).0);
        segments.map(|segment| (segment.to_row, segment.count + segment.pad)).collect()
    }

    /// Contents of the header of a source on another node about the rows for a rank: segments, and
    /// rows of the block.
    fn segments_of<'p>(&self, me: u32, source: u32, placed: &'p RowPlaces) -> (&'p [Segment], &'p [u32]) {
        let relay = self.paths(source).relay_to(me);
        let block = &placed.layouts[source as usize].blocks[self.nth_relay(source, relay)];
        let before = self.paths(me).served_by(relay).iter().take_while(|&&rank| rank != me);
        let before: usize = before.map(|&rank| self.bins.of(rank).len()).sum();
        let count = |segments: &[Segment]| segments.iter().map(|segment| segment.count as usize).sum();
        let (skipped, own) = block.segments.split_at(before);
        let own = &own[..self.bins.of(me).len()];
        let (skip, count): (usize, usize) = (count(skipped), count(own));
        (own, &block.index[skip..skip + count])
    }

    /// Where the index and the metadata of a dispatch lie in the planner's memory of the host.
    pub(super) fn scratch(&self, me: u32, landed: u32, ground: &Extent, handle: usize) -> (u64, u64) {
        let (index, end) = self.landing(landed).arrivals();
        match self.scenario.gpu_direct {
            true => (0, (end - index).next_multiple_of(64)),
            false => (ground.start, self.rows_setting(me, 0, handle).metadata_at(me, ground.start, landed)),
        }
    }

    /// A host writes to its scratch where rows arrive.
    pub(super) fn index_written(&self, me: u32, placed: &RowPlaces, scratch_index: u64) -> HostAccess {
        let (index, end) = self.landing(placed.layouts[me as usize].landed).arrivals();
        self.write("host staging", Bytes::new(me, WindowId::HOST_STAGING, scratch_index, end - index))
    }

    /// Reads headers and counts to know that, and writes the metadata of rows from other nodes.
    pub(super) fn arrivals_found(
        &self,
        me: u32,
        placed: &RowPlaces,
        landed: &[(u32, u32)],
        scratch_metadata: u64,
    ) -> Vec<HostAccess> {
        let (paths, parity) = (self.paths(me), self.parity(me, SeededBug::OneHeader));
        let mut touches = self.counts_read(me, paths.local_peers().chain([me]));
        for source in self.ranks().filter(|&source| !paths.same_node(source)) {
            let relay = paths.of(source).relay_to(me);
            let at = self.control.header_in(paths.of(source).place_at(relay), parity);
            let entries = placed.layouts[source as usize].blocks[self.nth_relay(source, relay)].entries();
            let header = Bytes::new(relay, WindowId::CONTROL, at, self.control.header_len(entries));
            touches.push(self.read("header", header));
        }
        let written = landed.iter().map(|&(first, rows)| {
            let [first, rows] = [first, rows].map(|rows| u64::from(rows) * self.sizing.metadata_bytes());
            (scratch_metadata + first, rows)
        });
        touches
            .extend(written.map(|(at, len)| {
                self.write("host staging", Bytes::new(me, WindowId::HOST_STAGING, at, len))
            }));
        touches
    }

    /// A kernel reads the index and what has arrived, and writes the visible rows.
    pub(super) fn arrivals_regrouped(&self, me: u32, placed: &RowPlaces, ground: &Extent) -> Vec<HostAccess> {
        let (counts, sizes) = &placed.numbers;
        let landed = placed.layouts[me as usize].landed;
        let landing = self.landing(landed);
        let row_bytes = self.sizing.row_bytes;
        let pool = |what, at, len| self.read(what, Bytes::new(me, WindowId::POOL, at, len));
        let mut touches = Vec::new();
        for source in self.ranks() {
            let (first, rows) = if self.paths(me).same_node(source) {
                let near = (0..me).filter(|&rank| self.paths(me).same_node(rank)).count();
                let first = placed.arrivals[source as usize] as usize;
                let run = placed.layouts[source as usize].runs[first + near];
                (run.to_row, run.count)
            } else {
                let (segments, listed) = self.segments_of(me, source, placed);
                let mut rows = listed.to_vec();
                rows.sort_unstable();
                rows.dedup();
                (first_of(&self.bins, me, segments, (counts, sizes)), rows.len() as u32)
            };
            let at = ground.start + landing.bytes() + u64::from(first) * row_bytes;
            touches.push(pool("arrivals", at, u64::from(rows) * row_bytes));
        }
        let (index, end) = landing.arrivals();
        touches.push(pool("index", ground.start + index, end - index));
        let rows = Bytes::new(me, WindowId::POOL, ground.start, u64::from(landed) * row_bytes);
        touches.push(self.write("visible rows", rows));
        touches
    }
}
