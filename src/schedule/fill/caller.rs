//! Operands of a rank's own part.

use super::Setting;
use crate::plan::Layout;
use crate::schedule::{Caller, Index, Operand, Place, SpanCopy, Tag, Target, WindowId};
use crate::topology::{Paths, Route};

/// Operand tables of one rank's callers, used again by all calls.
#[derive(Clone, Debug)]
pub struct CallerTables {
    /// One entry per slot of the skeletons.
    pub table: Vec<Operand>,
    /// Spans of `Put`s.
    pub spans: Vec<SpanCopy>,
    /// What the entry signal says to each peer, and the offer to each relay.
    pub tags: Vec<Tag>,
    /// Per owner: where its chunk lies when it is summed.
    pub bases: Vec<u64>,
    /// Per rank: where rows land there. What it hands on it takes behind them.
    pub landing: Vec<u64>,
}

/// Which parts of a chunk come home in a return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
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
        }
    }

    /// Forgets the last call.
    pub fn clear(&mut self) {
        self.table.fill(Operand::Empty);
        self.spans.clear();
    }

    /// Dispatch: rows, to where `landing` says. With `noted`, what goes with them, too, and the headers of the blocks:
    /// once per layout, since whoever follows it later knows them.
    pub fn rows(&mut self, at: &Setting, layout: &Layout, noted: bool) {
        self.clear();
        let (paths, sizing) = (at.paths, at.sizing);
        let caller = Caller::new(paths, at.chunks);
        let index = if layout.whole { Index::Straight } else { Index::Listed };
        for peer in 0..paths.ranks() {
            let runs = layout.runs_to(peer);
            let (first, count) = (runs.start, runs.end - runs.start);
            let base = self.landing[peer as usize];
            let rows = Operand::Rows {
                first,
                count,
                from: Place::Input,
                from_offset: 0,
                index,
                to: WindowId::POOL,
                base,
                row_bytes: sizing.row_bytes,
            };
            let notes = Operand::Rows {
                first,
                count,
                from: Place::Notes,
                from_offset: 0,
                index: Index::Straight,
                to: WindowId::POOL,
                base: base + sizing.landing(layout.sizes[peer as usize]).notes_at(),
                row_bytes: sizing.note_bytes(),
            };
            self.table[caller.rows(peer).0 as usize] = rows;
            if noted {
                self.table[caller.notes(peer).0 as usize] = notes;
            }
        }
        for (nth, relay) in (0..).zip(paths.relays()) {
            if noted {
                self.header(at, layout, nth, relay);
            }
            for chunk in (1..=at.chunks).filter(|_| paths.route() == Route::Pxn) {
                self.table[caller.block(relay, chunk).0 as usize] = Operand::Rows {
                    first: layout.block_runs[nth as usize] + u32::from(chunk) - 1,
                    count: 1,
                    from: Place::Input,
                    from_offset: 0,
                    index,
                    to: WindowId::POOL,
                    base: self.landing[relay as usize]
                        + sizing.landing(layout.sizes[relay as usize]).bytes()
                        + u64::from(layout.blocks[nth as usize].first) * sizing.row_bytes,
                    row_bytes: sizing.row_bytes,
                };
            }
        }
    }

    fn header(&mut self, at: &Setting, layout: &Layout, nth: u32, relay: u32) {
        let first = self.spans.len() as u32;
        self.spans.push(SpanCopy {
            from: Place::Window { owner: at.paths.me(), window: WindowId::CONTROL },
            from_offset: at.control.header_out(nth, at.parity),
            to: WindowId::CONTROL,
            to_offset: at.control.header_in(at.paths.place_at(relay), at.parity),
            len: at.control.header_len(layout.blocks[nth as usize].entries()),
        });
        let slot = Caller::new(at.paths, at.chunks).header(relay);
        self.table[slot.0 as usize] = Operand::Spans { first, count: 1 };
    }

    /// Return, before its entry: cuts staging that begins at `start` into a place for the rows that each relay brings
    /// home. It takes [`CallerTables::home_bytes`].
    pub fn stage(&mut self, paths: &Paths, layout: &Layout, start: u64) {
        let mut next = start;
        for relay in paths.relays() {
            self.bases[relay as usize] = next;
            next += layout.chunks[relay as usize].bytes();
        }
    }

    /// Return, stage "entry": neighbours are told where this rank's chunk lies, relays where this rank's rows have their
    /// place.
    pub fn offer(&mut self, paths: &Paths, tag: Tag, chunk: u64) {
        for (peer, told) in (0..).zip(&mut self.tags) {
            *told = Tag { base: if paths.near(peer) { chunk } else { self.bases[peer as usize] }, ..tag };
        }
    }

    /// Stage "pull" of a return: from where each owner offers its chunk (`bases`) the rows of this rank, to `home`, where they
    /// lie as they lay when they went out.
    pub fn pull(&mut self, at: &Setting, layout: &Layout, home: u64) {
        self.clear();
        let (caller, row_bytes) = (Caller::new(at.paths, at.chunks), at.sizing.home_bytes);
        for peer in at.paths.locals().chain([at.paths.me()]) {
            let (first, runs) = (self.spans.len() as u32, layout.runs_to(peer));
            let base = self.bases[peer as usize];
            let runs = layout.runs[runs.start as usize..runs.end as usize].iter().filter(|run| run.count > 0);
            self.spans.extend(runs.map(|run| SpanCopy {
                from: Place::Window { owner: peer, window: WindowId::POOL },
                from_offset: base + u64::from(run.to_row) * row_bytes,
                to: WindowId::POOL,
                to_offset: home + u64::from(run.first) * row_bytes,
                len: u64::from(run.count) * row_bytes,
            }));
            let count = self.spans.len() as u32 - first;
            self.table[caller.rows(peer).0 as usize] = Operand::Spans { first, count };
        }
    }

    /// Stage "sum" of a return.
    pub fn sum(&mut self, at: &Setting, layout: &Layout, parts: Parts) {
        self.clear();
        let caller = Caller::new(at.paths, at.chunks);
        let rows = Operand::SumRows { first: 0, count: layout.tokens, to: Target::Output };
        let pick = |wanted, operand| if wanted { operand } else { Operand::Empty };
        self.table[caller.sum().0 as usize] = pick(parts.rows, rows);
        self.table[caller.weights().0 as usize] = pick(parts.weights, Operand::FetchWeights);
    }

    /// Bytes of a return's staging: what all relays bring home.
    pub fn home_bytes(paths: &Paths, layout: &Layout) -> u64 {
        paths.relays().map(|relay| layout.chunks[relay as usize].bytes()).sum()
    }
}
