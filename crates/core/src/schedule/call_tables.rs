//! Fills a skeleton's operands from a layout. Pure, and without allocation once the tables have
//! grown.
//!
//! ```text
//!   FillContext: paths, control window, sizes --+
//!   DispatchLayout, bases of extents -----------+--> CallerTables: rows, headers; sums or pulls; rows to bring in
//!   RelayPlan, bases of extents ----------------+--> RelayTables: messages; rows to relay; rows to return
//! ```
//!
//! A real call (`ep`) and an unrolled one fill their operands here, count with the same
//! [`Calls`], look into the same [`ControlLayout`] and follow the same skeletons: so far, the proof
//! covers the code that runs. The unrolled program models the rest itself: when the planner and the
//! caller touch memory, and which extent a pool gives. It takes the lowest, the hardest case; a
//! real pool may be kinder.

use super::{
    Caller, Calls, ControlLayout, Index, Operand, Operands, PutSource, Relay, SpanCopy, SumTarget, Tag,
    WindowId,
};
use crate::plan::{
    Bins, Block, Counts, DispatchLayout, PlanContext, ReceiveSizes, RelayPermutation, RelayPlan, RowBuffer,
    RowSizes, vec_memory_usage,
};
use crate::topology::{Paths, Route};

/// Constants of all tables of one rank in one call.
#[derive(Clone, Copy, Debug)]
pub struct FillContext<'a> {
    /// This rank among its nodes.
    pub paths: Paths<'a>,
    /// Geometry of the control windows.
    pub control: &'a ControlLayout,
    /// Sizes of what moves.
    pub sizing: RowSizes,
    /// In how many parts a block goes to its relay.
    pub chunks: u8,
    /// Which of two publications, messages and headers the call takes.
    pub parity: u64,
    /// The window in which crossing rows land: the pool, or its
    /// [host staging](WindowId::HOST_STAGING) where the pool is device memory that no net
    /// reaches.
    pub far: WindowId,
    /// Where metadata lands at each rank, if not behind the rows.
    pub metadata: Option<&'a [u64]>,
}

impl FillContext<'_> {
    /// Memory in which so many rows land at a rank.
    pub fn landing(&self, rows: u32) -> RowBuffer {
        let landing = self.sizing.landing(rows);
        if self.metadata.is_some() { landing.without_metadata() } else { landing }
    }

    /// Where metadata lands at a rank whose rows, so many, land at `base`.
    pub fn metadata_at(&self, rank: u32, base: u64, rows: u32) -> u64 {
        self.metadata
            .map_or_else(|| base + self.landing(rows).metadata_at(), |metadata| metadata[rank as usize])
    }
}

impl Operand {
    /// Stage "regroup" of rank `me`, behind an all-gather: copies `runs` runs of rows from where
    /// they were gathered to their places. Rows of no bytes stay.
    pub fn regroup(me: u32, runs: u32, row_bytes: u64, (from_offset, base): (u64, u64)) -> Operand {
        if row_bytes == 0 {
            return Operand::Empty;
        }
        let from = PutSource::Window { owner: me, window: WindowId::POOL };
        let (index, to) = (Index::Listed, WindowId::POOL);
        Operand::Rows { first: 0, count: runs, from, from_offset, index, to, base, row_bytes }
    }
}

/// Operand tables of one rank's callers, used again by all calls.
#[derive(Clone, Debug)]
pub struct CallerTables {
    /// One entry per operand of the skeletons.
    pub table: Vec<Operand>,
    /// Spans of `Put`s.
    pub spans: Vec<SpanCopy>,
    /// Tags of the entry signal to each peer, and the offer to each relay.
    pub tags: Vec<Tag>,
    /// Per owner: where its chunk lies when it is summed.
    pub bases: Vec<u64>,
    /// Per rank: where rows land there. Rows that it relays land behind them.
    pub landing: Vec<u64>,
    /// Landed rows in this rank's host staging: first row, and how many.
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
            table: vec![Operand::Empty; Caller::new(paths, chunks).operands()],
            spans: Vec::new(),
            tags: vec![Tag::default(); ranks],
            bases: vec![0; ranks],
            landing: vec![0; ranks],
            landed: Vec::new(),
        }
    }

    /// Bytes that its tables hold, used or kept for the next call.
    pub fn memory_usage(&self) -> usize {
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
            let metadata = Operand::Rows {
                first,
                count,
                from: PutSource::Metadata,
                from_offset: 0,
                index: Index::Contiguous,
                to: window,
                base: at.metadata_at(peer, base, layout.sizes[peer as usize]),
                row_bytes: sizing.metadata_bytes(),
            };
            if sizing.row_bytes > 0 {
                self.table[caller.rows(peer).0 as usize] = rows;
            }
            if noted {
                self.table[caller.metadata(peer).0 as usize] = metadata;
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
        let operand = Caller::new(at.paths, at.chunks).header(relay);
        self.table[operand.0 as usize] = Operand::Spans { first, count: 1 };
    }

    /// Return, before its entry: splits the staging that begins at `start` into places for the rows
    /// that each relay returns. It takes [`CallerTables::return_bytes`].
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
        for (peer, to_peer) in (0..).zip(&mut self.tags) {
            *to_peer =
                Tag { base: if paths.same_node(peer) { chunk } else { self.bases[peer as usize] }, ..tag };
        }
    }

    /// Stage "in" of a dispatch: copies the rows that sources of other nodes put into this rank's
    /// host staging and, with `noted`, their metadata to their places. Adjacent rows of different
    /// sources go as one copy.
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
            let metadata = at.metadata_at(at.paths.me(), base, landed);
            self.bring(at, (metadata, metadata), at.sizing.metadata_bytes());
        }
        self.brought(at);
    }

    /// The same where rows go to arrivals: the metadata of `landed` (first rows and how many
    /// follow) and, with `rows` rows, their index. Index and metadata (of row 0 on) lie in the
    /// planner scratch.
    pub fn bring_metadata_in(
        &mut self,
        at: &FillContext,
        landed: &[(u32, u32)],
        rows: u32,
        (scratch_index, scratch_metadata): (u64, u64),
    ) {
        self.clear();
        self.landed.clear();
        self.landed.extend_from_slice(landed);
        let (base, (index, end)) = (self.landing[at.paths.me() as usize], at.landing(rows).arrivals());
        self.join();
        let metadata = at.metadata_at(at.paths.me(), base, rows);
        self.bring(at, (scratch_metadata, metadata), at.sizing.metadata_bytes());
        if at.sizing.row_bytes > 0 {
            let from = PutSource::Window { owner: at.paths.me(), window: WindowId::HOST_STAGING };
            let (to, to_offset, len) = (WindowId::POOL, base + index, end - index);
            self.spans.push(SpanCopy { from, from_offset: scratch_index, to, to_offset, len });
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
        let operand = Caller::new(at.paths, at.chunks).rows(at.paths.me());
        self.table[operand.0 as usize] = Operand::Spans { first: 0, count: self.spans.len() as u32 };
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
        for operand in own.chain(blocks.map(|(relay, chunk)| caller.block(relay, chunk))) {
            if let Operand::Rows { first, from: PutSource::Input, .. } = &mut self.table[operand.0 as usize] {
                *first += runs;
            }
        }
    }

    /// Return, before its entry: a place for the rows alone that each relay returns. In host
    /// staging these are cut from `staging`; where the net reaches the pool they are
    /// [those](DispatchLayout::returned_at) in which rows are summed.
    pub fn stage_rows(&mut self, at: &FillContext, layout: &DispatchLayout, staging: u64) {
        let (mut next, row_bytes, sums) = (0, at.sizing.return_bytes, at.sizing.rank_sums);
        for (relay, block) in at.paths.relays().zip(&layout.blocks) {
            let first = match at.far {
                WindowId::HOST_STAGING => next,
                _ => layout.returned_at(&at.paths, relay, sums),
            };
            self.bases[relay as usize] = staging + u64::from(first) * row_bytes;
            next += block.returned(&at.sizing);
        }
    }

    /// Stage "pull" of a return: copies this rank's rows from where each local peer offers its
    /// chunk (`bases`) to `staging`, in the order in which they left, or in that of their sums.
    /// Those of other nodes have come to the host staging by then, one behind the other, or have
    /// returned already. Own rows are summed where they lie.
    pub fn pull(&mut self, at: &FillContext, layout: &DispatchLayout, staging: u64) {
        self.clear();
        let (caller, row_bytes) = (Caller::new(at.paths, at.chunks), at.sizing.return_bytes);
        let sums = at.sizing.rank_sums;
        let is_staged = |route| at.far == WindowId::HOST_STAGING && at.paths.route() == route;
        let direct = at.paths.relays().filter(|_| is_staged(Route::Direct));
        for peer in at.paths.local_peers().chain(direct) {
            let first = self.spans.len();
            let (base, near) = (self.bases[peer as usize], at.paths.same_node(peer));
            let from = match near {
                true => PutSource::Window { owner: peer, window: WindowId::POOL },
                false => PutSource::Window { owner: at.paths.me(), window: at.far },
            };
            let mut entry = 0;
            for run in layout.returned(peer, sums).iter().filter(|run| run.count > 0) {
                let row = if near { run.to_row } else { entry };
                entry += run.count;
                let span = SpanCopy {
                    from,
                    from_offset: base + u64::from(row) * row_bytes,
                    to: WindowId::POOL,
                    to_offset: staging + u64::from(run.first) * row_bytes,
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
        // Blocks return behind the rows of local peers, unchanged or as sums.
        let blocks = at.paths.relays().zip(&layout.blocks);
        for (relay, block) in blocks.filter(|_| is_staged(Route::Pxn)) {
            let (first, from_offset) = (self.spans.len() as u32, self.bases[relay as usize]);
            let (from, to) = (PutSource::Window { owner: at.paths.me(), window: at.far }, WindowId::POOL);
            let to_offset = staging + u64::from(layout.returned_at(&at.paths, relay, sums)) * row_bytes;
            let len = u64::from(block.returned(&at.sizing)) * row_bytes;
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
    pub fn return_bytes(paths: &Paths, layout: &DispatchLayout) -> u64 {
        paths.relays().map(|relay| layout.chunks[relay as usize].bytes()).sum()
    }
}

/// Memory of a relay's pool in which it makes sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SumMemory {
    /// Where sums wait until they have been sent: [`outbox_bytes`](RelayTables::outbox_bytes).
    pub outbox: u64,
    /// Where engines pull rows to, if these do: [`pulled_bytes`](RelayTables::pulled_bytes).
    pub pulled: Option<u64>,
}

/// Operand tables of one rank's relay, used again by all calls.
#[derive(Clone, Debug)]
pub struct RelayTables {
    /// One entry per operand of the skeleton.
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
            table: vec![Operand::Empty; Relay::new(paths, chunks).operands()],
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

    /// Constants of the running call, apart from runs, rows and sums.
    pub fn operands(&self, calls: Calls) -> Operands<'_> {
        Operands {
            table: &self.table,
            spans: &self.spans,
            call: calls.value(),
            last_return: calls.last_return(),
            ..Operands::default()
        }
    }

    /// Stage "counts sent": the message to every rank that this one sends counts to, with counts or
    /// without.
    pub fn messages(&mut self, at: &FillContext, counts: bool) {
        self.clear();
        let (paths, control) = (at.paths, at.control);
        for source in paths.count_receivers() {
            let operand = Relay::new(paths, at.chunks).message(source);
            let span = SpanCopy {
                from: PutSource::Window { owner: paths.me(), window: WindowId::CONTROL },
                from_offset: control.message_out(paths.place_of_receiver(source), at.parity),
                to: WindowId::CONTROL,
                to_offset: control.message_in(paths.nodes().node_of(paths.me()), at.parity),
                len: control.message_len(counts),
            };
            self.spans(operand.0, [span]);
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
                        0 => (
                            WindowId::CONTROL,
                            header + at.control.metadata(block.entries()),
                            Index::Contiguous,
                        ),
                        _ => (at.far, staging, of_rows),
                    };
                    let (behind, row_bytes) = match chunk {
                        0 => (
                            at.sizing.landing(block.landed[member as usize]).metadata_at(),
                            at.sizing.metadata_bytes(),
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
    pub fn relay_to_arrivals(
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
                    arrivals.relay_runs(frame, block, (served, member as usize), chunk, numbers, runs);
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

    /// Stage "return rows": the rows of every source, from where they lie on this node, to the
    /// place that the source named; or their partial sums, through [memory](SumMemory) of this
    /// rank.
    pub fn return_rows(
        &mut self,
        at: &FillContext,
        forward: &RelayPlan,
        bins: &Bins,
        parts: ReturnParts,
        memory: SumMemory,
    ) {
        self.clear();
        let relay = Relay::new(at.paths, at.chunks);
        let (mut wait_at, mut first_entry) = (memory.outbox, 0);
        for ((nth, source), block) in (0..).zip(at.paths.sources()).zip(&forward.blocks) {
            let offer = self.offers[source as usize];
            let summed = at.sizing.partial_bytes.filter(|_| parts.rows);
            let rows = match at.sizing.partial_bytes {
                Some(_) => forward.partials_from(nth as usize).len() as u32,
                None => block.entries(),
            };
            let rows = at.sizing.returned(rows, block.entries());
            let pulled = memory.pulled.filter(|_| summed.is_some());
            let chunks = match (summed, pulled) {
                (None, _) => 1,
                (Some(_), None) => at.chunks,
                (Some(_), Some(_)) => relay.pulled_chunks(),
            };
            if let Some(pulled) = pulled {
                let used = block.pulled_chunks(chunks, &at.sizing);
                for chunk in 1..=used {
                    let first = self.spans.len() as u32;
                    let to = pulled + first_entry * at.sizing.return_bytes;
                    self.pull_for_sums(at, block, bins, (chunk, used), to);
                    let count = self.spans.len() as u32 - first;
                    self.table[relay.pulled(nth, chunk).0 as usize] = Operand::Spans { first, count };
                }
            }
            first_entry += u64::from(block.entries());
            let first = self.spans.len() as u32;
            self.return_block(
                at,
                block,
                bins,
                (offer, rows),
                ReturnParts { rows: parts.rows && summed.is_none(), ..parts },
            );
            let mut to_offset = offer;
            for chunk in 1..=chunks {
                let first = if chunk == 1 { first } else { self.spans.len() as u32 };
                if let Some(bytes) = summed {
                    let partials = forward.partials_of(nth as usize, chunk);
                    let len = partials.len() as u64 * bytes;
                    let (first, count) = (partials.start, partials.len() as u32);
                    let to = SumTarget::Partials { window: WindowId::POOL, offset: wait_at };
                    let sum = match pulled {
                        Some(_) if count == 0 => Operand::Empty,
                        Some(pulled) => Operand::SumPulled {
                            first,
                            count,
                            pulled,
                            entries: forward.entries(),
                            to: wait_at,
                        },
                        None => Operand::SumRows { first, count, to },
                    };
                    self.table[relay.partials(nth, chunk).0 as usize] = sum;
                    let from = PutSource::Window { owner: at.paths.me(), window: WindowId::POOL };
                    let to = at.far;
                    if pulled.is_none() || len > 0 {
                        self.spans.push(SpanCopy { from, from_offset: wait_at, to, to_offset, len });
                    }
                    (to_offset, wait_at) = (to_offset + len, wait_at + len);
                }
                let count = self.spans.len() as u32 - first;
                self.table[relay.returned(nth, chunk).0 as usize] = Operand::Spans { first, count };
            }
        }
    }

    /// Bytes in which sums wait until they have been sent.
    pub fn outbox_bytes(at: &FillContext, forward: &RelayPlan) -> u64 {
        at.sizing.partial_bytes.map_or(0, |bytes| u64::from(forward.partials.count()) * bytes)
    }

    /// Bytes of rows that engines pull before a kernel sums them, those of this rank counted.
    pub fn pulled_bytes(at: &FillContext, forward: &RelayPlan) -> u64 {
        at.sizing.partial_bytes.map_or(0, |_| u64::from(forward.entries()) * at.sizing.return_bytes)
    }

    /// The rows of one chunk of a block that other ranks of this node have, to this rank's pool
    /// from byte `to` on, each to the place of its entry.
    fn pull_for_sums(
        &mut self,
        at: &FillContext,
        block: &Block,
        bins: &Bins,
        (chunk, chunks): (u8, u8),
        to: u64,
    ) {
        let (me, row_bytes) = (at.paths.me(), at.sizing.return_bytes);
        let (mut segments, mut entry) = (block.segments.iter(), 0);
        let (first, mut behind) = (self.spans.len(), self.spans.len());
        for &owner in at.paths.served_by(me) {
            if owner == me {
                behind = self.spans.len();
            }
            for segment in segments.by_ref().take(bins.of(owner).len()) {
                let rows = Block::chunk(segment.count, chunk, chunks);
                if owner != me && !rows.is_empty() {
                    let from_row = u64::from(segment.to_row) + u64::from(rows.start);
                    self.spans.push(SpanCopy {
                        from: PutSource::Window { owner, window: WindowId::POOL },
                        from_offset: self.bases[owner as usize] + from_row * row_bytes,
                        to: WindowId::POOL,
                        to_offset: to + (entry + u64::from(rows.start)) * row_bytes,
                        len: rows.len() as u64 * row_bytes,
                    });
                }
                entry += u64::from(segment.count);
            }
        }
        // From the next rank on: if all relays began with the same one, they would share its link.
        self.spans[first..].rotate_left(behind - first);
    }

    fn return_block(
        &mut self,
        at: &FillContext,
        block: &Block,
        bins: &Bins,
        (offer, returned): (u64, RowBuffer),
        parts: ReturnParts,
    ) {
        let (row_bytes, words) = (at.sizing.return_bytes, u64::from(at.sizing.return_words) * 4);
        let sums = at.sizing.rank_sums;
        let segments = if sums { &block.rank_sums } else { &block.segments };
        let (mut segments, mut entry) = (segments.iter(), 0);
        for (&owner, &landed) in at.paths.served_by(at.paths.me()).iter().zip(&block.landed) {
            let chunk = self.bases[owner as usize];
            for segment in segments.by_ref().take(if sums { 1 } else { bins.of(owner).len() }) {
                let (from, to, n) = (u64::from(segment.to_row), entry, u64::from(segment.count));
                let all = [
                    (parts.rows, from * row_bytes, to * row_bytes, n * row_bytes),
                    (
                        parts.weights,
                        at.sizing.offer(landed).metadata_at() + from * words,
                        returned.metadata_at() + to * words,
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

    fn spans(&mut self, operand: u32, spans: impl IntoIterator<Item = SpanCopy>) {
        let first = self.spans.len() as u32;
        self.spans.extend(spans);
        self.table[operand as usize] = Operand::Spans { first, count: self.spans.len() as u32 - first };
    }
}
