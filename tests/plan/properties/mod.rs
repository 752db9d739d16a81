//! Placement compared with a global sort of the entries of all ranks, whose result has the numbers.

mod blocks;
mod case;
mod returns;

use self::case::{Case, GlobalSort, cases, weight};
use proptest::prelude::*;
use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::{
    Bins, Counts, DispatchLayout, ExpertMap, InterNodeRows, PlanContext, PulledSums, ReceiveSizes, RelayPlan,
    RowLayout, RowMetadata, RowSizes, SortedRouting, SumOrder,
};
use sidelane::topology::{NodeMap, Paths, Route};

/// The library's results for a case.
struct Placed {
    route: Route,
    nodes: NodeMap,
    bins: Bins,
    sizing: RowSizes,
    sizes: ReceiveSizes,
    sorted: Vec<SortedRouting>,
    layouts: Vec<DispatchLayout>,
    forwards: Vec<RelayPlan>,
}

impl Placed {
    fn paths(&self, rank: u32) -> Paths<'_> {
        Paths::new(&self.nodes, self.route, rank)
    }
}

fn routing(case: &Case, rank: u32) -> Routing<'static> {
    let ids = case.ids[rank as usize].clone();
    let weights: Vec<f32> = (0..ids.len() as u32).map(|choice| weight(rank, choice)).collect();
    Routing::new(case.top_k, ids, weights).unwrap()
}

fn placed(case: &Case) -> Placed {
    let map = ExpertMap::from_slots(case.experts, &case.held).unwrap();
    let nodes = NodeMap::from_labels(&case.labels);
    let bins = Bins::of_layout(case.layout, &map, case.order, &nodes);
    let metadata = RowMetadata::of(case.layout, case.mode, false);
    let sums = case.order != SumOrder::Expert && case.route == Route::Pxn && nodes.nodes() > 1;
    let sizing = RowSizes {
        row_bytes: 48,
        return_bytes: 32,
        words_out: metadata.words(case.top_k),
        return_words: if case.layout == RowLayout::RankMajor { case.top_k } else { 1 },
        partial_bytes: sums.then_some(64),
        rank_sums: false,
        pulled_bytes: PulledSums::CHUNK_BYTES,
    };
    let paths = |rank| Paths::new(&nodes, case.route, rank);
    let mut own = vec![(SortedRouting::default(), InterNodeRows::default(), Vec::new()); case.labels.len()];
    for (me, (sorted, crossing, words)) in (0..).zip(&mut own) {
        sorted.fill(&map, &bins, metadata, me, &routing(case, me)).unwrap();
        if let Some(slots) = case.mode.slots() {
            sorted.keep(case.top_k, |_| slots);
        }
        crossing.fill(&bins, &paths(me), sorted);
        words.clone_from(&sorted.counts);
        crossing.staged(&paths(me), words);
    }
    let published: Vec<Vec<u32>> = own.iter().map(|own| own.2.clone()).collect();
    let (mut sizes, mut layouts) = (ReceiveSizes::default(), Vec::new());
    for (me, (sorted, crossing, _)) in (0..).zip(&mut own) {
        let counts = match case.mode.slots() {
            Some(slots) => {
                let (mut counts, most) =
                    (Counts::default(), case.ids.iter().map(Vec::len).max().unwrap_or(0));
                counts.fix(&bins, &paths(me), slots, most as u32 / case.top_k);
                counts
            }
            None => counts(&paths(me), &published),
        };
        sizes.fill(&bins, case.align, &counts.total, case.mode.budget());
        if let Some(budget) = case.mode.budget() {
            let first = |bin: u32| sizes.begin[bin as usize] + counts.below[bin as usize];
            sorted.keep(case.top_k, |bin| budget.saturating_sub(first(bin)));
            crossing.fill(&bins, &paths(me), sorted);
        }
        let (align, chunks, mode) = (case.align, case.chunks, case.mode);
        let frame = PlanContext { bins: &bins, paths: paths(me), align, chunks, sizing, mode };
        let mut layout = DispatchLayout::default();
        layout.fill(&frame, (sorted, crossing), case.top_k, &counts, &sizes);
        layouts.push(layout);
    }
    let forwards = (0..case.ranks()).map(|me| blocks::forward(case, &bins, &paths(me), &layouts)).collect();
    let sorted = own.into_iter().map(|own| own.0).collect();
    Placed { route: case.route, bins, sizing, sizes, sorted, layouts, forwards, nodes }
}

/// Counts of the others that a rank needs: as the sum over all ranks, and as the sum over its local
/// peers and the messages of every other node.
fn counts(paths: &Paths, published: &[Vec<u32>]) -> Counts {
    let (me, nodes, words) = (paths.me(), paths.nodes(), published[0].len());
    let of = |rank: u32| &published[rank as usize][..];
    let (mut all, mut counted) = (Counts::default(), Counts::default());
    all.clear(words as u32);
    counted.clear(words as u32);
    for rank in 0..paths.ranks() {
        all.add(me, rank, of(rank));
        if paths.same_node(rank) {
            counted.add(me, rank, of(rank));
        }
    }
    for node in (0..nodes.nodes()).filter(|&node| node != nodes.node_of(me)) {
        let (mut below, mut total) = (vec![0; words], vec![0; words]);
        for &member in nodes.members(node) {
            for (word, count) in of(member).iter().enumerate() {
                below[word] += if member < me { *count } else { 0 };
                total[word] += count;
            }
        }
        counted.add_node(&below, &total);
    }
    assert_eq!((&counted.below, &counted.total), (&all.below, &all.total));
    all
}

/// Every row of every rank is written exactly once, directly or by a relay, with the right token
/// and metadata, and pads with zeros.
fn rows_land_where_they_should(case: &Case, global: &GlobalSort, placed: &Placed) {
    let words = placed.sizing.words_out as usize;
    for (rank, expected) in (0..).zip(&global.rows) {
        let (mut landed, mut noted) = (vec![None; expected.len()], vec![None; expected.len()]);
        let mut write = |row: u32, what: Option<(u32, u32)>| {
            assert_eq!(landed[row as usize].replace(what), None, "row {row} of rank {rank} is written once");
        };
        let mut metadata_at = |row: u32, what: Vec<u32>| {
            assert_eq!(
                noted[row as usize].replace(what),
                None,
                "metadata {row} of rank {rank} is written once"
            );
        };
        for (source, layout) in (0..).zip(&placed.layouts) {
            for run in layout.runs_to(rank).map(|run| layout.runs[run as usize]) {
                assert!(run.count + run.pad > 0);
                for nth in 0..run.count {
                    let entry = (run.first + nth) as usize;
                    write(run.to_row + nth, Some((source, layout.rows[entry])));
                    let metadata = &placed.sorted[source as usize].metadata;
                    metadata_at(run.to_row + nth, metadata[entry * words..][..words].to_vec());
                }
                for nth in 0..run.pad {
                    write(run.to_row + run.count + nth, None);
                    metadata_at(run.to_row + run.count + nth, vec![0; words]);
                }
            }
        }
        if case.route == Route::Pxn {
            blocks::relayed(case, placed, rank, &mut write, &mut metadata_at);
        }
        let rows: Vec<_> =
            expected.iter().map(|row| Some(row.map(|entry| (entry.source, entry.token)))).collect();
        assert_eq!(landed, rows, "rank {rank} of {case:?}");
        let metadata: Vec<_> =
            expected.iter().map(|row| Some(row.map_or(vec![0; words], |entry| case.words(&entry)))).collect();
        assert_eq!(noted, metadata, "rank {rank} of {case:?}");
    }
}

fn arrivals_are_described(case: &Case, global: &GlobalSort, placed: &Placed) {
    let numbers = |rows: &[u32]| rows.iter().map(|&rows| rows as usize).collect::<Vec<_>>();
    assert_eq!(numbers(&placed.sizes.required), global.required);
    for (me, (layout, rows)) in (0..).zip(placed.layouts.iter().zip(&global.rows)) {
        assert_eq!(layout.landed as usize, rows.len());
        assert_eq!(numbers(&layout.sizes), global.rows.iter().map(Vec::len).collect::<Vec<_>>());
        let mine: Vec<u32> =
            (0..).zip(case.bins()).filter(|&(_, rank)| rank == me).map(|bin| bin.0).collect();
        let mut begin = 0;
        for (local, &bin) in mine.iter().enumerate() {
            let all = case.choices().into_iter().filter(|e| e.bin == bin);
            let mut counted: Vec<(u32, u32, u32)> = all
                .map(|e| (e.source, e.token, if case.layout == RowLayout::RankMajor { 0 } else { e.choice }))
                .collect();
            counted.dedup();
            let all = case.mode.slots().map_or(counted.len(), |slots| (slots * case.ranks()) as usize);
            let padded = all.next_multiple_of(case.align as usize);
            let room = rows.len().saturating_sub(begin);
            assert_eq!(layout.begin[local] as usize, begin);
            assert_eq!(layout.rows_per_bin[local] as usize, all.min(room));
            assert_eq!(layout.padded_per_bin[local] as usize, padded.min(room));
            begin += padded;
        }
        assert_eq!(layout.begin.len(), mine.len());
        let dropped = &placed.sorted[me as usize].dropped;
        for choice in case.choices().iter().filter(|choice| choice.source == me) {
            let lands =
                |e: &case::Entry| (e.bin, e.source, e.token) == (choice.bin, choice.source, choice.token);
            let kept = match case.layout {
                RowLayout::ExpertMajor => global.entries.contains(choice),
                RowLayout::RankMajor => global.entries.iter().any(lands),
                other => unreachable!("{other:?}"),
            };
            assert_eq!(dropped[choice.choice as usize], !kept);
        }
    }
}

/// One thing that is wrong with a routing.
#[derive(Clone, Copy, Debug)]
enum Flaw {
    TooLarge,
    Negative,
    Twice,
    Nan,
}

proptest! {
    #![proptest_config(crate::random_cases(1000))]

    #[test]
    fn placement_is_the_sorted_list(case in cases()) {
        let (global, placed) = (GlobalSort::new(&case), placed(&case));
        prop_assert_eq!(placed.bins.ranks(), placed.nodes.ranks());
        prop_assert_eq!(placed.sorted.iter().map(SortedRouting::entries).sum::<usize>(), global.entries.len());
        rows_land_where_they_should(&case, &global, &placed);
        arrivals_are_described(&case, &global, &placed);
        returns::sums_find_their_rows(&case, &global, &placed);
        returns::fetches_find_their_words(&case, &global, &placed);
    }
}

proptest! {
    #![proptest_config(crate::random_cases(700))]

    #[test]
    fn the_first_flaw_is_named(
        tokens in 1..20u32,
        top_k in 2..6u32,
        flaws in prop::collection::vec((0..20u32, 0..6u32, prop::sample::select(vec![Flaw::TooLarge, Flaw::Negative, Flaw::Twice, Flaw::Nan])), 1..4),
    ) {
        let experts = 10;
        let map = ExpertMap::contiguous(experts, 3).unwrap();
        let bins = Bins::experts(&map, SumOrder::Expert, &NodeMap::from_labels(&[0, 0, 0]));
        let mut ids: Vec<i32> = (0..tokens).flat_map(|t| (0..top_k).map(move |k| ((t + k) % experts) as i32)).collect();
        let mut weights = vec![1.0f32; ids.len()];
        // One flaw a token, so that the expected result needs no second implementation of the
        // checks.
        let mut first: Option<(u32, PlanError)> = None;
        let mut spoiled = Vec::new();
        for (token, k, flaw) in flaws {
            let (token, k) = (token % tokens, k % top_k);
            if spoiled.contains(&token) {
                continue;
            }
            spoiled.push(token);
            let at = (token * top_k + k) as usize;
            let error = match flaw {
                Flaw::TooLarge => {
                    ids[at] = 10;
                    PlanError::ExpertOutOfRange { token, k, expert: 10, experts }
                }
                Flaw::Negative => {
                    ids[at] = -2;
                    PlanError::ExpertOutOfRange { token, k, expert: -2, experts }
                }
                Flaw::Twice => {
                    let other = (token * top_k + (k + 1) % top_k) as usize;
                    ids[at] = ids[other];
                    PlanError::ExpertTwice { token, expert: ids[other] }
                }
                Flaw::Nan => {
                    weights[at] = f32::NAN;
                    PlanError::NanWeight { token, k }
                }
            };
            if first.as_ref().is_none_or(|&(earlier, _)| token < earlier) {
                first = Some((token, error));
            }
        }
        let routing = Routing::new(top_k, ids, weights).unwrap();
        let mut sorted = SortedRouting::default();
        let seen = sorted.fill(&map, &bins, RowMetadata::Weight, 1, &routing);
        prop_assert_eq!(seen, Err(first.unwrap().1));

        let good = Routing::new(1, vec![3, -1], vec![1.0, f32::NAN]).unwrap();
        prop_assert_eq!(sorted.fill(&map, &bins, RowMetadata::Weight, 1, &good), Ok(()), "what was refused leaves nothing behind");
        prop_assert_eq!(sorted.entries(), 1);
    }
}
