//! Placement against a reference that sorts everybody's entries globally and looks its numbers up in the result.

use proptest::prelude::*;
use proptest::sample::subsequence;
use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::{Counts, ExpertMap, Frame, Layout, Order, Sizes, Sorted};
use sidelane::topology::NodeMap;

/// A group and what its ranks want to send.
#[derive(Clone, Debug)]
struct Case {
    labels: Vec<u32>,
    held: Vec<Vec<u32>>,
    experts: u32,
    top_k: u32,
    align: u32,
    order: Order,
    /// Per rank: expert ids, `[tokens, top_k]`.
    ids: Vec<Vec<i32>>,
}

/// One choice that is not dropped. Sorted, entries lie as rows do: by slot, source, token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    slot: u32,
    source: u32,
    token: u32,
    choice: u32,
    expert: u32,
}

/// The same placement, found the slow way.
struct Reference {
    /// Per rank: what lies in each row; `None` for a pad.
    rows: Vec<Vec<Option<Entry>>>,
}

fn weight(source: u32, choice: u32) -> f32 {
    (source * 1000 + choice + 1) as f32
}

/// Rank and expert of each slot, counted rank by rank.
fn slots(case: &Case) -> Vec<(u32, u32)> {
    (0..).zip(&case.held).flat_map(|(rank, ids)| ids.iter().map(move |&expert| (rank, expert))).collect()
}

/// Which of the slots that hold `expert` rank `source` uses.
fn slot_for(slots: &[(u32, u32)], source: u32, expert: u32) -> u32 {
    let replicas: Vec<usize> = (0..slots.len()).filter(|&slot| slots[slot].1 == expert).collect();
    replicas[(source + expert) as usize % replicas.len()] as u32
}

fn entries(case: &Case) -> Vec<Entry> {
    let slots = slots(case);
    let mut entries = Vec::new();
    for (source, ids) in (0..).zip(&case.ids) {
        for (choice, &id) in (0..).zip(ids).filter(|&(_, &id)| id >= 0) {
            let (token, expert) = (choice / case.top_k, id as u32);
            entries.push(Entry { slot: slot_for(&slots, source, expert), source, token, choice, expert });
        }
    }
    entries.sort();
    entries
}

impl Reference {
    fn new(case: &Case) -> Self {
        let entries = entries(case);
        let mut rows = vec![Vec::new(); case.labels.len()];
        for (slot, (rank, _)) in (0..).zip(slots(case)) {
            let rows: &mut Vec<_> = &mut rows[rank as usize];
            rows.extend(entries.iter().filter(|entry| entry.slot == slot).map(|&entry| Some(entry)));
            while rows.len() % case.align as usize != 0 {
                rows.push(None);
            }
        }
        Reference { rows }
    }

    fn row_of(&self, rank: u32, entry: &Entry) -> usize {
        self.rows[rank as usize].iter().position(|row| row.as_ref() == Some(entry)).unwrap()
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (1..=9usize).prop_flat_map(|ranks| {
        let labels = prop::collection::vec(0..4u32, ranks);
        (Just(ranks), labels, 1..=12u32, 1..=8u32)
    });
    shape.prop_flat_map(|(ranks, labels, experts, top_k)| {
        let top_k = top_k.min(experts);
        let home = prop::collection::vec(0..ranks, experts as usize);
        let more = prop::collection::vec((0..ranks, 0..experts), 0..4);
        let order = Just((0..experts).collect::<Vec<u32>>()).prop_shuffle();
        let all: Vec<i32> = (0..experts as i32).collect();
        let token = (
            subsequence(all, top_k as usize).prop_shuffle(),
            prop::collection::vec(prop::bool::weighted(0.15), top_k as usize),
        )
            .prop_map(|(ids, dropped)| -> Vec<i32> {
                ids.into_iter().zip(dropped).map(|(id, dropped)| if dropped { -1 } else { id }).collect()
            });
        let size = prop_oneof![2 => 0..4usize, 1 => 0..=40usize];
        let tokens = size.prop_flat_map(move |n| prop::collection::vec(token.clone(), n));
        let ids = prop::collection::vec(tokens.prop_map(|tokens| tokens.concat()), ranks);
        let rest =
            (prop::sample::select(vec![1, 2, 16]), prop::sample::select(Order::ALL.to_vec()), any::<bool>());
        (Just(labels), home, more, order, ids, rest).prop_map(
            move |(labels, home, more, order, ids, (align, sum, plain))| {
                let mut held = vec![Vec::new(); ranks];
                if plain {
                    // Blocks, the first ranks one more, without a word about how the library finds them.
                    for (rank, held) in held.iter_mut().enumerate() {
                        let upto =
                            |r: usize| r * (experts as usize / ranks) + r.min(experts as usize % ranks);
                        held.extend(upto(rank) as u32..upto(rank + 1) as u32);
                    }
                } else {
                    let mut put = |rank: usize, expert: u32| {
                        if !held[rank].contains(&expert) {
                            held[rank].push(expert);
                        }
                    };
                    order.iter().for_each(|&expert| put(home[expert as usize], expert));
                    more.iter().for_each(|&(rank, expert)| put(rank, expert));
                }
                Case { labels, held, experts, top_k, align, order: sum, ids }
            },
        )
    })
}

fn routing(case: &Case, rank: u32) -> Routing<'static> {
    let ids = case.ids[rank as usize].clone();
    let weights: Vec<f32> = (0..ids.len() as u32).map(|choice| weight(rank, choice)).collect();
    Routing::new(case.top_k, ids, weights).unwrap()
}

fn placed(case: &Case) -> (ExpertMap, NodeMap, Vec<Sorted>, Vec<Layout>) {
    let map = ExpertMap::from_slots(case.experts, &case.held).unwrap();
    let nodes = NodeMap::from_labels(&case.labels);
    let ranks = 0..case.labels.len() as u32;
    let mut sorted = vec![Sorted::default(); case.labels.len()];
    for me in ranks.clone() {
        sorted[me as usize].fill(&map, me, &routing(case, me)).unwrap();
    }
    let layouts = ranks.clone().map(|me| {
        let (mut counts, mut sizes, mut layout) = (Counts::default(), Sizes::default(), Layout::default());
        counts.clear(&map, me);
        for source in ranks.clone() {
            counts.add(&map, me, source, sorted[source as usize].counts.iter().copied());
        }
        sizes.fill(&map, case.align, &counts.total);
        let frame = Frame { map: &map, nodes: &nodes, me, align: case.align, order: case.order };
        layout.fill(&frame, &sorted[me as usize], case.top_k, &counts, &sizes);
        for source in ranks.clone() {
            let sorted = &sorted[source as usize];
            let mine = map.slots_of(me);
            let first = sorted.starts[mine.start as usize] as usize;
            let end = sorted.starts[mine.end as usize] as usize;
            layout.weigh(source, sorted.weights[first..end].iter().copied());
        }
        layout
    });
    let layouts = layouts.collect();
    (map, nodes, sorted, layouts)
}

/// Every row of every rank is written by exactly one run, with the right token, and pads with nothing.
fn rows_land_where_they_should(case: &Case, reference: &Reference, layouts: &[Layout]) {
    for (rank, expected) in reference.rows.iter().enumerate() {
        let mut landed = vec![None; expected.len()];
        let mut write = |row: u32, what: Option<(u32, u32)>| {
            assert_eq!(landed[row as usize].replace(what), None, "row {row} of rank {rank} is written once");
        };
        for (source, layout) in (0..).zip(layouts) {
            for run in layout.runs_to(rank as u32).map(|run| layout.runs[run as usize]) {
                assert!(run.count > 0);
                for nth in 0..run.count {
                    let token = layout.rows[(run.first + nth) as usize];
                    write(run.to_row + nth, Some((source, token)));
                }
                (0..run.pad).for_each(|nth| write(run.to_row + run.count + nth, None));
            }
        }
        let expected: Vec<_> =
            expected.iter().map(|row| Some(row.map(|entry| (entry.source, entry.token)))).collect();
        assert_eq!(landed, expected, "rank {rank} of {case:?}");
    }
}

fn arrivals_are_described(case: &Case, reference: &Reference, layouts: &[Layout]) {
    let slots = slots(case);
    for (me, (layout, rows)) in (0..).zip(layouts.iter().zip(&reference.rows)) {
        assert_eq!(layout.landed as usize, rows.len());
        let weights: Vec<f32> =
            rows.iter().map(|row| row.map_or(0.0, |e| weight(e.source, e.choice))).collect();
        assert_eq!(layout.row_weights, weights);
        let mine: Vec<u32> = (0..slots.len() as u32).filter(|&slot| slots[slot as usize].0 == me).collect();
        let mut begin = 0;
        for (local, &slot) in mine.iter().enumerate() {
            let all = rows.iter().flatten().filter(|entry| entry.slot == slot).count();
            let padded = all.div_ceil(case.align as usize) * case.align as usize;
            assert_eq!(layout.begin[local], begin);
            assert_eq!(layout.tokens_per_expert[local], all as i64);
            assert_eq!(layout.padded_per_expert[local], padded as i64);
            begin += padded as u32;
        }
        assert_eq!(layout.begin.len(), mine.len());
        for source in 0..case.labels.len() as u32 {
            let segments: Vec<(u32, u32)> = layout.segments_of(source).collect();
            assert_eq!(segments.len(), mine.len());
            for (&slot, (first, count)) in mine.iter().zip(segments) {
                let from = |row: &Option<Entry>| row.is_some_and(|e| (e.slot, e.source) == (slot, source));
                assert_eq!(rows.iter().filter(|row| from(row)).count(), count as usize);
                assert!(rows[first as usize..][..count as usize].iter().all(from));
            }
        }
    }
}

fn terms_find_their_rows(case: &Case, reference: &Reference, layouts: &[Layout]) {
    let slots = slots(case);
    let entries = entries(case);
    for (me, layout) in (0..).zip(layouts) {
        let local = |rank: u32| case.labels[me as usize] == case.labels[rank as usize];
        let owner = |entry: &Entry| slots[entry.slot as usize].0;
        // What comes home from a remote rank: my rows there, in the order in which they lie there.
        let home = |rank: u32| -> Vec<Entry> {
            reference.rows[rank as usize].iter().flatten().filter(|e| e.source == me).copied().collect()
        };
        for rank in 0..case.labels.len() as u32 {
            let (held, rows) = match local(rank) {
                true => (rank, reference.rows[rank as usize].len()),
                false => (me, home(rank).len()),
            };
            assert_eq!(layout.held_by[rank as usize], held);
            assert_eq!(layout.chunk_rows[rank as usize] as usize, rows);
        }
        let tokens = case.ids[me as usize].len() / case.top_k as usize;
        assert_eq!((layout.tokens, layout.term_starts.len()), (tokens as u32, tokens + 1));
        for token in 0..tokens as u32 {
            let mut mine: Vec<&Entry> =
                entries.iter().filter(|e| (e.source, e.token) == (me, token)).collect();
            mine.sort_by_key(|e| (if case.order == Order::Rank { owner(e) } else { 0 }, e.expert));
            let terms =
                layout.term_starts[token as usize] as usize..layout.term_starts[token as usize + 1] as usize;
            assert_eq!(terms.len(), mine.len());
            for (term, entry) in terms.zip(&mine) {
                let row = match local(owner(entry)) {
                    true => reference.row_of(owner(entry), entry),
                    false => home(owner(entry)).iter().position(|e| e == *entry).unwrap(),
                };
                assert_eq!((layout.terms[term].owner, layout.terms[term].row as usize), (owner(entry), row));
                assert_eq!(layout.choices[term], entry.choice);
            }
            if case.order == Order::Rank {
                let groups = layout.group_starts[token as usize] as usize
                    ..layout.group_starts[token as usize + 1] as usize;
                let mut owners: Vec<u32> = mine.iter().map(|e| owner(e)).collect();
                let all = owners.clone();
                owners.dedup();
                let lengths: Vec<u32> =
                    owners.iter().map(|o| all.iter().filter(|other| *other == o).count() as u32).collect();
                assert_eq!(layout.groups[groups], lengths);
            }
        }
        if case.order == Order::Expert {
            assert!(layout.groups.is_empty() && layout.group_starts.is_empty());
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
    #![proptest_config(ProptestConfig { cases: 8000, failure_persistence: None, rng_seed: proptest::test_runner::RngSeed::Fixed(7), ..ProptestConfig::default() })]

    #[test]
    fn placement_is_the_sorted_list(case in cases()) {
        let reference = Reference::new(&case);
        let (map, nodes, sorted, layouts) = placed(&case);
        prop_assert_eq!(map.ranks(), nodes.ranks());
        prop_assert_eq!(sorted.iter().map(Sorted::entries).sum::<usize>(), entries(&case).len());
        rows_land_where_they_should(&case, &reference, &layouts);
        arrivals_are_described(&case, &reference, &layouts);
        terms_find_their_rows(&case, &reference, &layouts);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, rng_seed: proptest::test_runner::RngSeed::Fixed(8), ..ProptestConfig::default() })]

    #[test]
    fn the_first_flaw_is_named(
        tokens in 1..20u32,
        top_k in 2..6u32,
        flaws in prop::collection::vec((0..20u32, 0..6u32, prop::sample::select(vec![Flaw::TooLarge, Flaw::Negative, Flaw::Twice, Flaw::Nan])), 1..4),
    ) {
        let experts = 10;
        let map = ExpertMap::contiguous(experts, 3).unwrap();
        let mut ids: Vec<i32> = (0..tokens).flat_map(|t| (0..top_k).map(move |k| ((t + k) % experts) as i32)).collect();
        let mut weights = vec![1.0f32; ids.len()];
        // One flaw a token, so that what is expected needs no second implementation of the checks.
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
        let mut sorted = Sorted::default();
        let seen = sorted.fill(&map, 1, &routing);
        prop_assert_eq!(seen, Err(first.unwrap().1));

        let good = Routing::new(1, vec![3, -1], vec![1.0, f32::NAN]).unwrap();
        prop_assert_eq!(sorted.fill(&map, 1, &good), Ok(()), "what was refused leaves nothing behind");
        prop_assert_eq!(sorted.entries(), 1);
    }
}
