//! Operands of a rank's own part.

use super::FillContext;
use crate::plan::{DispatchLayout, RelayPlan, RowBuffer, vec_memory_usage};
use crate::schedule::{
    Caller, Calls, Index, Operand, Operands, PutSource, SpanCopy, SumTarget, Tag, WindowId,
};
use crate::topology::{Paths, Route};

/// Operand tables of one rank's callers, used again by all calls.
#[derive(Clone, Debug)]
pub struct CallerTables {
    /// One entry per slot of the skeletons.
    pub table: Vec<Operand>,
    /// Spans of `Put`s.
    pub spans: Vec<SpanCopy>,
    /// Tags of the entry signal to each peer, and the offer to each relay.
    pub tags: Vec<Tag>,
    /// Per owner: where its chunk lies when it is summed.
    pub bases: Vec<u64>,
    /// Per rank: where rows land there. Rows that it relays land behind them.
    pub landing: Vec<u64>,
    /// Landed rows of this rank's twin: first row, and how many.
    landed: Vec<(u32, u32)>,
}

/// Parts of a chunk that a return brings back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReturnParts {
    /// The rows, summed.
    pub rows: bool,
    /// One `f32` per row, fetched.
    pub weights: bool,
}

impl CallerTables {
    /// Empty tables.
    pub fn new(paths: Paths, chunks: u8) -> Self {
        let ranks = paths.ranks() as usize;
        CallerTables {
            table: vec![Operand::Empty; Caller::new(paths, chunks).slots()],
            spans: Vec::new(),
            tags: vec![Tag::default(); ranks],
            bases: vec![0; ranks],
            landing: vec![0; ranks],
            landed: Vec::new(),
        }
    }

    /// Bytes that its tables hold, used or kept for the next call.
    pub fn held(&self) -> usize {
        let words = vec_memory_usage(&self.bases) + vec_memory_usage(&self.landing);
        vec_memory_usage(&self.table)
            + vec_memory_usage(&self.spans)
            + vec_memory_usage(&self.tags)
            + words
            + vec_memory_usage(&self.landed)
    }

    /// Forgets the last call.
    pub fn clear(&mut self) {
        self.table.fill(Operand::Empty);
        self.spans.clear();
    }

    /// Constants of the running call, apart from runs, rows and sums.
    pub fn operands(&self, calls: Calls, row_bytes: u64) -> Operands<'_> {
        Operands {
            table: &self.table,
            spans: &self.spans,
            tags: &self.tags,
            row_bytes,
            call: calls.value(),
            last_return: calls.last_return(),
            ..Operands::default()
        }
    }

    /// Dispatch: rows, to where `landing` says. With `noted`, also their metadata and the headers
    /// of the blocks: once per layout, since later calls along it know them. Rows of zero bytes are
    /// not sent.
    pub fn rows(&mut self, at: &FillContext, layout: &DispatchLayout, noted: bool) {
        self.clear();
        let (paths, sizing) = (at.paths, at.sizing);
        let caller = Caller::new(paths, at.chunks);
        let index = if layout.whole { Index::Contiguous } else { Index::Listed };
        for peer in 0..paths.ranks() {
            let runs = layout.runs_to(peer);
            let (first, count) = (runs.start, runs.end - runs.start);
            let base = self.landing[peer as usize];
            let window = if paths.same_node(peer) { WindowId::POOL } else { at.far };
            let rows = Operand::Rows {
                first,
                count,
                from: PutSource::Input,
                from_offset: 0,
                index,
                to: window,
                base,
                row_bytes: sizing.row_bytes,
            };
            let notes = Operand::Rows {
                first,
                count,
                from: PutSource::Notes,
                from_offset: 0,
                index: Index::Contiguous,
                to: window,
                base: at.notes_at(peer, base, layout.sizes[peer as usize]),
                row_bytes: sizing.note_bytes(),
            };
            if sizing.row_bytes > 0 {
                self.table[caller.rows(peer).0 as usize] = rows;
            }
            if noted {
                self.table[caller.notes(peer).0 as usize] = notes;
            }
        }
        for (nth, relay) in (0..).zip(paths.relays()) {
            if noted {
                self.header(at, layout, nth, relay);
            }
            let goes = paths.route() == Route::Pxn && sizing.row_bytes > 0;
            for chunk in (1..=at.chunks).filter(|_| goes) {
                self.table[caller.block(relay, chunk).0 as usize] = Operand::Rows {
                    first: layout.block_runs[nth as usize] + u32::from(chunk) - 1,
                    count: 1,
                    from: PutSource::Input,
                    from_offset: 0,
                    index,
                    to: at.far,
                    base: self.landing[relay as usize]
                        + sizing.landing(layout.sizes[relay as usize]).bytes()
                        + u64::from(layout.blocks[nth as usize].first) * sizing.row_bytes,
                    row_bytes: sizing.row_bytes,
                };
            }
        }
    }

    fn header(&mut self, at: &FillContext, layout: &DispatchLayout, nth: u32, relay: u32) {
        let first = self.spans.len() as u32;
        self.spans.push(SpanCopy {
            from: PutSource::Window { owner: at.paths.me(), window: WindowId::CONTROL },
            from_offset: at.control.header_out(nth, at.parity),
            to: WindowId::CONTROL,
            to_offset: at.control.header_in(at.paths.place_at(relay), at.parity),
            len: at.control.header_len(layout.blocks[nth as usize].entries()),
        });
        let slot = Caller::new(at.paths, at.chunks).header(relay);
        self.table[slot.0 as usize] = Operand::Spans { first, count: 1 };
    }

    /// Return, before its entry: splits the staging that begins at `start` into places for the rows
    /// that each relay returns. It takes [`CallerTables::home_bytes`].
    pub fn stage(&mut self, paths: &Paths, layout: &DispatchLayout, start: u64) {
        let mut next = start;
        for relay in paths.relays() {
            self.bases[relay as usize] = next;
            next += layout.chunks[relay as usize].bytes();
        }
    }

    /// Return, stage "entry": sends local peers the place of this rank's chunk, and relays the
    /// places of this rank's rows.
    pub fn offer(&mut self, paths: &Paths, tag: Tag, chunk: u64) {
        for (peer, told) in (0..).zip(&mut self.tags) {
            *told =
                Tag { base: if paths.same_node(peer) { chunk } else { self.bases[peer as usize] }, ..tag };
        }
    }

    /// Stage "in" of a dispatch: copies the rows that sources of other nodes put into this rank's
    /// twin and, with `noted`, their metadata to their places. Adjacent rows of different sources
    /// go as one copy.
    pub fn bring_in(&mut self, at: &FillContext, forward: &RelayPlan, landed: u32, noted: bool) {
        self.clear();
        self.landed.clear();
        let segments = forward.blocks.iter().flat_map(|block| &block.segments);
        self.landed.extend(segments.map(|s| (s.to_row, s.count + s.pad)));
        let base = self.landing[at.paths.me() as usize];
        self.join();
        if at.sizing.row_bytes > 0 {
            self.bring(at, (base, base), at.sizing.row_bytes);
        }
        if noted {
            let notes = at.notes_at(at.paths.me(), base, landed);
            self.bring(at, (notes, notes), at.sizing.note_bytes());
        }
        self.brought(at);
    }

    /// The same where rows go to arrivals: the metadata of `landed` (first rows and how many
    /// follow) and, with `rows` rows, their index. Index and notes (of row 0 on) lie in the planner
    /// scratch `desk`.
    pub fn bring_notes_in(
        &mut self,
        at: &FillContext,
        landed: &[(u32, u32)],
        rows: u32,
        (desk_index, desk_notes): (u64, u64),
    ) {
        self.clear();
        self.landed.clear();
        self.landed.extend_from_slice(landed);
        let (base, (index, end)) = (self.landing[at.paths.me() as usize], at.landing(rows).arrivals());
        self.join();
        let notes = at.notes_at(at.paths.me(), base, rows);
        self.bring(at, (desk_notes, notes), at.sizing.note_bytes());
        if at.sizing.row_bytes > 0 {
            let from = PutSource::Window { owner: at.paths.me(), window: WindowId::HOST_STAGING };
            let (to, to_offset, len) = (WindowId::POOL, base + index, end - index);
            self.spans.push(SpanCopy { from, from_offset: desk_index, to, to_offset, len });
        }
        self.brought(at);
    }

    /// Rows that lie next to each other become one run.
    fn join(&mut self) {
        self.landed.retain(|&(_, rows)| rows > 0);
        self.landed.sort_unstable();
        self.landed.dedup_by(|next, run| {
            let joined = run.0 + run.1 == next.0;
            run.1 += if joined { next.1 } else { 0 };
            joined
        });
    }

    fn bring(&mut self, at: &FillContext, (from, to): (u64, u64), bytes: u64) {
        self.spans.extend(self.landed.iter().map(|&(first, rows)| SpanCopy {
            from: PutSource::Window { owner: at.paths.me(), window: WindowId::HOST_STAGING },
            from_offset: from + u64::from(first) * bytes,
            to: WindowId::POOL,
            to_offset: to + u64::from(first) * bytes,
            len: u64::from(rows) * bytes,
        }));
    }

    fn brought(&mut self, at: &FillContext) {
        let slot = Caller::new(at.paths, at.chunks).rows(at.paths.me());
        self.table[slot.0 as usize] = Operand::Spans { first: 0, count: self.spans.len() as u32 };
    }

    /// Dispatch where engines relay, behind [`CallerTables::rows`]: rows for local peers go to
    /// their arrivals, one run each, the first of which is run `first` of the layout. `landing`
    /// gives the bytes before arrivals, and before staged rows.
    pub fn to_arrivals(
        &mut self,
        at: &FillContext,
        layout: &DispatchLayout,
        first: u32,
        landing: impl Fn(u32) -> RowBuffer,
    ) {
        let (paths, caller) = (at.paths, Caller::new(at.paths, at.chunks));
        for (run, peer) in (first..).zip((0..paths.ranks()).filter(|&peer| paths.same_node(peer))) {
            let to = self.landing[peer as usize] + landing(layout.sizes[peer as usize]).bytes();
            if let Operand::Rows { first, count, base, .. } = &mut self.table[caller.rows(peer).0 as usize] {
                (*first, *count, *base) = (run, 1, to);
            }
        }
        for (relay, block) in paths.relays().zip(&layout.blocks) {
            let staging = self.landing[relay as usize] + landing(layout.sizes[relay as usize]).staging();
            let to = staging + u64::from(block.first) * at.sizing.row_bytes;
            for chunk in 1..=at.chunks {
                if let Operand::Rows { base, .. } = &mut self.table[caller.block(relay, chunk).0 as usize] {
                    *base = to;
                }
            }
        }
    }

    /// Dispatch, behind these: rows go from where tokens lie and not packed, by runs that follow as
    /// many others in the layout. What goes with them lies packed.
    pub fn in_place(&mut self, at: &FillContext, runs: u32) {
        let caller = Caller::new(at.paths, at.chunks);
        let own = (0..at.paths.ranks()).map(|peer| caller.rows(peer));
        let blocks = at.paths.relays().flat_map(|relay| (1..=at.chunks).map(move |chunk| (relay, chunk)));
        let blocks = blocks.filter(|_| at.paths.route() == Route::Pxn);
        for slot in own.chain(blocks.map(|(relay, chunk)| caller.block(relay, chunk))) {
            if let Operand::Rows { first, from: PutSource::Input, .. } = &mut self.table[slot.0 as usize] {
                *first += runs;
            }
        }
    }

    /// Return, before its entry: a place for the rows alone that each relay returns. In the twin
    /// these are cut from `home`; where the net reaches the pool they are
    /// [those](DispatchLayout::home_of) in which rows are summed.
    pub fn stage_rows(&mut self, at: &FillContext, layout: &DispatchLayout, home: u64) {
        let (mut next, row_bytes) = (0, at.sizing.home_bytes);
        for (relay, block) in at.paths.relays().zip(&layout.blocks) {
            let first = match at.far {
                WindowId::HOST_STAGING => next,
                _ => layout.home_of(&at.paths, relay),
            };
            self.bases[relay as usize] = home + u64::from(first) * row_bytes;
            next += block.entries();
        }
    }

    /// Stage "pull" of a return: copies this rank's rows from where each owner offers its chunk
    /// (`bases`) to `home`, in the order in which they left. Those of other nodes have come to the
    /// twin by then, one behind the other, or have returned already.
    pub fn pull(&mut self, at: &FillContext, layout: &DispatchLayout, home: u64) {
        self.clear();
        let (caller, row_bytes) = (Caller::new(at.paths, at.chunks), at.sizing.home_bytes);
        let in_twin = |route| at.far == WindowId::HOST_STAGING && at.paths.route() == route;
        let straight = at.paths.relays().filter(|_| in_twin(Route::Direct));
        for peer in at.paths.local_peers().chain([at.paths.me()]).chain(straight) {
            let (first, runs) = (self.spans.len(), layout.runs_to(peer));
            let (base, near) = (self.bases[peer as usize], at.paths.same_node(peer));
            let from = match near {
                true => PutSource::Window { owner: peer, window: WindowId::POOL },
                false => PutSource::Window { owner: at.paths.me(), window: at.far },
            };
            let mut entry = 0;
            for run in layout.runs[runs.start as usize..runs.end as usize].iter().filter(|run| run.count > 0)
            {
                let row = if near { run.to_row } else { entry };
                entry += run.count;
                let span = SpanCopy {
                    from,
                    from_offset: base + u64::from(row) * row_bytes,
                    to: WindowId::POOL,
                    to_offset: home + u64::from(run.first) * row_bytes,
                    len: u64::from(run.count) * row_bytes,
                };
                match self.spans[first..].last_mut() {
                    Some(last) if last.reaches(&span) => last.len += span.len,
                    _ => self.spans.push(span),
                }
            }
            let (first, count) = (first as u32, (self.spans.len() - first) as u32);
            self.table[caller.rows(peer).0 as usize] = Operand::Spans { first, count };
        }
        // Blocks return unchanged, behind the rows of local peers.
        let blocks = at.paths.relays().zip(&layout.blocks);
        for (relay, block) in blocks.filter(|_| in_twin(Route::Pxn)) {
            let (first, from_offset) = (self.spans.len() as u32, self.bases[relay as usize]);
            let (from, to) = (PutSource::Window { owner: at.paths.me(), window: at.far }, WindowId::POOL);
            let to_offset = home + u64::from(layout.home_of(&at.paths, relay)) * row_bytes;
            let len = u64::from(block.entries()) * row_bytes;
            self.spans.push(SpanCopy { from, from_offset, to, to_offset, len });
            self.table[caller.rows(relay).0 as usize] = Operand::Spans { first, count: 1 };
        }
    }

    /// Stage "sum" of a return.
    pub fn sum(&mut self, at: &FillContext, layout: &DispatchLayout, parts: ReturnParts) {
        self.clear();
        let caller = Caller::new(at.paths, at.chunks);
        let rows = Operand::SumRows { first: 0, count: layout.tokens, to: SumTarget::Output };
        let pick = |wanted, operand| if wanted { operand } else { Operand::Empty };
        self.table[caller.sum().0 as usize] = pick(parts.rows, rows);
        self.table[caller.weights().0 as usize] = pick(parts.weights, Operand::FetchWeights);
    }

    /// Bytes of a return's staging: the rows that all relays return.
    pub fn home_bytes(paths: &Paths, layout: &DispatchLayout) -> u64 {
        paths.relays().map(|relay| layout.chunks[relay as usize].bytes()).sum()
    }
}
