//! Operands of a rank's relay work.

use super::{FillContext, ReturnParts};
use crate::plan::{Bins, Block, Counts, PlanContext, ReceiveSizes, RelayPermutation, RelayPlan, RowBuffer};
use crate::schedule::{Index, Operand, PutSource, Relay, SpanCopy, SumTarget, WindowId};
use crate::topology::{Paths, Route};

/// Operand tables of one rank's relay, used again by all calls.
#[derive(Clone, Debug)]
pub struct RelayTables {
    /// One entry per slot of the skeleton.
    pub table: Vec<Operand>,
    /// Spans of `Put`s.
    pub spans: Vec<SpanCopy>,
    /// Per rank of this node: where its rows land (dispatch) or lie (return).
    pub bases: Vec<u64>,
    /// Return: per source, where it takes its rows.
    pub offers: Vec<u64>,
}

impl RelayTables {
    /// Empty tables.
    pub fn new(paths: Paths, chunks: u8) -> Self {
        let ranks = paths.ranks() as usize;
        RelayTables {
            table: vec![Operand::Empty; Relay::new(paths, chunks).slots()],
            spans: Vec::new(),
            bases: vec![0; ranks],
            offers: vec![0; ranks],
        }
    }

    /// Forgets the last call.
    pub fn clear(&mut self) {
        self.table.fill(Operand::Empty);
        self.spans.clear();
    }

    /// Stage "told": the message to every rank that this one sends counts to, with counts or
    /// without.
    pub fn messages(&mut self, at: &FillContext, counts: bool) {
        self.clear();
        let (paths, control) = (at.paths, at.control);
        for source in paths.count_receivers() {
            let slot = Relay::new(paths, at.chunks).message(source);
            let span = SpanCopy {
                from: PutSource::Window { owner: paths.me(), window: WindowId::CONTROL },
                from_offset: control.message_out(paths.place_of_told(source), at.parity),
                to: WindowId::CONTROL,
                to_offset: control.message_in(paths.nodes().node_of(paths.me()), at.parity),
                len: control.message_len(counts),
            };
            self.spans(slot.0, [span]);
        }
    }

    /// Stage "forward": rows of all blocks to all ranks served, from staging, by list or in spans.
    /// With `noted`, also their metadata, which lies in the headers. Rows of zero bytes are not
    /// sent.
    pub fn forward(&mut self, at: &FillContext, forward: &RelayPlan, noted: bool) {
        self.clear();
        let paths = at.paths;
        if paths.route() == Route::Direct {
            return;
        }
        let (relay, served) = (Relay::new(paths, at.chunks), paths.served_by(paths.me()));
        let last = if at.sizing.row_bytes > 0 { at.chunks } else { 0 };
        let of_rows = if forward.spans { Index::Contiguous } else { Index::Listed };
        for ((nth, source), block) in (0..).zip(paths.sources()).zip(&forward.blocks) {
            let landed = served.iter().position(|&rank| rank == paths.me()).map_or(0, |at| block.landed[at]);
            let staging = self.bases[paths.me() as usize]
                + at.sizing.landing(landed).bytes()
                + u64::from(block.first) * at.sizing.row_bytes;
            let header = at.control.header_in(paths.of(source).place_at(paths.me()), at.parity);
            for (member, &to) in (0..).zip(served) {
                for chunk in if noted { 0 } else { 1 }..=last {
                    let runs = forward.runs_of(nth as usize, chunk, member as usize);
                    let (window, from_offset, index) = match chunk {
                        0 => {
                            (WindowId::CONTROL, header + at.control.notes(block.entries()), Index::Contiguous)
                        }
                        _ => (at.far, staging, of_rows),
                    };
                    let (behind, row_bytes) = match chunk {
                        0 => (
                            at.sizing.landing(block.landed[member as usize]).notes_at(),
                            at.sizing.note_bytes(),
                        ),
                        _ => (0, at.sizing.row_bytes),
                    };
                    self.table[relay.rows(nth, chunk, member).0 as usize] = Operand::Rows {
                        first: runs.start,
                        count: runs.end - runs.start,
                        from: PutSource::Window { owner: paths.me(), window },
                        from_offset,
                        index,
                        to: WindowId::POOL,
                        base: self.bases[to as usize] + behind,
                        row_bytes,
                    };
                }
            }
        }
    }

    /// Stage "forward" where engines relay: rows of all blocks, in runs, to the arrivals of all
    /// ranks served. `landing` gives the bytes before those. The metadata is read from the headers.
    /// Rows of zero bytes are not sent.
    pub fn hand_on(
        &mut self,
        at: &FillContext,
        frame: &PlanContext,
        (forward, arrivals): (&mut RelayPlan, &mut RelayPermutation),
        numbers: (&Counts, &ReceiveSizes),
        landing: impl Fn(u32) -> RowBuffer,
    ) {
        self.clear();
        let (paths, row_bytes) = (at.paths, at.sizing.row_bytes);
        let (relay, served, me) = (Relay::new(paths, at.chunks), paths.served_by(paths.me()), paths.me());
        let RelayPlan { blocks, runs, .. } = forward;
        runs.clear();
        if row_bytes == 0 {
            return;
        }
        for ((nth, _), block) in (0..).zip(paths.sources()).zip(blocks) {
            let landed = served.iter().position(|&rank| rank == me).map_or(0, |at| block.landed[at]);
            let staging =
                self.bases[me as usize] + landing(landed).staging() + u64::from(block.first) * row_bytes;
            for chunk in 1..=at.chunks {
                for (member, &to) in (0..).zip(served) {
                    let first = runs.len() as u32;
                    arrivals.hand_on(frame, block, (served, member as usize), chunk, numbers, runs);
                    self.table[relay.rows(nth, chunk, member).0 as usize] = Operand::Rows {
                        first,
                        count: runs.len() as u32 - first,
                        from: PutSource::Window { owner: me, window: at.far },
                        from_offset: staging,
                        index: Index::Contiguous,
                        to: WindowId::POOL,
                        base: self.bases[to as usize] + landing(block.landed[member as usize]).bytes(),
                        row_bytes,
                    };
                }
            }
        }
    }

    /// Stage "bring home": the rows of every source, from where they lie on this node, to the place
    /// that the source named; or their partial sums, through `outbox`, which takes
    /// [`outbox_bytes`](RelayTables::outbox_bytes).
    pub fn home(
        &mut self,
        at: &FillContext,
        forward: &RelayPlan,
        bins: &Bins,
        parts: ReturnParts,
        outbox: u64,
    ) {
        self.clear();
        let relay = Relay::new(at.paths, at.chunks);
        let mut wait_at = outbox;
        for ((nth, source), block) in (0..).zip(at.paths.sources()).zip(&forward.blocks) {
            let offer = self.offers[source as usize];
            let summed = at.sizing.partial_bytes.filter(|_| parts.rows);
            let rows = match at.sizing.partial_bytes {
                Some(_) => forward.partials_from(nth as usize).len() as u32,
                None => block.entries(),
            };
            let rows = at.sizing.home(rows, block.entries());
            let first = self.spans.len() as u32;
            self.home_of(
                at,
                block,
                bins,
                (offer, rows),
                ReturnParts { rows: parts.rows && summed.is_none(), ..parts },
            );
            let chunks = if summed.is_some() { at.chunks } else { 1 };
            let mut to_offset = offer;
            for chunk in 1..=chunks {
                let first = if chunk == 1 { first } else { self.spans.len() as u32 };
                if let Some(bytes) = summed {
                    let partials = forward.partials_of(nth as usize, chunk);
                    let len = partials.len() as u64 * bytes;
                    self.table[relay.partials(nth, chunk).0 as usize] = Operand::SumRows {
                        first: partials.start,
                        count: partials.len() as u32,
                        to: SumTarget::Partials { window: WindowId::POOL, offset: wait_at },
                    };
                    let from = PutSource::Window { owner: at.paths.me(), window: WindowId::POOL };
                    let to = at.far;
                    self.spans.push(SpanCopy { from, from_offset: wait_at, to, to_offset, len });
                    (to_offset, wait_at) = (to_offset + len, wait_at + len);
                }
                let count = self.spans.len() as u32 - first;
                self.table[relay.home(nth, chunk).0 as usize] = Operand::Spans { first, count };
            }
        }
    }

    /// Bytes in which sums wait until they have been sent.
    pub fn outbox_bytes(at: &FillContext, forward: &RelayPlan) -> u64 {
        at.sizing.partial_bytes.map_or(0, |bytes| u64::from(forward.partials.count()) * bytes)
    }

    fn home_of(
        &mut self,
        at: &FillContext,
        block: &Block,
        bins: &Bins,
        (offer, home): (u64, RowBuffer),
        parts: ReturnParts,
    ) {
        let (row_bytes, words) = (at.sizing.home_bytes, u64::from(at.sizing.words_home) * 4);
        let (mut segments, mut entry) = (block.segments.iter(), 0);
        for (&owner, &landed) in at.paths.served_by(at.paths.me()).iter().zip(&block.landed) {
            let chunk = self.bases[owner as usize];
            for segment in segments.by_ref().take(bins.of(owner).len()) {
                let (from, to, n) = (u64::from(segment.to_row), entry, u64::from(segment.count));
                let all = [
                    (parts.rows, from * row_bytes, to * row_bytes, n * row_bytes),
                    (
                        parts.weights,
                        at.sizing.offer(landed).notes_at() + from * words,
                        home.notes_at() + to * words,
                        n * words,
                    ),
                ];
                for (_, from_offset, to_offset, len) in all.into_iter().filter(|&(part, ..)| part && n > 0) {
                    self.spans.push(SpanCopy {
                        from: PutSource::Window { owner, window: WindowId::POOL },
                        from_offset: chunk + from_offset,
                        to: at.far,
                        to_offset: offer + to_offset,
                        len,
                    });
                }
                entry += n;
            }
        }
    }

    fn spans(&mut self, slot: u32, spans: impl IntoIterator<Item = SpanCopy>) {
        let first = self.spans.len() as u32;
        self.spans.extend(spans);
        self.table[slot as usize] = Operand::Spans { first, count: self.spans.len() as u32 - first };
    }
}
