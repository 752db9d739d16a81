//! A rank's own routing, sorted by bin: all it can know before the counts of the others arrive.
//!
//! ```text
//!   routing --SortedRouting--> entries by bin and token --InterNodeRows--> tokens of each block, each once
//! ```
//!
//! An all-gather is a dispatch whose rows have no choice: every row goes to every rank.
//!
//! ```text
//!   rank 0   a b        every rank   a b | c | d e f          order: rank, then row
//!   rank 1   c
//!   rank 2   d e f      in 2 segments, of ranks that have 2, 4 and 2 rows:
//!                       rank 0   a b   rank 1   c d e f   rank 2   g h
//!                       every rank   a | c d | g   ||   b | e f | h
//! ```
//!
//! The bins are the segments of each rank, and a token is an entry of one bin at every rank. So the
//! programs of dispatch run it, over relays that take each row once for their node. The return
//! along its layout sums the rows of all ranks by ascending rank: it is reduce-scatter. No rank
//! chooses rows, so they travel whole: a run is a piece of the tensor itself, without any index.

use super::{Bins, ExpertMap, RowLayout, RowMetadata, refill, vec_memory_usage};
use crate::error::PlanError;
use crate::gate::Routing;

/// The entries of one rank, by bin and then token: one for each choice or, rank-major, for each
/// rank that a token reaches.
///
/// Reused from call to call: after the first call of a size nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct SortedRouting {
    /// Entries per bin.
    pub counts: Vec<u32>,
    /// First entry of each bin; one more than there are bins.
    pub starts: Vec<u32>,
    /// Token of each entry.
    pub tokens: Vec<u32>,
    /// Metadata of each entry: [`RowMetadata::words`] words each.
    pub metadata: Vec<u32>,
    /// Which choices, of `[tokens, top_k]`, have no entry: for want of room, or because a mask
    /// leaves no rank for them.
    pub dropped: Vec<bool>,
    /// Place of each entry among the `[tokens, top_k]` choices; rank-major, of the first that it
    /// stands for.
    pub(super) choices: Vec<u32>,
    /// Entries of all tokens before each token; one more than there are tokens.
    pub(super) token_starts: Vec<u32>,
    /// Rank-major: bin of each choice, [`NONE`] where there is none.
    pub(super) choice_bins: Vec<u32>,
    /// Every token has an entry at every rank, and all ranks get the same metadata: one for each
    /// token.
    pub(super) whole: bool,
    pub(super) words: usize,
    /// Per expert: its bin for this rank ([`NONE`] where a mask leaves none), its number there, and
    /// the last token that named it, plus one, to find duplicates.
    experts: Vec<Expert>,
    /// Per bin: where its next entry goes.
    cursors: Vec<u32>,
    /// Rank-major, per bin: the last token with an entry, plus one, and that entry.
    latest: Vec<(u32, u32)>,
}

/// No bin.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, Default)]
struct Expert {
    bin: u32,
    local: u32,
    named: u32,
}

impl SortedRouting {
    /// Checks and sorts `routing` of rank `me`: a counting sort, two passes over the choices.
    ///
    /// # Errors
    /// [`PlanError::ExpertOutOfRange`], [`PlanError::ExpertTwice`], [`PlanError::NanWeight`]: the
    /// first found in token order. The previous contents are lost, but the memory may be filled
    /// again.
    pub fn fill(
        &mut self,
        map: &ExpertMap,
        bins: &Bins,
        metadata: RowMetadata,
        me: u32,
        routing: &Routing,
    ) -> Result<(), PlanError> {
        self.begin(bins);
        self.words = metadata.words(routing.top_k()) as usize;
        self.experts.clear();
        self.experts.extend((0..map.experts()).map(|expert| {
            let Some(slot) = map.slot_for(me, expert) else {
                return Expert { bin: NONE, local: 0, named: 0 };
            };
            let rank = map.rank_of(slot);
            let bin = bins.layout().bin_of(map, slot);
            Expert { bin, local: slot - map.slots_of(rank).start, named: 0 }
        }));
        self.dropped.resize(routing.experts().len(), false);
        if let Err(error) = self.count(map, bins.layout(), routing) {
            self.clear(bins);
            return Err(error);
        }
        self.choice_bins.clear();
        match metadata {
            RowMetadata::Choices | RowMetadata::Indexed => self.place_ranks(routing),
            RowMetadata::Marked => self.place::<2, 0>(routing),
            RowMetadata::Summed => self.place::<2, 1>(routing),
            // Gathered rows have no choices: `fill_gathered` records their sources.
            RowMetadata::Weight | RowMetadata::Gathered => self.place::<1, 0>(routing),
        }
        Ok(())
    }

    /// Takes entries that were sorted elsewhere, of so many tokens with `top_k` choices each: how
    /// many there are in each bin. Which they are is not known here, and no choice is dropped.
    pub fn fill_counted(&mut self, bins: &Bins, (tokens, top_k): (u32, u32), counts: &[u32]) {
        debug_assert_eq!(counts.len(), bins.count() as usize, "each bin has a count");
        self.clear(bins);
        let mut sum = 0_u32;
        for ((count, start), &given) in self.counts.iter_mut().zip(&mut self.starts[1..]).zip(counts) {
            sum = sum.saturating_add(given);
            (*count, *start) = (given, sum);
        }
        self.token_starts.resize(tokens as usize + 1, 0);
        self.dropped.resize(tokens as usize * top_k as usize, false);
    }

    /// Bytes that its tables hold, used or kept for the next call.
    pub fn memory_usage(&self) -> usize {
        let words = [
            &self.counts,
            &self.starts,
            &self.tokens,
            &self.metadata,
            &self.choices,
            &self.token_starts,
            &self.choice_bins,
            &self.cursors,
        ];
        let words: usize = words.into_iter().map(vec_memory_usage).sum();
        words
            + vec_memory_usage(&self.dropped)
            + vec_memory_usage(&self.experts)
            + vec_memory_usage(&self.latest)
    }

    /// Weight of the choices that were dropped, of these `[tokens, top_k]`, added up by ascending
    /// choice.
    pub fn dropped_weight(&self, weights: &[f32]) -> f64 {
        let dropped = self.dropped.iter().zip(weights).filter(|(dropped, _)| **dropped);
        // A sum of nothing by `Iterator::sum` is -0.
        dropped.fold(0.0, |sum, (_, &weight)| sum + f64::from(weight))
    }

    /// Number of entries.
    pub fn entries(&self) -> usize {
        self.tokens.len()
    }

    /// Number of tokens, with entries or without.
    pub fn tokens_here(&self) -> u32 {
        self.token_starts.len() as u32 - 1
    }

    /// Tokens of the entries for these bins.
    pub fn tokens_of(&self, bins: std::ops::Range<u32>) -> &[u32] {
        &self.tokens[self.starts[bins.start as usize] as usize..self.starts[bins.end as usize] as usize]
    }

    /// Metadata of the entries for these bins: all bins of a rank, if every row goes to every rank.
    pub fn metadata_of(&self, bins: std::ops::Range<u32>) -> &[u32] {
        if self.whole {
            return &self.metadata;
        }
        let at = |bin: u32| self.starts[bin as usize] as usize * self.words;
        &self.metadata[at(bins.start)..at(bins.end)]
    }

    /// Writes the metadata of all entries to where rows lie packed, those of bin `b` from row
    /// `starts[b]` on.
    pub fn copy_metadata(&self, starts: &[u32], packed: &mut [u32]) {
        for (bin, &start) in (0..self.counts.len() as u32).zip(starts) {
            let metadata = self.metadata_of(bin..bin + 1);
            packed[start as usize * self.words..][..metadata.len()].copy_from_slice(metadata);
        }
    }

    /// For each choice, `[tokens, top_k]`, the row of its entry, where those of bin `b` lie from
    /// row `starts[b]` on; and the place of its bin in the order of the sum. -1 where there is no
    /// entry. Rank-major, an entry stands for several choices: all have its row, and the first has
    /// the place.
    pub fn places(&self, bins: &Bins, top_k: u32, starts: &[u32], [rows, order]: [&mut Vec<i32>; 2]) {
        let choices = self.tokens_here() as usize * top_k as usize;
        refill(rows, choices, -1);
        refill(order, choices, -1);
        for (place, &bin) in (0..).zip(bins.in_order()) {
            let bin = bin as usize;
            let entries = self.starts[bin] as usize..self.starts[bin + 1] as usize;
            for (&choice, row) in self.choices[entries].iter().zip(starts[bin]..) {
                (rows[choice as usize], order[choice as usize]) = (row as i32, place);
            }
        }
        // Rank-major, the first choice of a bin has the row of all. Expert-major, each has its own.
        let top_k = top_k as usize;
        for (bins, rows) in self.choice_bins.chunks_exact(top_k).zip(rows.chunks_exact_mut(top_k)) {
            for nth in 1..top_k {
                if rows[nth] == -1
                    && bins[nth] != NONE
                    && let Some(first) = bins[..nth].iter().position(|&bin| bin == bins[nth])
                {
                    rows[nth] = rows[first];
                }
            }
        }
    }

    /// Leaves no entries and no tokens, as for an empty routing.
    pub fn clear(&mut self, bins: &Bins) {
        self.begin(bins);
        self.tokens.clear();
        self.metadata.clear();
        self.choices.clear();
        self.choice_bins.clear();
    }

    /// Counts nothing yet. What sorting writes keeps the entries of the last call.
    fn begin(&mut self, bins: &Bins) {
        refill(&mut self.counts, bins.count() as usize, 0);
        refill(&mut self.starts, bins.count() as usize + 1, 0);
        refill(&mut self.latest, bins.count() as usize, (0, 0));
        self.dropped.clear();
        refill(&mut self.token_starts, 1, 0);
        self.whole = false;
    }

    /// Notes at each entry of a bin its row in visible order, from row `first` on.
    pub(super) fn number(&mut self, bin: u32, first: u32) {
        let words = self.words;
        let entries = self.starts[bin as usize] as usize..self.starts[bin as usize + 1] as usize;
        let metadata = self.metadata[entries.start * words..entries.end * words].chunks_exact_mut(words);
        for (of_row, row) in metadata.zip(first..) {
            of_row[words - 1] = row + 1;
        }
    }

    /// Notes at each entry of a bin the sum that its choice is part of.
    pub(super) fn note_sums(&mut self, bin: u32, sum_of: impl Fn(u32) -> u32) {
        let words = self.words;
        let entries = self.starts[bin as usize] as usize..self.starts[bin as usize + 1] as usize;
        let metadata = self.metadata[entries.start * words..entries.end * words].chunks_exact_mut(words);
        for (of_row, &choice) in metadata.zip(&self.choices[entries]) {
            of_row[0] = sum_of(choice) + 1;
        }
    }

    /// Puts the entries of a bin in another order: the nth becomes what entry `from[n]` of the bin
    /// was.
    pub(super) fn permute(&mut self, bin: u32, from: &[u32], spare: &mut Vec<u32>) {
        let first = self.starts[bin as usize] as usize;
        for (table, words) in
            [(&mut self.tokens, 1), (&mut self.choices, 1), (&mut self.metadata, self.words)]
        {
            let entries = &mut table[first * words..][..from.len() * words];
            spare.clear();
            spare.extend_from_slice(entries);
            for (to, &entry) in entries.chunks_exact_mut(words).zip(from) {
                to.copy_from_slice(&spare[entry as usize * words..][..words]);
            }
        }
    }

    fn count(&mut self, map: &ExpertMap, layout: RowLayout, routing: &Routing) -> Result<(), PlanError> {
        let (columns, merges) = (routing.top_k() as usize, layout.merges());
        let (mut entries, mut token) = (0, 0);
        let choices = routing.experts().chunks_exact(columns).zip(routing.weights().chunks_exact(columns));
        for (ids, weights) in choices {
            for (k, (&id, weight)) in (0..).zip(ids.iter().zip(weights)) {
                if id == -1 {
                    continue;
                }
                let Some(expert) = usize::try_from(id).ok().and_then(|id| self.experts.get_mut(id)) else {
                    return Err(PlanError::ExpertOutOfRange { token, k, expert: id, experts: map.experts() });
                };
                if weight.is_nan() {
                    return Err(PlanError::NanWeight { token, k });
                }
                if std::mem::replace(&mut expert.named, token + 1) == token + 1 {
                    return Err(PlanError::ExpertTwice { token, expert: id });
                }
                let Some(count) = self.counts.get_mut(expert.bin as usize) else {
                    self.dropped[token as usize * columns + k as usize] = true;
                    continue;
                };
                if merges {
                    let latest = &mut self.latest[expert.bin as usize].0;
                    if std::mem::replace(latest, token + 1) == token + 1 {
                        continue;
                    }
                }
                *count += 1;
                entries += 1;
            }
            token += 1;
            self.token_starts.push(entries);
        }
        Ok(())
    }

    fn reserve(&mut self) {
        let mut sum = 0;
        for (start, &count) in self.starts[1..].iter_mut().zip(&self.counts) {
            sum += count;
            *start = sum;
        }
        let entries = sum as usize;
        refill(&mut self.tokens, entries, 0);
        refill(&mut self.metadata, entries * self.words, 0);
        refill(&mut self.choices, entries, 0);
        self.cursors.clone_from(&self.starts);
    }

    /// A row per choice, with its weight as word `WEIGHT` between marks. Every id was checked by
    /// `count`.
    ///
    /// How many words that is the compiler knows: where it does not, this takes half as long again.
    fn place<const WORDS: usize, const WEIGHT: usize>(&mut self, routing: &Routing) {
        self.reserve();
        let SortedRouting { tokens, choices, metadata, cursors, experts, .. } = self;
        let (metadata, _) = metadata.as_chunks_mut::<WORDS>();
        let entries = tokens.len().min(metadata.len());
        let (tokens, choices, metadata) =
            (&mut tokens[..entries], &mut choices[..entries], &mut metadata[..entries]);
        let (cursors, experts) = (&mut cursors[..], &experts[..]);
        let (k, mut choice) = (routing.top_k() as usize, 0);
        for ((token, ids), weights) in
            (0..).zip(routing.experts().chunks_exact(k)).zip(routing.weights().chunks_exact(k))
        {
            for (&id, weight) in ids.iter().zip(weights) {
                // A bin that is none is beyond all cursors.
                if id >= 0
                    && let Some(cursor) = cursors.get_mut(experts[id as usize].bin as usize)
                {
                    let entry = *cursor as usize;
                    *cursor += 1;
                    tokens[entry] = token;
                    choices[entry] = choice;
                    metadata[entry] = [1; WORDS];
                    metadata[entry][WEIGHT] = weight.to_bits();
                }
                choice += 1;
            }
        }
    }

    /// A row per rank that a token reaches.
    fn place_ranks(&mut self, routing: &Routing) {
        self.reserve();
        self.latest.fill((0, 0));
        let (k, mut choice) = (routing.top_k() as usize, 0);
        for (token, ids) in (0..).zip(routing.experts().chunks_exact(k)) {
            for (nth, &id) in ids.iter().enumerate() {
                let expert = usize::try_from(id).ok().map(|id| self.experts[id]);
                let expert = expert.filter(|expert| expert.bin != NONE);
                self.choice_bins.push(expert.map_or(NONE, |expert| expert.bin));
                if let Some(Expert { bin, local, .. }) = expert {
                    let (last, entry) = &mut self.latest[bin as usize];
                    if *last != token + 1 {
                        let cursor = &mut self.cursors[bin as usize];
                        (*last, *entry) = (token + 1, *cursor);
                        self.tokens[*cursor as usize] = token;
                        self.choices[*cursor as usize] = choice as u32;
                        *cursor += 1;
                    }
                    let of_row = &mut self.metadata[*entry as usize * self.words..][..self.words];
                    of_row[nth] = local + 1;
                    of_row[k + nth] = routing.weights()[choice].to_bits();
                }
                choice += 1;
            }
        }
    }

    /// Keeps at most the first `room(bin)` entries of each bin; the choices of the others are
    /// marked as dropped. Returns whether any was.
    pub fn keep(&mut self, top_k: u32, room: impl Fn(u32) -> u32) -> bool {
        let kept = |bin: usize, count: u32| count.min(room(bin as u32));
        if self.counts.iter().enumerate().all(|(bin, &count)| kept(bin, count) == count) {
            return false;
        }
        let mut to = 0usize;
        for bin in 0..self.counts.len() {
            let (first, count) = (self.starts[bin] as usize, self.counts[bin]);
            let keep = kept(bin, count);
            self.starts[bin] = to as u32;
            self.counts[bin] = keep;
            for entry in first + keep as usize..first + count as usize {
                let (token, choice) = (self.tokens[entry] as usize, self.choices[entry] as usize);
                self.dropped[choice] = true;
                // Rank-major, the row stands for all choices of its rank.
                for other in token * top_k as usize..(token + 1) * top_k as usize {
                    if self.choice_bins.get(other) == Some(&(bin as u32)) {
                        self.dropped[other] = true;
                        self.choice_bins[other] = NONE;
                    }
                }
            }
            let from = first..first + keep as usize;
            self.tokens.copy_within(from.clone(), to);
            self.choices.copy_within(from.clone(), to);
            self.metadata.copy_within(from.start * self.words..from.end * self.words, to * self.words);
            to += keep as usize;
        }
        if let Some(end) = self.starts.last_mut() {
            *end = to as u32;
        }
        self.tokens.truncate(to);
        self.choices.truncate(to);
        self.metadata.truncate(to * self.words);
        self.token_starts.fill(0);
        self.tokens.iter().for_each(|&token| self.token_starts[token as usize + 1] += 1);
        let mut sum = 0;
        self.token_starts.iter_mut().for_each(|start| {
            sum += *start;
            *start = sum;
        });
        true
    }
}

impl SortedRouting {
    /// Every row of rank `me` to every rank, in as many equal segments as each rank has bins. Each
    /// carries its source and, if `carried`, its choices and their weights, as
    /// [`RowMetadata::Gathered`] says.
    pub fn fill_gathered(&mut self, bins: &Bins, me: u32, rows: u32, carried: Option<&Routing>) {
        self.clear(bins);
        let (ranks, segments) = (bins.ranks(), bins.count() / bins.ranks());
        debug_assert!(rows.is_multiple_of(segments), "segments are of equal length");
        self.whole = true;
        self.counts.fill(rows / segments);
        for (start, bin) in self.starts.iter_mut().zip(0..) {
            *start = bin * (rows / segments);
        }
        for _ in 0..ranks {
            self.tokens.extend(0..rows);
        }
        self.choices.clone_from(&self.tokens);
        self.token_starts.extend((1..=rows).map(|row| row * ranks));
        self.words = RowMetadata::Gathered.words(carried.map_or(0, Routing::top_k)) as usize;
        match carried {
            None => refill(&mut self.metadata, rows as usize, me + 1),
            Some(routing) => {
                let top_k = routing.top_k() as usize;
                let choices =
                    routing.experts().chunks_exact(top_k).zip(routing.weights().chunks_exact(top_k));
                for (ids, weights) in choices {
                    self.metadata.push(me + 1);
                    self.metadata.extend(ids.iter().map(|&id| (id + 1) as u32));
                    self.metadata.extend(weights.iter().map(|weight| weight.to_bits()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::gate::{Pattern, synthetic};
    use crate::plan::{ExpertMap, ReceiveMode, RowLayout, SumOrder};
    use crate::topology::NodeMap;

    fn bins(segments: u32, ranks: u32) -> Bins {
        let map = ExpertMap::contiguous(segments * ranks, ranks).unwrap();
        Bins::experts(&map, SumOrder::Expert, &NodeMap::from_labels(&vec![0; ranks as usize]))
    }

    #[test]
    fn every_rank_gets_every_row_segment_by_segment() {
        let (mut sorted, bins) = (SortedRouting::default(), bins(2, 3));
        sorted.fill_gathered(&bins, 1, 4, None);
        assert_eq!(sorted.counts, [2; 6]);
        assert_eq!(sorted.starts, [0, 2, 4, 6, 8, 10, 12]);
        assert_eq!(sorted.tokens_of(bins.of(2)), [0, 1, 2, 3]);
        assert_eq!((sorted.tokens_here(), sorted.entries()), (4, 12));
        assert_eq!(sorted.metadata_of(bins.of(2)), [2; 4], "all are from rank 1");
    }

    #[test]
    fn choices_are_carried_as_they_are() {
        let (mut sorted, bins) = (SortedRouting::default(), bins(1, 2));
        let routing = Routing::new(2, vec![3, -1, 0, 2], vec![0.5, 0.25, 1.0, 0.0]).unwrap();
        sorted.fill_gathered(&bins, 0, 2, Some(&routing));
        let [half, quarter, one] = [0.5f32, 0.25, 1.0].map(f32::to_bits);
        assert_eq!(sorted.metadata_of(bins.of(1)), [1, 4, 0, half, quarter, 1, 1, 3, one, 0]);
    }

    #[test]
    fn counted_entries_have_same_starts_as_sorted_entries() {
        let (map, bins) = (ExpertMap::contiguous(6, 3).unwrap(), bins(2, 3));
        let (mut sorted, mut counted) = (SortedRouting::default(), SortedRouting::default());
        let routing = Routing::new(2, vec![5, 0, 3, -1, 0, 3], vec![0.5; 6]).unwrap();
        sorted.fill(&map, &bins, RowMetadata::Weight, 0, &routing).unwrap();
        counted.fill_gathered(&bins, 0, 4, None);
        counted.fill_counted(&bins, (3, 2), &sorted.counts);
        assert_eq!((&counted.counts, &counted.starts), (&sorted.counts, &sorted.starts));
        assert_eq!((counted.tokens_here(), counted.whole), (3, false));
        assert_eq!(counted.dropped, [false; 6]);
    }

    /// All that is sorted: tables that `fill` leaves, and where each choice is found.
    fn all_of(sorted: &SortedRouting, bins: &Bins, top_k: u32) -> ([Vec<u32>; 6], Vec<bool>, [Vec<i32>; 2]) {
        let [mut rows, mut order] = [Vec::new(), Vec::new()];
        sorted.places(bins, top_k, &sorted.starts, [&mut rows, &mut order]);
        let SortedRouting { counts, tokens, metadata, choices, token_starts, choice_bins, dropped, .. } =
            sorted.clone();
        ([counts, tokens, metadata, choices, token_starts, choice_bins], dropped, [rows, order])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn tables_that_are_used_again_are_those_of_new_ones(
            calls in vec((any::<bool>(), 0..24_u32, 1..=10_u32, any::<u64>()), 1..6),
        ) {
            let (map, nodes) = (ExpertMap::contiguous(12, 4).unwrap(), NodeMap::from_labels(&[0; 4]));
            let mut again = SortedRouting::default();
            for (per_rank, tokens, top_k, seed) in calls {
                let layout = if per_rank { RowLayout::RankMajor } else { RowLayout::ExpertMajor };
                let bins = Bins::of_layout(layout, &map, SumOrder::Expert, &nodes);
                let metadata = RowMetadata::of(layout, ReceiveMode::Exact, false);
                let routing = synthetic(Pattern::Uniform, 12, top_k, tokens, seed, 0).unwrap();
                let mut new = SortedRouting::default();
                new.fill(&map, &bins, metadata, 1, &routing).unwrap();
                again.fill(&map, &bins, metadata, 1, &routing).unwrap();
                let sorted = all_of(&new, &bins, top_k);
                prop_assert_eq!(&all_of(&again, &bins, top_k), &sorted);
                // Each choice has the row of its token among those of its bin.
                for (choice, (&expert, &row)) in routing.experts().iter().zip(&sorted.2[0]).enumerate() {
                    let slot = map.slot_for(1, expert as u32).unwrap();
                    let bin = if per_rank { map.rank_of(slot) } else { slot };
                    let entries = new.starts[bin as usize]..new.starts[bin as usize + 1];
                    prop_assert!(entries.contains(&(row as u32)));
                    prop_assert_eq!(new.tokens[row as usize], choice as u32 / top_k);
                }
            }
        }
    }

    #[test]
    fn a_rank_without_rows_sends_none() {
        let (mut sorted, bins) = (SortedRouting::default(), bins(2, 2));
        sorted.fill_gathered(&bins, 0, 0, None);
        assert_eq!((sorted.counts.as_slice(), sorted.entries(), sorted.tokens_here()), (&[0; 4][..], 0, 0));
    }
}
