//! Fills a skeleton's operands from a layout. Pure, and without allocation once the tables have grown.
//!
//! A real call (`ep`) and an unrolled one (`story`) fill their operands here, count with the same
//! [`Calls`](super::Calls), look into the same [`Control`] and follow the same skeletons: so far, what is proved is what
//! runs. What a story plays in its own words is the rest: when the planner and the caller touch memory, and which extent
//! a pool gives. It takes the lowest, the hardest case; a real pool may be kinder.

use super::direct::Direct;
use super::{Control, Operand, Place, SpanCopy, Tag, WindowId, chunk_bytes, chunk_weights_offset};
use crate::plan::{ExpertMap, Layout, Sorted};
use crate::topology::NodeMap;

/// Operand tables of one `ExpertParallel`, reused by all its calls.
#[derive(Clone, Debug)]
pub struct Tables {
    /// One entry per slot of the skeletons.
    pub table: Vec<Operand>,
    /// Spans of `Put`s.
    pub spans: Vec<SpanCopy>,
    /// What the entry signal says to each peer.
    pub tags: Vec<Tag>,
    /// Per owner: where its chunk lies when it is summed.
    pub bases: Vec<u64>,
    /// Per rank: where what this rank puts there lands.
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

impl Tables {
    /// Empty tables for a group of `ranks`.
    pub fn new(ranks: u32) -> Self {
        Tables {
            table: vec![Operand::Empty; 2 * ranks as usize + 2],
            spans: Vec::new(),
            tags: vec![Tag::default(); ranks as usize],
            bases: vec![0; ranks as usize],
            landing: vec![0; ranks as usize],
        }
    }

    /// Forgets the last call.
    pub fn clear(&mut self) {
        self.table.fill(Operand::Empty);
        self.spans.clear();
    }

    /// Dispatch, stage "counts": the publication to every remote rank's mailbox.
    pub fn publications(
        &mut self,
        at: &At,
        control: &Control,
        parity: u64,
        map: &ExpertMap,
        sorted: &Sorted,
    ) {
        self.clear();
        for peer in at.remote() {
            let first = sorted.starts[map.slots_of(peer).start as usize];
            let entries = crate::plan::entries_to(map, sorted, peer);
            let spans = control.to_mailbox(at.me, parity, first, entries);
            self.set_spans(Direct::publication(peer).0, &spans);
        }
    }

    /// Return, before its entry: cuts staging that begins at `start` into a place for the chunk of each remote rank.
    /// It takes [`At::staging_bytes`].
    pub fn stage(&mut self, at: &At, layout: &Layout, row_bytes: u64, start: u64) {
        let mut next = start;
        for owner in at.remote() {
            self.bases[owner as usize] = next;
            next += chunk_bytes(layout.chunk_rows[owner as usize], row_bytes);
        }
    }

    /// Return, stage "entry": neighbours are told where this rank's chunk lies, the others where theirs has its place.
    pub fn offer(&mut self, at: &At, tag: Tag, chunk: u64) {
        for (peer, told) in (0..).zip(&mut self.tags) {
            *told = Tag { base: if at.near(peer) { chunk } else { self.bases[peer as usize] }, ..tag };
        }
    }

    /// Return, after its entry: what `peer` offered.
    pub fn offered(&mut self, at: &At, peer: u32, base: u64) {
        let known = if at.near(peer) { &mut self.bases } else { &mut self.landing };
        known[peer as usize] = base;
    }

    /// Stage "rows" of both dispatches: runs to every rank, to where `landing` says.
    pub fn rows(&mut self, at: &At, layout: &Layout) {
        let direct = Direct::new(at.nodes, at.me);
        for peer in 0..at.nodes.ranks() {
            let runs = layout.runs_to(peer);
            self.table[direct.rows(peer).0 as usize] = Operand::Rows {
                first: runs.start,
                count: runs.end - runs.start,
                to: WindowId::POOL,
                base: self.landing[peer as usize],
            };
        }
    }

    /// Stage "home" of a return: of this rank's chunk, the segments of each remote source to where that source said.
    pub fn home(&mut self, at: &At, layout: &Layout, row_bytes: u64, parts: Parts) {
        let chunk = self.bases[at.me as usize];
        for peer in at.remote() {
            let first = self.spans.len() as u32;
            let rows_there = layout.rows_from(peer);
            let mut to_row = 0;
            for (row, rows) in layout.segments_of(peer).filter(|&(_, rows)| rows > 0) {
                let mut span = |from_offset, to_offset, len| {
                    self.spans.push(SpanCopy {
                        from: Place::Own(WindowId::POOL),
                        from_offset: chunk + from_offset,
                        to: WindowId::POOL,
                        to_offset: self.landing[peer as usize] + to_offset,
                        len,
                    });
                };
                let (from, to, n) = (u64::from(row), u64::from(to_row), u64::from(rows));
                if parts.rows {
                    span(from * row_bytes, to * row_bytes, n * row_bytes);
                }
                if parts.weights {
                    span(
                        chunk_weights_offset(layout.landed, row_bytes) + from * 4,
                        chunk_weights_offset(rows_there, row_bytes) + to * 4,
                        n * 4,
                    );
                }
                to_row += rows;
            }
            let count = self.spans.len() as u32 - first;
            self.table[Direct::home(peer).0 as usize] = Operand::Spans { first, count };
        }
    }

    /// Stage "sum" of a return.
    pub fn sum(&mut self, at: &At, parts: Parts) {
        let direct = Direct::new(at.nodes, at.me);
        let pick = |wanted, operand| if wanted { operand } else { Operand::Empty };
        self.table[direct.sum().0 as usize] = pick(parts.rows, Operand::SumRows);
        self.table[direct.weights().0 as usize] = pick(parts.weights, Operand::FetchWeights);
    }

    fn set_spans(&mut self, slot: u32, spans: &[SpanCopy]) {
        let first = self.spans.len() as u32;
        self.spans.extend(spans.iter().filter(|span| span.len > 0));
        self.table[slot as usize] = Operand::Spans { first, count: self.spans.len() as u32 - first };
    }
}

/// Who fills: a rank among its nodes.
#[derive(Clone, Copy, Debug)]
pub struct At<'a> {
    /// Which ranks share memory.
    pub nodes: &'a NodeMap,
    /// This rank.
    pub me: u32,
}

impl At<'_> {
    /// The ranks of other nodes, ascending.
    pub fn remote(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.nodes.ranks()).filter(|&peer| !self.near(peer))
    }

    /// Whether a rank is of this node.
    pub fn near(&self, peer: u32) -> bool {
        self.nodes.same_node(self.me, peer)
    }

    /// Bytes of a return's staging: the chunks of all remote ranks.
    pub fn staging_bytes(&self, layout: &Layout, row_bytes: u64) -> u64 {
        self.remote().map(|owner| chunk_bytes(layout.chunk_rows[owner as usize], row_bytes)).sum()
    }
}
