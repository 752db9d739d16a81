//! The traffic of a plan compared with a count of all (token, expert) pairs one by one.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use sidelane::gate::Routing;
use sidelane::plan::{
    Bins, Counts, DispatchLayout, ExpertMap, InterNodeRows, PlanContext, PulledSums, ReceiveMode,
    ReceiveSizes, RelayPlan, RowMetadata, RowSizes, RowsByDistance, SortedRouting, SumOrder, Traffic,
};
use sidelane::topology::{NodeMap, Paths, Route};

const ROW_BYTES: u64 = 48;
const PARTIAL_BYTES: u64 = 80;

/// A group, and what its ranks want to send.
#[derive(Clone, Debug)]
struct Case {
    labels: Vec<u32>,
    /// Experts of each rank; some have replicas.
    held: Vec<Vec<u32>>,
    experts: u32,
    top_k: u32,
    align: u32,
    order: SumOrder,
    route: Route,
    /// Per rank: expert ids, `[tokens, top_k]`.
    ids: Vec<Vec<i32>>,
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (1..=8usize, 1..=12u32, 1..=6u32);
    shape.prop_flat_map(|(ranks, experts, top_k)| {
        let top_k = top_k.min(experts);
        let labels = prop::collection::vec(0..3u32, ranks);
        let owners = prop::collection::vec((0..ranks, 0..ranks), experts as usize);
        let token = subsequence((0..experts as i32).collect::<Vec<_>>(), top_k as usize)
            .prop_shuffle()
            .prop_flat_map(move |ids| {
                let drops = prop::collection::vec(prop::bool::weighted(0.15), top_k as usize);
                drops.prop_map(move |drops| {
                    ids.iter().zip(drops).map(|(&id, drop)| if drop { -1 } else { id }).collect::<Vec<i32>>()
                })
            });
        let ids = prop::collection::vec(prop::collection::vec(token, 0..20), ranks);
        let settings = (select(vec![1, 4, 16]), select(SumOrder::ALL.to_vec()), select(Route::ALL.to_vec()));
        (labels, owners, ids, settings).prop_map(move |(labels, owners, ids, (align, order, route))| {
            let mut held = vec![Vec::new(); ranks];
            for (expert, (owner, replica)) in (0..).zip(owners) {
                held[owner].push(expert);
                if replica != owner && expert % 3 == 0 {
                    held[replica].push(expert);
                }
            }
            let ids = ids.into_iter().map(|tokens| tokens.concat()).collect();
            Case { labels, held, experts, top_k, align, order, route, ids }
        })
    })
}

/// Plan of every rank, and its traffic.
fn planned(case: &Case, map: &ExpertMap, nodes: &NodeMap) -> Vec<(DispatchLayout, Traffic)> {
    let ranks = nodes.ranks();
    let bins = Bins::experts(map, case.order, nodes);
    let of = |me| Paths::new(nodes, case.route, me);
    let sums = case.route == Route::Pxn && nodes.nodes() > 1 && case.order != SumOrder::Expert;
    let frame = |me| PlanContext {
        bins: &bins,
        paths: of(me),
        align: case.align,
        chunks: 3,
        sizing: RowSizes {
            row_bytes: ROW_BYTES,
            return_bytes: ROW_BYTES,
            words_out: 1,
            return_words: 1,
            partial_bytes: sums.then_some(PARTIAL_BYTES),
            rank_sums: false,
            pulled_bytes: PulledSums::CHUNK_BYTES,
        },
        mode: ReceiveMode::Exact,
    };
    let own: Vec<(SortedRouting, InterNodeRows, Vec<u32>)> = (0..ranks)
        .map(|me| {
            let (mut sorted, mut crossing) = (SortedRouting::default(), InterNodeRows::default());
            let ids = case.ids[me as usize].clone();
            let weights = vec![1.0; ids.len()];
            let routing = Routing::new(case.top_k, ids, weights).unwrap();
            sorted.fill(map, &bins, RowMetadata::Weight, me, &routing).unwrap();
            crossing.fill(&bins, &of(me), &sorted);
            let mut words = sorted.counts.clone();
            crossing.staged(&of(me), &mut words);
            (sorted, crossing, words)
        })
        .collect();
    let layouts: Vec<DispatchLayout> = (0..ranks)
        .map(|me| {
            let (mut counts, mut sizes, mut layout) =
                (Counts::default(), ReceiveSizes::default(), DispatchLayout::default());
            counts.clear(bins.count() + of(me).staged_ranks());
            (0..ranks).for_each(|source| counts.add(me, source, &own[source as usize].2));
            sizes.fill(&bins, case.align, &counts.total, None);
            let (sorted, crossing, _) = &own[me as usize];
            layout.fill(&frame(me), (sorted, crossing), case.top_k, &counts, &sizes);
            layout
        })
        .collect();
    let traffic = |me: u32| {
        let block = |source: u32| {
            let nth = of(source).relays().position(|relay| relay == me).unwrap();
            layouts[source as usize].blocks[nth].clone()
        };
        let mut forward = RelayPlan::default();
        forward.blocks.extend(of(me).sources().map(block));
        let sorted = &own[me as usize].0;
        Traffic::count(&frame(me), sorted, &layouts[me as usize], Some(&forward), &mut vec![7; 3])
    };
    let traffic: Vec<Traffic> = (0..ranks).map(traffic).collect();
    layouts.into_iter().zip(traffic).collect()
}

/// The same numbers, pair by pair.
fn counted(case: &Case, map: &ExpertMap, nodes: &NodeMap) -> Vec<Traffic> {
    let mut none = Traffic::default();
    (none.row_bytes, none.combine_row_bytes, none.route) = (ROW_BYTES, ROW_BYTES, case.route);
    let mut all = vec![none; case.labels.len()];
    let mut pairs: Vec<(u32, u32, u32)> = Vec::new();
    for (source, ids) in (0..).zip(&case.ids) {
        for (choice, &id) in (0..).zip(ids).filter(|(_, id)| **id >= 0) {
            pairs.push((map.slot_for(source, id as u32).unwrap(), source, choice / case.top_k));
        }
    }
    let relayed = |source: u32, rank: u32| case.route == Route::Pxn && !nodes.same_node(source, rank);
    let relay = |source: u32, rank: u32| nodes.rail_peer(source, nodes.node_of(rank)) as usize;
    // One row of the pair, or of its pad.
    let put = |all: &mut Vec<Traffic>, source: u32, rank: u32| match relayed(source, rank) {
        true => all[relay(source, rank)].relayed += 1,
        false => *hop(&mut all[source as usize].sent, source, rank, nodes) += 1,
    };
    let (mut ranks, mut remote) = (BTreeSet::new(), BTreeSet::new());
    for &(slot, source, token) in &pairs {
        let rank = map.rank_of(slot);
        *hop(&mut all[source as usize].logical, source, rank, nodes) += 1;
        put(&mut all, source, rank);
        if !nodes.same_node(source, rank) {
            ranks.insert((source, token, rank));
            remote.insert((source, token, nodes.node_of(rank)));
        }
    }
    for slot in 0..map.slots() {
        let here: Vec<u32> = pairs.iter().filter(|pair| pair.0 == slot).map(|pair| pair.1).collect();
        if let Some(&last) = here.iter().max() {
            let pads = here.len().next_multiple_of(case.align as usize) - here.len();
            (0..pads).for_each(|_| put(&mut all, last, map.rank_of(slot)));
        }
    }
    ranks.iter().for_each(|&(source, ..)| all[source as usize].remote_ranks += 1);
    for &(source, ..) in &remote {
        all[source as usize].remote_nodes += 1;
        all[source as usize].sent.remote += u64::from(case.route == Route::Pxn);
    }
    all
}

fn hop<'a>(hops: &'a mut RowsByDistance, source: u32, rank: u32, nodes: &NodeMap) -> &'a mut u64 {
    match (source == rank, nodes.same_node(source, rank)) {
        (true, _) => &mut hops.own,
        (_, true) => &mut hops.local,
        (_, false) => &mut hops.remote,
    }
}

proptest! {
    #![proptest_config(crate::random_cases(1000))]

    #[test]
    fn traffic_is_what_a_count_of_all_pairs_says(case in cases()) {
        let map = ExpertMap::from_slots(case.experts, &case.held).unwrap();
        let nodes = NodeMap::from_labels(&case.labels);
        let counted = counted(&case, &map, &nodes);
        for (me, ((layout, traffic), counted)) in planned(&case, &map, &nodes).iter().zip(&counted).enumerate() {
            prop_assert_eq!(traffic, counted, "rank {}", me);
            // The returned rows fill the plan's places.
            let paths = Paths::new(&nodes, case.route, me as u32);
            let places = paths.relays().map(|relay| &layout.chunks[relay as usize]);
            let returned: u64 = places.map(|chunk| u64::from(chunk.rows) * chunk.row_bytes).sum();
            prop_assert_eq!(traffic.return_bytes(case.order, PARTIAL_BYTES), returned);
        }
    }
}

#[test]
fn return_moves_row_per_expert_or_partial_per_rank_or_node() {
    let mut traffic = Traffic::default();
    traffic.logical = RowsByDistance { own: 5, local: 6, remote: 100 };
    (traffic.remote_ranks, traffic.remote_nodes) = (60, 20);
    (traffic.row_bytes, traffic.combine_row_bytes) = (8, 10);
    let mut returned = |route| {
        traffic.route = route;
        SumOrder::ALL.map(|order| traffic.return_bytes(order, 7))
    };
    assert_eq!(returned(Route::Pxn), [1000, 420, 140]);
    assert_eq!(returned(Route::Direct), [1000; 3], "no rank sums on the way");
}
