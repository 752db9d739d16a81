//! Placement: the numbers that a dispatch is made of, and that its handle keeps.
//!
//! At a rank, rows lie expert-major; the segment of each local expert starts at, and is padded to, a multiple of
//! `align` rows:
//!
//! ```text
//!   | expert slot p                                | slot p + 1 ...
//!   | source 0 | source 1 | ... | source R-1 | pad |
//!              ^ begin[p] + below[p]: where this rank's rows of slot p land
//! ```
//!
//! The pad is written by the last source that has rows for the slot, so no kernel clears anything at the landing.

use super::sorted::refill;
use super::{ExpertMap, Order, Sorted};
use crate::topology::NodeMap;

/// Rows that land next to each other: `rows[first..first + count]`, then `pad` rows of zeros, from row `to_row` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RowRun {
    /// First row at the destination.
    pub to_row: u32,
    /// First entry in the index array.
    pub first: u32,
    /// Entries.
    pub count: u32,
    /// Rows of zeros that follow.
    pub pad: u32,
}

/// One summand of an output row: row `row` of the chunk that `owner` offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Term {
    /// The rank that made the row.
    pub owner: u32,
    /// Row in its chunk.
    pub row: u32,
}

/// What a rank needs to know of the others' counts.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Per slot: rows from ranks below this one.
    pub below: Vec<u32>,
    /// Per slot: rows from all ranks.
    pub total: Vec<u32>,
    /// Per slot of this rank and source rank, `[slots, ranks]`: rows.
    pub received: Vec<u32>,
}

impl Counts {
    /// Forgets everything: no rank has contributed.
    pub fn clear(&mut self, map: &ExpertMap, me: u32) {
        refill(&mut self.below, map.slots() as usize, 0);
        refill(&mut self.total, map.slots() as usize, 0);
        refill(&mut self.received, map.slots_of(me).len() * map.ranks() as usize, 0);
    }

    /// Adds what `source` sends: rows per slot.
    ///
    /// Saturates, so that a nonsensical contribution ends as a size that does not fit anywhere.
    pub fn add(&mut self, map: &ExpertMap, me: u32, source: u32, counts: impl Iterator<Item = u32>) {
        let own = map.slots_of(me);
        for (slot, count) in counts.enumerate().take(self.total.len()) {
            self.total[slot] = self.total[slot].saturating_add(count);
            if source < me {
                self.below[slot] = self.below[slot].saturating_add(count);
            }
            if own.contains(&(slot as u32)) {
                self.received[(slot - own.start as usize) * map.ranks() as usize + source as usize] = count;
            }
        }
    }
}

/// Rows per rank, pads counted: known to every rank from the totals.
#[derive(Clone, Debug, Default)]
pub struct Sizes {
    /// First row of each slot at its rank.
    pub begin: Vec<u32>,
    /// Rows of each rank. Saturated at `u32::MAX` where the totals are nonsensical.
    pub rows: Vec<u32>,
}

impl Sizes {
    /// Sizes for these totals.
    pub fn fill(&mut self, map: &ExpertMap, align: u32, total: &[u32]) {
        refill(&mut self.begin, map.slots() as usize, 0);
        refill(&mut self.rows, map.ranks() as usize, 0);
        for rank in 0..map.ranks() {
            let mut row = 0u32;
            for slot in map.slots_of(rank) {
                self.begin[slot as usize] = row;
                row = row.saturating_add(padded(total[slot as usize], align));
            }
            self.rows[rank as usize] = row;
        }
    }
}

/// `rows` rounded up to a multiple of `align`, saturating.
fn padded(rows: u32, align: u32) -> u32 {
    rows.checked_next_multiple_of(align).unwrap_or(u32::MAX)
}

/// The placement of one dispatch, as one rank sees it.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Tokens of this rank.
    pub tokens: u32,
    /// Choices per token.
    pub top_k: u32,
    /// Token of each entry, by destination slot: what runs index into.
    pub rows: Vec<u32>,
    /// Runs to all destinations, by destination.
    pub runs: Vec<RowRun>,
    /// First run of each destination; one more than there are ranks.
    pub run_starts: Vec<u32>,
    /// Summands of each token, in summation order.
    pub terms: Vec<Term>,
    /// First term of each token; one more than there are tokens.
    pub term_starts: Vec<u32>,
    /// For each term its place in `[tokens, top_k]`.
    pub choices: Vec<u32>,
    /// With [`Order::Rank`]: lengths of groups of terms on one rank. Empty otherwise.
    pub groups: Vec<u32>,
    /// First group of each token; empty with `groups`.
    pub group_starts: Vec<u32>,
    /// Whose memory holds the chunk of each owner when it is summed: its own where this rank can read it.
    pub held_by: Vec<u32>,
    /// Rows in the chunk of each owner as this rank reads it: all its rows, or, where the chunk is put home, this
    /// rank's rows only.
    pub chunk_rows: Vec<u32>,
    /// Rows of this rank's experts, pads counted.
    pub landed: u32,
    /// Per local expert: first row.
    pub begin: Vec<u32>,
    /// Per local expert: rows.
    pub tokens_per_expert: Vec<i64>,
    /// Per local expert: rows, pad counted.
    pub padded_per_expert: Vec<i64>,
    /// Per local expert and source, `[local experts, ranks + 1]`: the row where the source's rows begin; the last
    /// entry is where the pad begins.
    pub arrivals: Vec<u32>,
    /// Weight of each landed row; 0 for pads.
    pub row_weights: Vec<f32>,
    /// Per token: where its next term goes, while terms are placed.
    cursors: Vec<u32>,
}

/// What is the same in every call of one `ExpertParallel`.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Where experts live.
    pub map: &'a ExpertMap,
    /// Which ranks share memory.
    pub nodes: &'a NodeMap,
    /// This rank.
    pub me: u32,
    /// Segments start at multiples of this many rows.
    pub align: u32,
    /// Order of sums.
    pub order: Order,
}

impl Layout {
    /// Places the sorted entries. `row_weights` is sized and zeroed; [`Layout::weigh`] fills it.
    pub fn fill(&mut self, frame: &Frame, sorted: &Sorted, top_k: u32, counts: &Counts, sizes: &Sizes) {
        self.tokens = sorted.token_starts.len() as u32 - 1;
        self.top_k = top_k;
        self.rows.clone_from(&sorted.tokens);
        self.place_runs(frame, sorted, counts, sizes);
        self.place_terms(frame, sorted, counts, sizes);
        self.place_groups(frame.order);
        self.place_landed(frame, counts, sizes);
    }

    fn place_runs(&mut self, frame: &Frame, sorted: &Sorted, counts: &Counts, sizes: &Sizes) {
        self.runs.clear();
        refill(&mut self.run_starts, 1, 0);
        for rank in 0..frame.map.ranks() {
            for slot in frame.map.slots_of(rank).map(|slot| slot as usize) {
                let (count, below, total) = (sorted.counts[slot], counts.below[slot], counts.total[slot]);
                if count > 0 {
                    let last = below + count == total;
                    let pad = if last { padded(total, frame.align) - total } else { 0 };
                    let to_row = sizes.begin[slot] + below;
                    self.runs.push(RowRun { to_row, first: sorted.starts[slot], count, pad });
                }
            }
            self.run_starts.push(self.runs.len() as u32);
        }
    }

    fn place_terms(&mut self, frame: &Frame, sorted: &Sorted, counts: &Counts, sizes: &Sizes) {
        let map = frame.map;
        self.held_by.clear();
        self.chunk_rows.clear();
        for rank in 0..map.ranks() {
            let local = frame.nodes.same_node(frame.me, rank);
            self.held_by.push(if local { rank } else { frame.me });
            self.chunk_rows.push(if local {
                sizes.rows[rank as usize]
            } else {
                entries_to(map, sorted, rank)
            });
        }
        self.term_starts.clone_from(&sorted.token_starts);
        refill(&mut self.terms, sorted.entries(), Term::default());
        refill(&mut self.choices, sorted.entries(), 0);
        self.cursors.clone_from(&sorted.token_starts);
        // Slot by slot in the order of the sum: so each token's terms come out in it, and nothing is compared.
        for slot in map.in_order(frame.order).iter().map(|&slot| slot as usize) {
            let owner = map.rank_of(slot as u32);
            let entries = sorted.starts[slot] as usize..sorted.starts[slot + 1] as usize;
            let first = if frame.nodes.same_node(frame.me, owner) {
                sizes.begin[slot] + counts.below[slot]
            } else {
                sorted.starts[slot] - sorted.starts[map.slots_of(owner).start as usize]
            };
            let tokens = sorted.tokens[entries.clone()].iter().zip(&sorted.choices[entries]);
            for (row, (&token, &choice)) in (first..).zip(tokens) {
                let cursor = &mut self.cursors[token as usize];
                let term = *cursor as usize;
                *cursor += 1;
                self.terms[term] = Term { owner, row };
                self.choices[term] = choice;
            }
        }
    }

    fn place_groups(&mut self, order: Order) {
        self.groups.clear();
        self.group_starts.clear();
        if order != Order::Rank {
            return;
        }
        self.group_starts.push(0);
        for token in self.term_starts.windows(2) {
            let terms = &self.terms[token[0] as usize..token[1] as usize];
            self.groups.extend(terms.chunk_by(|a, b| a.owner == b.owner).map(|group| group.len() as u32));
            self.group_starts.push(self.groups.len() as u32);
        }
    }

    fn place_landed(&mut self, frame: &Frame, counts: &Counts, sizes: &Sizes) {
        self.landed = sizes.rows[frame.me as usize];
        self.begin.clear();
        self.tokens_per_expert.clear();
        self.padded_per_expert.clear();
        for slot in frame.map.slots_of(frame.me).map(|slot| slot as usize) {
            self.begin.push(sizes.begin[slot]);
            self.tokens_per_expert.push(i64::from(counts.total[slot]));
            self.padded_per_expert.push(i64::from(padded(counts.total[slot], frame.align)));
        }
        self.arrivals.clear();
        for (from, &begin) in counts.received.chunks_exact(frame.map.ranks() as usize).zip(&self.begin) {
            self.arrivals.push(begin);
            self.arrivals.extend(from.iter().scan(begin, |row, &count| {
                *row += count;
                Some(*row)
            }));
        }
        refill(&mut self.row_weights, self.landed as usize, 0.0);
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.run_starts.len() as u32 - 1
    }

    /// The runs to one destination.
    pub fn runs_to(&self, rank: u32) -> std::ops::Range<u32> {
        self.run_starts[rank as usize]..self.run_starts[rank as usize + 1]
    }

    /// Rows that this rank has received from `source`, per local expert: (first row, rows), in the order in which
    /// the source sorted them.
    pub fn segments_of(&self, source: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let source = source as usize;
        self.arrivals
            .chunks_exact(self.ranks() as usize + 1)
            .map(move |rows| (rows[source], rows[source + 1] - rows[source]))
    }

    /// Rows that this rank has received from `source`.
    pub fn rows_from(&self, source: u32) -> u32 {
        self.segments_of(source).map(|(_, rows)| rows).sum()
    }

    /// Lays out the weights of the rows of `source`, given in the order in which it sorted them.
    pub fn weigh(&mut self, source: u32, mut weights: impl Iterator<Item = f32>) {
        let mut placed = std::mem::take(&mut self.row_weights);
        for (first, rows) in self.segments_of(source) {
            for (to, from) in placed[first as usize..][..rows as usize].iter_mut().zip(&mut weights) {
                *to = from;
            }
        }
        self.row_weights = placed;
    }
}

/// Entries of this rank for all slots of `rank`.
pub(crate) fn entries_to(map: &ExpertMap, sorted: &Sorted, rank: u32) -> u32 {
    let slots = map.slots_of(rank);
    sorted.starts[slots.end as usize] - sorted.starts[slots.start as usize]
}
