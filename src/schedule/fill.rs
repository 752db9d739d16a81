//! Fills a skeleton's operands from a layout. Pure, and without allocation once the tables have grown.
//!
//! The same functions serve the real calls (`ep`) and the unrolled ones that `prove` reads, so what is
//! proved is what runs.

use super::direct::Direct;
use super::{Control, Operand, Place, SpanCopy, Tag, WindowId, chunk_weights_offset};
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
}

/// Which parts of a chunk come home in a return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// Stage "rows" of both dispatches: runs to every rank, from the start of the extent it announced.
    pub fn rows(&mut self, at: &At, layout: &Layout, landing: &[u64]) {
        let direct = Direct::new(at.nodes, at.me);
        for peer in 0..at.nodes.ranks() {
            let runs = layout.runs_to(peer);
            self.table[direct.rows(peer).0 as usize] = Operand::Rows {
                first: runs.start,
                count: runs.end - runs.start,
                to: WindowId::POOL,
                base: landing[peer as usize],
            };
        }
    }

    /// Stage "home" of a return: this rank's chunk at `chunk` in its pool, the segments of each remote source to
    /// where that source said (`landing`, per rank).
    pub fn home(
        &mut self,
        at: &At,
        layout: &Layout,
        row_bytes: u64,
        chunk: u64,
        landing: &[u64],
        parts: Parts,
    ) {
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
                        to_offset: landing[peer as usize] + to_offset,
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
        (0..self.nodes.ranks()).filter(|&peer| !self.nodes.same_node(self.me, peer))
    }
}
