//! Where sums and fetches find returned rows: terms per token, in the order of the sum, and words
//! per choice.

use super::super::sorted::{NONE, refill};
use super::super::{Counts, InterNodeRows, ReceiveSizes, RowBuffer, SortedRouting};
use super::{DispatchLayout, PlanContext, Summand};
use crate::dtype::PARTIAL;

impl DispatchLayout {
    pub(super) fn place_terms(
        &mut self,
        frame: &PlanContext,
        sorted: &SortedRouting,
        counts: &Counts,
        sizes: &ReceiveSizes,
    ) {
        let (bins, paths) = (frame.bins, frame.paths);
        self.held_by.clear();
        self.chunks.clear();
        for rank in 0..bins.ranks() {
            let near = paths.same_node(rank);
            self.held_by.push(if near { rank } else { paths.me() });
            let rows = if near { sizes.rows[rank as usize] } else { 0 };
            self.chunks.push(frame.sizing.offer(rows));
        }
        for (relay, block) in paths.relays().zip(&self.blocks) {
            let entries = block.entries();
            self.chunks[relay as usize] = RowBuffer { rows: entries, ..frame.sizing.offer(entries) };
        }
        self.term_starts.clone_from(&sorted.token_starts);
        refill(&mut self.terms, sorted.entries(), Summand::default());
        refill(&mut self.choices, sorted.entries(), 0);
        refill(&mut self.partials, sorted.entries(), 0);
        self.cursors.clone_from(&sorted.token_starts);
        let DispatchLayout { terms, choices, partials, cursors, home_rows, .. } = self;
        let (terms, choices, partials) = (&mut terms[..], &mut choices[..], &mut partials[..]);
        let cursors = &mut cursors[..];
        // Bin by bin in the order of the sum: each token's terms come out in that order without a
        // comparison.
        for bin in bins.in_order().iter().map(|&bin| bin as usize) {
            let owner = paths.relay_to(bins.rank_of(bin as u32));
            let (entries, partial) =
                (sorted.starts[bin] as usize..sorted.starts[bin + 1] as usize, bins.partial_of(bin as u32));
            let first =
                if paths.same_node(owner) { sizes.begin[bin] + counts.below[bin] } else { home_rows[bin] };
            let tokens = sorted.tokens[entries.clone()].iter().zip(&sorted.choices[entries]);
            for (row, (&token, &choice)) in (first..).zip(tokens) {
                let cursor = &mut cursors[token as usize];
                let term = *cursor as usize;
                *cursor += 1;
                terms[term] = Summand { owner, row };
                choices[term] = choice;
                partials[term] = partial;
            }
        }
    }

    pub(super) fn place_groups(&mut self, frame: &PlanContext, crossing: &InterNodeRows) {
        self.sums.clear();
        self.sum_starts.clear();
        self.sum_choices.clear();
        self.groups.clear();
        self.group_starts.clear();
        if !frame.bins.order().has_partials() {
            return;
        }
        if frame.sizing.partial_bytes.is_some() {
            self.sum_starts.push(0);
            self.number_partials(frame, crossing);
        }
        self.group_starts.push(0);
        for token in 0..self.tokens as usize {
            let (mut first, last) = (self.term_starts[token] as usize, self.term_starts[token + 1] as usize);
            while first < last {
                let partial = self.partials[first];
                let same = self.partials[first..last].iter().take_while(|&&other| other == partial);
                let next = first + same.count();
                self.place_group(frame, first..next);
                first = next;
            }
            self.group_starts.push(self.groups.len() as u32);
            if frame.sizing.partial_bytes.is_some() {
                self.sum_starts.push(self.sums.len() as u32);
            }
        }
    }

    /// Relays sum the block row by row, and a row's groups in the order of the sum, so relay and
    /// source count alike.
    fn number_partials(&mut self, frame: &PlanContext, crossing: &InterNodeRows) {
        refill(&mut self.home_partials, self.terms.len(), 0);
        for ((nth, relay), block) in frame.paths.relays().enumerate().zip(&self.blocks) {
            let mut next = 0;
            for &token in crossing.tokens_of(nth) {
                let terms = self.term_starts[token as usize]..self.term_starts[token as usize + 1];
                let mut last = NONE;
                for term in terms.map(|term| term as usize).filter(|&term| self.terms[term].owner == relay) {
                    let partial = self.partials[term];
                    next += u32::from(std::mem::replace(&mut last, partial) != partial);
                    self.home_partials[term] = next - 1;
                }
            }
            self.chunks[relay as usize] = RowBuffer { rows: next, ..frame.sizing.home(0, block.entries()) };
        }
    }

    /// One group: its terms or, if a relay sums them, the partial that it brings.
    fn place_group(&mut self, frame: &PlanContext, terms: std::ops::Range<usize>) {
        let owner = self.terms[terms.start].owner;
        if frame.sizing.partial_bytes.is_none() {
            self.groups.push(terms.len() as u32);
        } else if frame.paths.same_node(owner) {
            self.groups.push(terms.len() as u32);
            self.sums.extend_from_slice(&self.terms[terms.clone()]);
            self.sum_choices.extend_from_slice(&self.choices[terms]);
        } else {
            self.groups.push(PARTIAL);
            self.sums.push(Summand { owner, row: self.home_partials[terms.start] });
            self.sum_choices.push(self.choices[terms.start]);
        }
    }

    /// One word per choice, out of those behind the row that stands for it.
    pub(super) fn place_fetched(&mut self, frame: &PlanContext, sorted: &SortedRouting) {
        self.fetched.clear();
        self.places.clear();
        if sorted.choice_bins.is_empty() {
            return;
        }
        let words = frame.sizing.words_home;
        refill(&mut self.row_of_bin, frame.bins.count() as usize, Summand::default());
        for token in 0..self.tokens {
            let terms =
                self.term_starts[token as usize] as usize..self.term_starts[token as usize + 1] as usize;
            for term in terms {
                let bin = sorted.choice_bins[self.choices[term] as usize];
                self.row_of_bin[bin as usize] = self.terms[term];
            }
            for place in token * self.top_k..(token + 1) * self.top_k {
                let bin = sorted.choice_bins[place as usize];
                if bin != NONE {
                    let Summand { owner, row } = self.row_of_bin[bin as usize];
                    self.fetched.push(Summand { owner, row: row * words + (place - token * self.top_k) });
                    self.places.push(place);
                }
            }
        }
    }

    /// Summands of each token, their starts, and their choices, in the order of the sum; where
    /// relays sum, including partials.
    pub fn summands(&self) -> (&[Summand], &[u32], &[u32]) {
        match self.sum_starts.is_empty() {
            true => (&self.terms, &self.term_starts, &self.choices),
            false => (&self.sums, &self.sum_starts, &self.sum_choices),
        }
    }

    /// The rows that a fetch of one word per choice reads, and the places of the words.
    pub fn fetches(&self) -> (&[Summand], &[u32]) {
        match self.fetched.is_empty() {
            true => (&self.terms, &self.choices),
            false => (&self.fetched, &self.places),
        }
    }
}
