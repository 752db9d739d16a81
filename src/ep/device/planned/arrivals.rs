//! A dispatch where engines relay: what the enqueuer does beside.
//!
//! ```text
//!   caller's stream    ids, weights -> host | flag |          join | regroup: rows packed |        join | regroup: visible rows
//!   caller's thread      ... counts, placement: list                | enqueue ..           index
//!   stream of copies                       list -> device           | runs to arrivals, blocks out | runs handed on
//! ```
//!
//! Which tokens cross, and in which order, only the enqueuer knows: so it says how rows are packed.
//! They lie by bin for neighbours, then block by block, each token once. What has arrived the
//! caller's stream puts into visible order, by an index that every enqueuer finds from what all
//! have said already: the counts of its neighbours, and the headers of their blocks.

use super::common::Common;
use super::enqueuer::{Enqueuer, Header};
use crate::error::{CallKind, Error};
use crate::plan::{Segment, SortedRouting};
use crate::schedule::WindowId;

impl Common {
    /// What goes with the rows for neighbours lies as they do: from these rows of bins on.
    pub fn rewrite_notes(&self, starts: &[u32], sorted: &SortedRouting) -> Result<(), Error> {
        let (fixed, (at, _)) = (&self.fixed, self.shape.host_notes());
        let bytes = fixed.sizing(CallKind::Dispatch).note_bytes();
        for rank in (0..fixed.lanes.ranks()).filter(|&rank| fixed.paths().same_node(rank)) {
            for bin in fixed.bins.of(rank) {
                let to = at + u64::from(starts[bin as usize]) * bytes;
                self.host.write_words(to as usize, sorted.notes_of(bin..bin + 1))?;
            }
        }
        Ok(())
    }
}

impl Enqueuer {
    /// Tells the caller's stream how to pack: which token's row is where.
    pub fn list(&mut self, seat: u32, tokens: u32) -> Result<(), Error> {
        let Enqueuer { common, engine, arrivals, .. } = self;
        let shape = &common.shape;
        let entries = tokens as usize * common.fixed.spec.top_k as usize;
        arrivals.packed.resize(entries, -1);
        let words = bytemuck::cast_slice(&arrivals.packed);
        common.host.write_words(shape.host_order().0 as usize, words)?;
        common.send(engine, (shape.host_order(), shape.order(seat)), entries as u64 * 4)
    }

    /// Where the index and the notes of a dispatch lie on the desk: in the twin, if that is one,
    /// beside what lands there.
    pub fn desk(&self, seat: u32) -> (u64, u64) {
        let base = self.tables.landing[self.common.fixed.lanes.rank as usize];
        let shape = &self.common.shape;
        match self.common.fixed.straight() {
            true => (0, shape.desk_notes()),
            false => (base, shape.notes(seat).0),
        }
    }

    /// Finds where every visible row has arrived, which the seat keeps; and writes to the desk what
    /// goes with rows of other nodes.
    pub fn find_arrivals(&mut self, seat: u32) -> Result<(), Error> {
        let (_, desk_notes) = self.desk(seat);
        let Enqueuer { common, calls, arrivals, numbers, scratch, kept, .. } = self;
        let fixed = &common.fixed;
        let (paths, me, control, parity) = (fixed.paths(), fixed.lanes.rank, &fixed.control, calls.parity());
        let (bins, own) = (&fixed.bins, fixed.bins.of(me));
        let words = (control.note_bytes() / 4) as usize;
        let kept = &mut kept[seat as usize];
        let (counts, sizes) = (&numbers.counts, &numbers.sizes);
        let (landed, Header { segments, listed, weights, pads, counted }) =
            (&mut scratch.landed, &mut scratch.header);
        landed.clear();
        arrivals.begin(bins, me, common.shape.landing(CallKind::Dispatch, kept.layout.landed).rows);
        counted.resize(own.len(), 0);
        for source in 0..paths.ranks() {
            if paths.same_node(source) {
                let at = control.publication(parity) + u64::from(own.start) * 4;
                fixed.port.read(source, WindowId::CONTROL, at, counted)?;
                arrivals.from_neighbour(bins, me, counted, (counts, sizes));
                continue;
            }
            let relay = paths.of(source).relay_to(me);
            let at = control.header_in(paths.of(source).place_at(relay), parity);
            let mut head = [0u32; 3];
            fixed.port.read(relay, WindowId::CONTROL, at, &mut head)?;
            let [rows, entries, _] = head;
            let before: usize = paths
                .served_by(relay)
                .iter()
                .take_while(|&&rank| rank != me)
                .map(|&rank| bins.of(rank).len())
                .sum();
            segments.resize(before + own.len(), Default::default());
            fixed.port.read(relay, WindowId::CONTROL, at + control.segments(), segments)?;
            let count = |segments: &[Segment]| -> u32 { segments.iter().map(|s| s.count).sum() };
            let (skip, mine) = (count(&segments[..before]), count(&segments[before..]));
            listed.resize(mine as usize, 0);
            weights.resize(mine as usize * words, 0);
            fixed.port.read(relay, WindowId::CONTROL, at + control.index() + u64::from(skip) * 4, listed)?;
            let notes = at + control.notes(entries) + u64::from(skip) * control.note_bytes();
            fixed.port.read(relay, WindowId::CONTROL, notes, weights)?;
            arrivals.from_far(rows, listed, &segments[before..]);
            let mut rest = &weights[..];
            for &Segment { to_row, count, pad } in &segments[before..] {
                let notes = rest.split_off(..count as usize * words).unwrap_or_default();
                let at = desk_notes + u64::from(to_row) * control.note_bytes();
                if count + pad > 0 {
                    fixed.port.write(WindowId::HOST_STAGING, at, notes)?;
                    pads.resize(pad as usize * words, 0);
                    fixed.port.write(
                        WindowId::HOST_STAGING,
                        at + u64::from(count) * control.note_bytes(),
                        pads,
                    )?;
                }
                landed.push((to_row, count + pad));
            }
        }
        kept.index.clone_from(&arrivals.index);
        Ok(())
    }
}
