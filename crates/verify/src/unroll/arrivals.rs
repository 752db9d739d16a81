//! What planners and kernels touch where engines relay.

use sidelane_core::plan::{Segment, first_of};
use sidelane_core::schedule::WindowId;

use super::Bytes;
use super::state::{Extent, Placed, Unroller};
use super::{HostAccess, SeededBug};

impl Unroller<'_> {
    /// First row and length, pads counted, of what comes to a rank from other nodes.
    pub(super) fn far_segments(&self, me: u32, placed: &Placed) -> Vec<(u32, u32)> {
        let far = self.ranks().filter(|&source| !self.paths(me).same_node(source));
        let segments = far.flat_map(|source| self.segments_of(me, source, placed).0);
        segments.map(|segment| (segment.to_row, segment.count + segment.pad)).collect()
    }

    /// Contents of the header of a source on another node about the rows for a rank: segments, and
    /// rows of the block.
    fn segments_of<'p>(&self, me: u32, source: u32, placed: &'p Placed) -> (&'p [Segment], &'p [u32]) {
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

    /// Where the index and the notes of a dispatch lie in the planner's memory of the host.
    pub(super) fn desk(&self, me: u32, landed: u32, ground: &Extent, handle: usize) -> (u64, u64) {
        let (index, end) = self.landing(landed).arrivals();
        match self.script.straight {
            true => (0, (end - index).next_multiple_of(64)),
            false => (ground.start, self.rows_setting(me, 0, handle).notes_at(me, ground.start, landed)),
        }
    }

    /// A host writes to its desk where rows arrive.
    pub(super) fn index_written(&self, me: u32, placed: &Placed, desk_index: u64) -> HostAccess {
        let (index, end) = self.landing(placed.layouts[me as usize].landed).arrivals();
        self.write("twin", Bytes::new(me, WindowId::HOST_STAGING, desk_index, end - index))
    }

    /// Reads headers and counts to know that, and writes the metadata of rows from other nodes.
    pub(super) fn arrivals_found(
        &self,
        me: u32,
        placed: &Placed,
        landed: &[(u32, u32)],
        desk_notes: u64,
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
            let [first, rows] = [first, rows].map(|rows| u64::from(rows) * self.sizing.note_bytes());
            (desk_notes + first, rows)
        });
        touches.extend(
            written.map(|(at, len)| self.write("twin", Bytes::new(me, WindowId::HOST_STAGING, at, len))),
        );
        touches
    }

    /// A kernel reads the index and what has arrived, and writes the visible rows.
    pub(super) fn arrivals_regrouped(&self, me: u32, placed: &Placed, ground: &Extent) -> Vec<HostAccess> {
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
