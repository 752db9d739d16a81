//! Placement in every layout and mode: each row, note, sum and fetch of all ranks against what everybody must see.

mod case;
mod placed;
#[path = "../support/mod.rs"]
mod support;

use case::{Play, plays, plays_in_spans, weight};
use placed::{Placed, Rank, routing};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use sidelane::dtype::PARTIAL;
use sidelane::plan::{
    Bins, Counts, Frame, Layout, Mode, Notes, RankSets, RelayOrder, RowLayout, RowRun, Sizes, Sorted, Term,
};
use sidelane::topology::{NodeMap, Paths, Route};
use support::visible::{Row, Visible};

/// Who wrote a row: a token of a source, or nobody: zeros.
type Written = Option<(usize, usize)>;

/// Everything that lands at a rank: rows, and what goes with each.
struct Landed {
    rows: Vec<Option<Written>>,
    notes: Vec<Option<Vec<u32>>>,
    words: usize,
}

impl Landed {
    fn new(rows: usize, words: u32) -> Landed {
        Landed { rows: vec![None; rows], notes: vec![None; rows], words: words as usize }
    }

    fn write(&mut self, run: RowRun, written: impl Fn(u32) -> (usize, usize)) {
        for nth in 0..run.count + run.pad {
            let row = &mut self.rows[(run.to_row + nth) as usize];
            let what = (nth < run.count).then(|| written(run.first + nth));
            assert_eq!(row.replace(what), None, "a row is written once");
        }
    }

    fn note(&mut self, run: RowRun, notes: &[u32]) {
        for nth in 0..run.count + run.pad {
            let words = match nth < run.count {
                true => notes[(run.first + nth) as usize * self.words..][..self.words].to_vec(),
                false => vec![0; self.words],
            };
            let note = &mut self.notes[(run.to_row + nth) as usize];
            assert_eq!(note.replace(words), None, "a note is written once");
        }
    }
}

fn part<T>(all: &[T], range: std::ops::Range<u32>) -> &[T] {
    &all[range.start as usize..range.end as usize]
}

/// What all sources put at a rank, and what relays hand on to it.
fn land(play: &Play, placed: &Placed, rank: usize, rows: usize) -> Landed {
    let mut landed = Landed::new(rows, placed.sizing.words_out);
    for (source, Rank { sorted, layout, .. }) in placed.ranks.iter().enumerate() {
        for &run in part(&layout.runs, layout.runs_to(rank as u32)) {
            landed.write(run, |entry| (source, layout.rows[entry as usize] as usize));
            landed.note(run, &sorted.notes);
        }
    }
    let mates = placed.nodes.members(placed.nodes.node_of(rank as u32));
    let member = mates.iter().position(|&mate| mate as usize == rank).unwrap();
    for &relay in mates.iter().filter(|_| play.case.route == Route::Pxn) {
        let (paths, forward) = (placed.paths(play, relay as usize), &placed.ranks[relay as usize].forward);
        for (nth, source) in paths.sources().enumerate() {
            let Rank { sorted, layout, .. } = &placed.ranks[source as usize];
            let sent = paths.of(source).relays().position(|r| r == relay).unwrap();
            let (mut tokens, mut notes) = (Vec::new(), Vec::new());
            mates.iter().for_each(|&mate| notes.extend(sorted.notes_of(placed.bins.of(mate))));
            for chunk in 1..=play.chunks {
                // What has come with this chunk, at the end of what came before.
                let run = layout.runs[layout.block_runs[sent] as usize + usize::from(chunk) - 1];
                assert_eq!(run.to_row as usize, tokens.len());
                tokens.extend_from_slice(&layout.rows[run.first as usize..][..run.count as usize]);
                for &run in part(&forward.runs, forward.runs_of(nth, chunk, member)) {
                    let rows: Vec<u32> = forward.rows_of(run).collect();
                    let token = |nth: u32| tokens[rows[(nth - run.first) as usize] as usize] as usize;
                    landed.write(run, |nth| (source as usize, token(nth)));
                }
            }
            for &run in part(&forward.runs, forward.runs_of(nth, 0, member)) {
                landed.note(run, &notes);
            }
        }
    }
    landed
}

/// The words that go with a row.
fn note_of(play: &Play, notes: Notes, seen: &Visible, rank: usize, at: usize) -> Vec<u32> {
    let k = play.case.top_k as usize;
    let Some(Row { source, choices, .. }) = &seen.rows[rank][at] else {
        return vec![0; notes.words(k as u32) as usize];
    };
    let bits = |choice: usize| weight(*source, choice).to_bits();
    match notes {
        Notes::Weight => vec![bits(choices[0])],
        Notes::Marked => vec![bits(choices[0]), 1],
        Notes::Gathered => unreachable!("nothing is gathered here"),
        Notes::Choices | Notes::Indexed => {
            let experts = seen.local_experts(&play.case, &play.ids, rank, at);
            let mut words: Vec<u32> = experts.iter().map(|&expert| (expert + 1) as u32).collect();
            words.resize(2 * k, 0);
            choices.iter().for_each(|&choice| words[k + choice % k] = bits(choice));
            words.extend((notes == Notes::Indexed).then_some(at as u32 + 1));
            words
        }
    }
}

/// Per rank: which row in visible order each row is.
type Index = Vec<Vec<usize>>;

fn rows_and_notes_land_once_each(play: &Play, seen: &Visible, placed: &Placed) -> Index {
    let of_rank = |(rank, rows): (usize, &Vec<Option<Row>>)| {
        let landed = land(play, placed, rank, rows.len());
        let visible = |at: usize| match landed.notes[at].as_ref().and_then(|note| note.last()) {
            Some(&row) if play.case.spans && row > 0 => row as usize - 1,
            _ => at,
        };
        let index: Vec<usize> = (0..rows.len()).map(visible).collect();
        for (at, &visible) in index.iter().enumerate() {
            let written = rows[visible].as_ref().map(|row| (row.source, row.token));
            assert_eq!(landed.rows[at], Some(written), "row {at} of rank {rank}");
            let note = note_of(play, placed.notes, seen, rank, visible);
            assert_eq!(landed.notes[at], Some(note), "of row {at}");
        }
        let mut rows = index.clone();
        rows.sort_unstable();
        assert!(rows.into_iter().eq(0..index.len()), "every row lies somewhere");
        index
    };
    seen.rows.iter().enumerate().map(of_rank).collect()
}

/// Relays make as many copies as the sets of ranks, in relay order, have spans.
fn copies_are_those_of_relay_order(play: &Play, seen: &Visible, placed: &Placed) {
    for (me, Rank { forward, .. }) in placed.ranks.iter().enumerate() {
        let paths = placed.paths(play, me);
        let served = paths.served_by(me as u32);
        let copies = paths.sources().map(|source| {
            let goes = |token: usize, rank: &u32| {
                let rows = seen.rows[*rank as usize].iter().flatten();
                rows.filter(|row| (row.source, row.token) == (source as usize, token)).count() > 0
            };
            let (mut sets, mut order) = (RankSets::new(served.len() as u32), RelayOrder::default());
            for token in 0..play.case.counts[source as usize] as usize {
                let set = (0..).zip(served).filter(|(_, rank)| goes(token, rank)).map(|(member, _)| member);
                let set: Vec<u32> = set.collect();
                if !set.is_empty() {
                    sets.push(set);
                }
            }
            order.fill(&sets);
            order.copies(play.chunks)
        });
        assert_eq!(forward.copies(), copies.sum::<u64>(), "at rank {me}");
    }
}

fn sizes_are_told(play: &Play, seen: &Visible, placed: &Placed) {
    let rows: Vec<u32> = seen.rows.iter().map(|rows| rows.len() as u32).collect();
    for (me, Rank { sorted, sizes, layout, .. }) in placed.ranks.iter().enumerate() {
        assert_eq!(sorted.dropped, seen.dropped[me]);
        assert_eq!((&sizes.required, &sizes.rows, &layout.sizes), (&seen.required, &rows, &rows));
        assert_eq!((layout.landed, &layout.padded_per_bin), (rows[me], &seen.padded[me]));
        let mut begin = 0;
        for (bin, padded) in seen.padded[me].iter().enumerate() {
            // Behind a budget all bins are empty, wherever they would have begun.
            assert!(layout.begin[bin] == begin || *padded == 0);
            let segment = &seen.rows[me][begin as usize..][..*padded as usize];
            let real = match play.case.mode {
                Mode::Slots { rows, .. } => rows as usize * play.ids.len(),
                _ => segment.iter().flatten().count(),
            };
            assert_eq!(layout.rows_per_bin[bin], real as i64);
            begin += *padded as u32;
        }
    }
}

/// Rows that relays stage for all their sources lie apart.
fn staged_rows_lie_apart(play: &Play, placed: &Placed) {
    for (me, Rank { layout, forward, .. }) in placed.ranks.iter().enumerate() {
        if play.case.route == Route::Direct || placed.nodes.nodes() == 1 {
            assert_eq!(layout.staged, 0);
            continue;
        }
        let mut taken = vec![false; layout.staged as usize];
        for row in forward.blocks.iter().flat_map(|block| block.first..block.first + block.rows) {
            assert!(!std::mem::replace(&mut taken[row as usize], true), "row {row} at rank {me}");
        }
        // In a budget, rows that are dropped were counted; slots are counted whether they are used or not.
        assert!(play.case.mode != Mode::Eager || taken.iter().all(|&taken| taken));
    }
}

/// Rank and row of a summand that a relay brings home as it is, or holds itself.
fn resolve(play: &Play, placed: &Placed, me: usize, term: Term) -> (usize, usize) {
    let paths = placed.paths(play, me);
    if paths.near(term.owner) {
        return (term.owner as usize, term.row as usize);
    }
    let nth = paths.relays().position(|relay| relay == term.owner).unwrap();
    let mut segments = placed.ranks[me].layout.blocks[nth].segments.iter();
    let mut entry = term.row;
    for &owner in paths.served_by(term.owner) {
        for segment in segments.by_ref().take(placed.bins.of(owner).len()) {
            if entry < segment.count {
                return (owner as usize, (segment.to_row + entry) as usize);
            }
            entry -= segment.count;
        }
    }
    panic!("no such row comes home: {term:?}")
}

/// The summands of one token as they are summed, partials taken apart: (rank, row, choice of the weight).
fn sum_of(play: &Play, placed: &Placed, me: usize, token: usize) -> Vec<Vec<(usize, usize, usize)>> {
    let Rank { layout, .. } = &placed.ranks[me];
    let (terms, starts, choices) = layout.summands();
    let mut at = starts[token] as usize;
    let all = starts[token + 1] as usize - at;
    let own = |at: usize| {
        let (rank, row) = resolve(play, placed, me, terms[at]);
        (rank, row, choices[at] as usize)
    };
    let groups = match layout.group_starts.is_empty() {
        true if all == 0 => Vec::new(),
        true => vec![all as u32],
        false => part(&layout.groups, layout.group_starts[token]..layout.group_starts[token + 1]).to_vec(),
    };
    let sum: Vec<_> = groups
        .into_iter()
        .map(|group| {
            let first = at;
            if group != PARTIAL {
                at += group as usize;
                return (first..at).map(own).collect();
            }
            at += 1;
            let Term { owner, row } = terms[first];
            let nth = placed.paths(play, owner as usize).sources().position(|s| s as usize == me).unwrap();
            let forward = &placed.ranks[owner as usize].forward;
            let partials = forward.partials_from(nth);
            assert!(
                row < partials.len() as u32 && partials.len() as u32 == layout.chunks[owner as usize].rows
            );
            let partial = (partials.start + row) as usize;
            let range = forward.partials.starts[partial]..forward.partials.starts[partial + 1];
            // Entries count through all blocks; the weight of each is in the note of its row.
            let terms = part(&forward.partials.terms, range).iter();
            let found = |term: &Term| (term.owner as usize, term.row as usize, NO_CHOICE);
            terms.map(found).collect()
        })
        .collect();
    assert_eq!(at, starts[token + 1] as usize);
    sum
}

/// A partial has no choice of its own: its relay weighs by the notes.
const NO_CHOICE: usize = usize::MAX;

fn sums_find_their_rows(play: &Play, seen: &Visible, placed: &Placed, index: &Index) {
    for me in 0..play.ids.len() {
        for token in 0..play.case.counts[me] as usize {
            let expected = seen.terms(&play.case, &play.ids, me, token);
            let sum = sum_of(play, placed, me, token);
            assert_eq!(sum.len(), expected.len(), "token {token} of rank {me}");
            for (found, wanted) in sum.iter().flatten().zip(expected.iter().flatten()) {
                let row = index[found.0][found.1];
                assert_eq!((found.0, row), (wanted.0, wanted.1), "token {token} of rank {me}");
                assert!(found.2 == wanted.2 || found.2 == NO_CHOICE);
            }
            assert!(sum.iter().map(Vec::len).eq(expected.iter().map(Vec::len)));
        }
    }
}

fn fetches_find_their_words(play: &Play, seen: &Visible, placed: &Placed, index: &Index) {
    let (k, words) = (play.case.top_k as usize, placed.sizing.words_home);
    for (me, Rank { layout, .. }) in placed.ranks.iter().enumerate() {
        let (fetched, places) = layout.fetches();
        let mut home = vec![None; play.ids[me].len()];
        for (term, &place) in fetched.iter().zip(places) {
            assert!(u64::from(term.row) < layout.chunks[term.owner as usize].notes);
            let (rank, row) = resolve(play, placed, me, Term { row: term.row / words, ..*term });
            let word = (rank, index[rank][row], (term.row % words) as usize);
            assert_eq!(home[place as usize].replace(word), None, "a word comes home once");
        }
        for (choice, word) in home.into_iter().enumerate() {
            let nth = if play.case.layout == RowLayout::RankMajor { choice % k } else { 0 };
            let expected = seen.place_of(me, choice / k, choice).map(|(rank, row)| (rank, row, nth));
            assert_eq!(word, expected, "choice {choice} of rank {me}");
        }
    }
}

fn holds(play: &Play) -> (Visible, Placed) {
    let seen = Visible::new(&play.case, &play.ids);
    let placed = Placed::new(play);
    sizes_are_told(play, &seen, &placed);
    let index = rows_and_notes_land_once_each(play, &seen, &placed);
    staged_rows_lie_apart(play, &placed);
    sums_find_their_rows(play, &seen, &placed, &index);
    fetches_find_their_words(play, &seen, &placed, &index);
    (seen, placed)
}

fn config(cases: u32, seed: u64) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(6000, 11))]

    #[test]
    fn everything_is_where_everybody_looks_for_it(play in plays()) {
        holds(&play);
    }

    #[test]
    fn in_spans_everything_is_where_the_index_says(play in plays_in_spans()) {
        let (seen, placed) = holds(&play);
        copies_are_those_of_relay_order(&play, &seen, &placed);
    }
}

/// The layout of a rank that is alone with these entries: all that is known of them.
fn alone(play: &Play, placed: &Placed, me: usize, sorted: &Sorted) -> String {
    let paths = placed.paths(play, me);
    let (mut counts, mut sizes, mut layout) = (Counts::default(), Sizes::default(), Layout::default());
    let mut crossing = sidelane::plan::Crossing::default();
    crossing.fill(&placed.bins, &paths, sorted);
    let mut words = sorted.counts.clone();
    crossing.staged(&paths, &mut words);
    counts.clear(words.len() as u32);
    counts.add(me as u32, me as u32, &words);
    sizes.fill(&placed.bins, 1, &counts.total, None);
    let (bins, sizing) = (&placed.bins, placed.sizing);
    let frame = Frame { bins, paths, align: 1, chunks: 2, sizing, mode: Mode::Eager };
    layout.fill(&frame, (sorted, &crossing), play.case.top_k, &counts, &sizes);
    format!("{:?} {:?} {:?} {layout:?}", sorted.counts, sorted.starts, sorted.notes)
}

proptest! {
    #![proptest_config(config(3000, 12))]

    #[test]
    fn what_is_kept_is_sorted_as_if_the_rest_had_not_been_chosen(
        play in plays(),
        rooms in prop::collection::vec(0..6u32, 1..8),
    ) {
        let placed = Placed::new(&play);
        let (mut kept, mut fresh) = (Sorted::default(), Sorted::default());
        for (me, ids) in play.ids.iter().enumerate() {
            let fill = |sorted: &mut Sorted, ids: &[i32]| {
                let routing = routing(&play, me, ids);
                sorted.fill(&play.case.map, &placed.bins, placed.notes, me as u32, &routing).unwrap();
            };
            fill(&mut kept, ids);
            let before = kept.counts.clone();
            let room = |bin: u32| rooms[bin as usize % rooms.len()];
            let any = kept.keep(play.case.top_k, room);
            prop_assert_eq!(any, kept.dropped.contains(&true));
            for (bin, (&kept, &all)) in (0..).zip(kept.counts.iter().zip(&before)) {
                prop_assert_eq!(kept, all.min(room(bin)));
            }
            let without = ids.iter().zip(&kept.dropped).map(|(&id, &dropped)| if dropped { -1 } else { id });
            fill(&mut fresh, &without.collect::<Vec<i32>>());
            prop_assert_eq!(alone(&play, &placed, me, &kept), alone(&play, &placed, me, &fresh));
            prop_assert!(!kept.keep(play.case.top_k, room), "once is enough");
        }
    }

    #[test]
    fn what_is_fixed_is_what_all_would_count_with_every_slot_used(
        play in plays(),
        slots in 1..20u32,
        tokens in 0..30u32,
    ) {
        let nodes = NodeMap::from_labels(&play.case.nodes);
        let bins = Bins::of_layout(play.case.layout, &play.case.map, play.case.order, &nodes);
        let ranks = play.ids.len() as u32;
        let full = |source: u32| {
            let paths = Paths::new(&nodes, play.case.route, source);
            let mut words = vec![slots; bins.count() as usize];
            words.extend((0..paths.staged_ranks()).map(|relay| {
                let places: u32 = paths.served_by(relay).iter().map(|&r| bins.of(r).len() as u32 * slots).sum();
                if paths.relays().any(|r| r == relay) { places.min(tokens) } else { 0 }
            }));
            words
        };
        for me in 0..ranks {
            let paths = Paths::new(&nodes, play.case.route, me);
            let (mut all, mut fixed) = (Counts::default(), Counts::default());
            all.clear(bins.count() + paths.staged_ranks());
            (0..ranks).for_each(|source| all.add(me, source, &full(source)));
            fixed.fix(&bins, &paths, slots, tokens);
            prop_assert_eq!(&fixed.total, &all.total);
            prop_assert_eq!(&fixed.below[..bins.count() as usize], &all.below[..bins.count() as usize]);
            // Where rows are staged matters to those alone who send them there.
            for relay in paths.relays().filter(|_| paths.staged_ranks() > 0) {
                let word = (bins.count() + relay) as usize;
                prop_assert_eq!(fixed.below[word], all.below[word]);
            }
        }
    }
}
