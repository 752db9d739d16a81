//! Traffic over the lanes: every byte and every signal of the plan, and no other.

use std::collections::{BTreeMap, BTreeSet};

use crate::support::{Tokens, on_ranks, small, tokens};
use half::bf16;
use sidelane::ep::LaneUse;
use sidelane::exec::OpKind;
use sidelane::gate::Routing;
use sidelane::topology::{NodeMap, Paths, Route};
use sidelane::{Dtype, ExpertParallel, World};

const HIDDEN: usize = 16;
const ROW: u64 = 2 * HIDDEN as u64;
const TOP_K: u32 = 3;
const EXPERTS: u32 = 13;
/// Parts of a block.
const CHUNKS: u64 = 4;

/// Even nodes, uneven ones, and such that interleave, one of them of a single rank.
const NODES: [[u32; 8]; 3] = [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 2, 1, 1, 0, 1]];

fn worlds() -> impl Iterator<Item = ([u32; 8], Route)> {
    NODES.into_iter().flat_map(|nodes| Route::ALL.map(|route| (nodes, route)))
}

fn layer(world: &World, route: Route) -> ExpertParallel {
    let group = world.all().unwrap();
    let builder = ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    builder.dtype(Dtype::Bf16).max_tokens(32).route(route).build().unwrap()
}

fn input(rank: u32) -> Tokens<bf16> {
    tokens(u64::from(rank) + 7, rank * 5 % 13, HIDDEN, TOP_K, EXPERTS)
}

fn routing(tokens: &Tokens<bf16>) -> Routing<'_> {
    Routing::new(TOP_K, tokens.ids.as_slice(), tokens.weights.as_slice()).unwrap()
}

/// (token, rank) of every choice of a rank that was not dropped.
fn entries(ep: &ExpertParallel, source: u32) -> Vec<(usize, u32)> {
    let map = ep.expert_map();
    let owner = |&id: &i32| map.rank_of(map.slot_for(source, id as u32).unwrap());
    let chosen = input(source).ids.into_iter().enumerate().filter(|&(_, id)| id >= 0);
    chosen.map(|(choice, id)| (choice / TOP_K as usize, owner(&id))).collect()
}

#[test]
fn the_report_counts_exactly_the_bytes_of_the_plan() {
    for (nodes, route) in worlds() {
        on_ranks(&nodes, &small(), |world| {
            let mut ep = layer(&world, route);
            let (me, map) = (world.rank(), world.nodes());
            let mine = input(me);
            let (rows, handle) = ep.dispatch(&mine.x, &routing(&mine)).unwrap();
            let (near, far): (Vec<_>, Vec<_>) =
                entries(&ep, me).into_iter().partition(|&(_, owner)| map.same_node(me, owner));
            // Under pxn a token crosses once per node, and is then one row for each choice: from
            // its relay.
            let crossing: BTreeSet<_> =
                far.iter().map(|&(token, owner)| (token, map.node_of(owner))).collect();
            let handed_on = (0..8)
                .filter(|&source| !map.same_node(me, source) && map.rail_peer(source, map.node_of(me)) == me)
                .flat_map(|source| entries(&ep, source))
                .filter(|&(_, owner)| map.same_node(me, owner))
                .count();
            let (local, remote) = match route {
                Route::Direct => (near.len(), far.len()),
                Route::Pxn => (near.len() + handed_on, crossing.len()),
                other => unreachable!("{other:?}"),
            };
            let moved = handle.report().unwrap().moved;
            let expected = [local, remote, local + remote].map(|rows| rows as u64);
            assert_eq!(
                [moved.intra_node_bytes, moved.inter_node_bytes, moved.rows * ROW],
                expected.map(|rows| rows * ROW)
            );
            assert!(handle.report().unwrap().kernels.is_empty());

            let y = handle.output().unwrap();
            ep.combine::<bf16>(y, &handle).unwrap();
            assert_eq!(handle.copied_bytes(), 0, "outputs are combined where they lie");
            ep.combine::<bf16>(rows.rows::<bf16>().unwrap(), &handle).unwrap();
            assert_eq!(handle.copied_bytes(), u64::from(rows.len()) * ROW, "rows elsewhere are copied once");
        });
    }
}

#[test]
fn the_report_tells_how_each_rank_is_reached() {
    for (nodes, route) in worlds() {
        on_ranks(&nodes, &small(), |world| {
            let mut ep = layer(&world, route);
            let paths = Paths::new(world.nodes(), route, world.rank());
            let wired = paths.peers().filter(|&peer| paths.needs_connection(peer)).count() as u32;
            let near = paths.local_peers().count() as u32;
            let all = [("loopback", wired), ("own", 1), ("relay", 7 - near - wired), ("shm", near)];
            let expected: Vec<_> = all.into_iter().filter(|&(_, ranks)| ranks > 0).collect();
            let mine = input(world.rank());
            let (_, handle) = ep.dispatch(&mine.x, &routing(&mine)).unwrap();
            for seen in [&handle.report().unwrap().lanes[..], ep.lanes()] {
                let mut seen: Vec<_> =
                    seen.iter().map(|&LaneUse { lane, ranks, .. }| (lane, ranks)).collect();
                seen.sort_unstable();
                assert_eq!(seen, expected);
            }
        });
    }
}

/// Number of signals that a rank raises at each other, from a recorder.
fn signals(world: &World) -> BTreeMap<u32, u64> {
    let mut sent = BTreeMap::new();
    let events = world.recorder().unwrap().take().events;
    for event in events.iter().filter(|event| event.kind == OpKind::Signal) {
        *sent.entry(event.peer).or_default() += 1;
    }
    sent
}

/// Signals from one rank to others according to the schedule: (dispatch, combine), by rank.
fn expected(nodes: &NodeMap, route: Route, me: u32) -> [BTreeMap<u32, u64>; 2] {
    let paths = Paths::new(nodes, route, me);
    let [told, relays, sources] = [
        paths.count_receivers().collect(),
        paths.relays().collect(),
        paths.sources().collect::<BTreeSet<u32>>(),
    ];
    let is = |set: &BTreeSet<u32>, peer| u64::from(set.contains(&peer));
    // Landings that this rank signals: those of its own rows, and of the relayed ones.
    let handed_on = if route == Route::Pxn { sources.len() as u64 } else { 0 };
    let parts = if route == Route::Pxn { CHUNKS } else { 0 };
    let of = |peer: u32| -> [u64; 2] {
        if peer == me {
            // Between caller and relay: begin, all are here, all is done.
            return [3 + handed_on, 3];
        }
        if paths.same_node(peer) {
            return [1 + 1 + handed_on, 1 + 1];
        }
        let straight = u64::from(route == Route::Direct);
        let dispatch = is(&told, peer) + is(&relays, peer) * (1 + parts + straight);
        [dispatch, is(&told, peer) + is(&relays, peer) + is(&sources, peer)]
    };
    let table = |call: usize| (0..nodes.ranks()).map(move |peer| (peer, of(peer)[call]));
    [0, 1].map(|call| table(call).filter(|&(_, signals)| signals > 0).collect())
}

#[test]
fn a_call_raises_the_signals_of_its_schedule_and_no_other() {
    let options = small().with_record(1 << 12);
    for (nodes, route) in worlds() {
        let sent = on_ranks(&nodes, &options, |world| {
            let mut ep = layer(&world, route);
            let mine = input(world.rank());
            let of_mine = routing(&mine);
            let (rows, handle) = ep.dispatch(&mine.x, &of_mine).unwrap();
            signals(&world);
            let [dispatch, combine] = expected(world.nodes(), route, world.rank());
            for round in 0..2 {
                drop(match round {
                    0 => ep.dispatch(&mine.x, &of_mine).unwrap(),
                    _ => ep.start_dispatch(&mine.x, &of_mine).unwrap().finish().unwrap(),
                });
                assert_eq!(signals(&world), dispatch, "dispatch of rank {}, {route:?}", world.rank());
                ep.combine::<bf16>(rows.rows::<bf16>().unwrap(), &handle).unwrap();
                assert_eq!(signals(&world), combine, "combine of rank {}, {route:?}", world.rank());
            }
            dispatch
        });
        // Under pxn a rank hears from other nodes: one word of entry, and each block of its
        // sources.
        let map = NodeMap::from_labels(&nodes);
        for me in (0..8).filter(|_| route == Route::Pxn) {
            let heard = |peer: u32| sent[peer as usize].get(&me).copied().unwrap_or(0);
            let heard: u64 = (0..8).filter(|&peer| !map.same_node(me, peer)).map(heard).sum();
            let blocks = Paths::new(&map, route, me).sources().count() as u64;
            assert_eq!(heard, u64::from(map.nodes()) - 1 + blocks * (1 + CHUNKS), "rank {me} of {nodes:?}");
        }
    }
}
