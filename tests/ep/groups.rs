//! Several groups in one world, at once and in turn, each with a layer of its own.

use std::time::Duration;

use crate::support::{Tokens, failed, on_ranks, placement, small, tokens};
use half::bf16;
use sidelane::bootstrap::Timeouts;
use sidelane::error::{Cause, Error, LaneError};
use sidelane::gate::Routing;
use sidelane::topology::{NodeMap, Route};
use sidelane::{Dtype, ExpertParallel, Group};

const HIDDEN: usize = 16;
const TOP_K: u32 = 3;
const EXPERTS: u32 = 11;

const ALTERNATE: [u32; 8] = [0, 1, 0, 1, 0, 1, 0, 1];
const THREE_AND_FIVE: [u32; 8] = [0, 0, 0, 1, 1, 1, 1, 1];

fn worlds() -> impl Iterator<Item = ([u32; 8], Route)> {
    [ALTERNATE, THREE_AND_FIVE].into_iter().flat_map(|nodes| Route::ALL.map(|route| (nodes, route)))
}

fn layer(group: &Group, route: Route) -> ExpertParallel {
    let builder = ExpertParallel::builder(group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    builder.dtype(Dtype::Bf16).max_tokens(32).route(route).build().unwrap()
}

/// A round of one layer: every landed row, and every returned sum, bit for bit. `tag` distinguishes
/// the tokens of layers.
fn round(ep: &mut ExpertParallel, group: &Group, tag: u64, in_halves: bool) {
    let me = group.rank() as usize;
    let all: Vec<Tokens<bf16>> = (0..group.size())
        .map(|rank| {
            let seed = tag * 1000 + u64::from(rank);
            tokens(seed, (rank * 5 + tag as u32 * 3) % 13, HIDDEN, TOP_K, EXPERTS)
        })
        .collect();
    let mine = &all[me];
    let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
    let (rows, handle) = match in_halves {
        true => ep.start_dispatch(&mine.x, &routing).unwrap().finish().unwrap(),
        false => ep.dispatch(&mine.x, &routing).unwrap(),
    };
    let origins = placement(&all, TOP_K, ep.expert_map(), 1).swap_remove(me);
    let expected =
        origins.iter().flatten().flat_map(|&(rank, token, _)| &all[rank].x[token * HIDDEN..][..HIDDEN]);
    let given = rows.rows::<bf16>().unwrap();
    assert!(given.iter().eq(expected), "rank {me} of {:?}, round {tag}", group.ranks());
    let mut sums_back = vec![bf16::NAN; mine.x.len()];
    match in_halves {
        true => ep.start_combine(given, &handle).unwrap().finish(&mut sums_back).unwrap(),
        false => ep.combine_into(given, &handle, &mut sums_back).unwrap(),
    }
    assert_eq!(
        sums_back,
        crate::support::repeated(mine, TOP_K, HIDDEN),
        "rank {me} of {:?}, round {tag}",
        group.ranks()
    );
}

/// The groups of the first list work at the same time.
fn side_by_side(nodes: &[u32], groups: &[&[u32]]) {
    for route in Route::ALL {
        on_ranks(nodes, &small(), |world| {
            let ranks = groups.iter().find(|ranks| ranks.contains(&world.rank())).unwrap();
            let group = world.group(ranks).unwrap();
            let mut ep = layer(&group, route);
            for tag in 0..40 {
                round(&mut ep, &group, tag, (tag + u64::from(world.rank())).is_multiple_of(3));
            }
        });
    }
}

#[test]
fn groups_that_interleave_work_at_once() {
    // Even and odd positions: each on one node, or each on both.
    side_by_side(&ALTERNATE, &[&[0, 2, 4, 6], &[1, 3, 5, 7]]);
    side_by_side(&THREE_AND_FIVE, &[&[0, 2, 4, 6], &[1, 3, 5, 7]]);
    // Uneven, in orders of their own, and one that has no rank of a node.
    side_by_side(&ALTERNATE, &[&[7, 0, 5, 2, 3], &[4, 1, 6]]);
    side_by_side(&THREE_AND_FIVE, &[&[6, 0, 4, 1, 2], &[7, 5, 3]]);
    side_by_side(&[0, 1, 2, 0, 1, 2, 0, 2], &[&[0, 4, 5, 6], &[7, 3, 2, 1]]);
}

#[test]
fn groups_that_overlap_work_in_turn() {
    // Some ranks are in the first only, some in the second, and three in both.
    const GROUPS: [&[u32]; 2] = [&[0, 1, 3, 4, 5], &[7, 5, 4, 2, 6, 1]];
    let rail_peers = |nodes: &[u32], ranks: &[u32], rank: u32| -> Vec<u32> {
        let map = NodeMap::from_labels(nodes).subset(ranks);
        let place = ranks.iter().position(|&r| r == rank).unwrap() as u32;
        (0..map.nodes()).map(|node| ranks[map.rail_peer(place, node) as usize]).collect()
    };
    for (nodes, route) in worlds() {
        let [first, second] = GROUPS.map(|ranks| [1, 4, 5].map(|rank| rail_peers(&nodes, ranks, rank)));
        assert_ne!(first, second, "ranks of both groups have other relays in each");
        on_ranks(&nodes, &small(), |world| {
            let member = |ranks: &&[u32]| ranks.contains(&world.rank());
            let groups: Vec<Group> =
                GROUPS.into_iter().filter(member).map(|ranks| world.group(ranks).unwrap()).collect();
            let mut layers: Vec<_> = groups.iter().map(|group| layer(group, route)).collect();
            for tag in 0..20 {
                for (ep, group) in layers.iter_mut().zip(&groups) {
                    round(ep, group, tag, tag.is_multiple_of(2));
                }
            }
        });
    }
}

#[test]
fn one_rank_works_in_two_groups_at_once() {
    for (nodes, route) in worlds() {
        on_ranks(&nodes, &small(), |world| {
            let ranks: &[u32] =
                if world.rank() < 2 || world.rank() > 5 { &[7, 1, 6, 0] } else { &[2, 3, 4, 5] };
            let (all, some) = (world.all().unwrap(), world.group(ranks).unwrap());
            // Layers are built one after the other, like all collective objects; then each has its
            // own thread.
            let (mut wide, mut narrow) = (layer(&all, route), layer(&some, route));
            std::thread::scope(|scope| {
                scope.spawn(|| (0..30).for_each(|tag| round(&mut wide, &all, tag, tag.is_multiple_of(2))));
                scope.spawn(|| (0..50).for_each(|tag| round(&mut narrow, &some, tag + 100, false)));
            });
        });
    }
}

#[test]
fn silent_rank_is_named_by_group_place_and_world_rank() {
    const RANKS: [u32; 5] = [7, 0, 5, 2, 3];
    let timeouts = Timeouts::default().with_deadline(Duration::from_secs(2));
    for route in Route::ALL {
        on_ranks(&THREE_AND_FIVE, &small().with_timeouts(timeouts), |world| {
            if !RANKS.contains(&world.rank()) {
                return;
            }
            let group = world.group(&RANKS).unwrap();
            let mut ep = layer(&group, route);
            round(&mut ep, &group, 0, false);
            // The member at place 2 does not call.
            if group.rank() != 2 {
                let routing = Routing::new(TOP_K, vec![], vec![]).unwrap();
                match ep.dispatch(&[bf16::ZERO; 0], &routing).unwrap_err() {
                    Error::Lane(LaneError::Deadline { rank, peer: 2, .. }) => assert_eq!(rank, group.rank()),
                    Error::World(Cause::Stalled { rank: 5, .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
            let cause = failed(&world);
            assert!(matches!(cause, Cause::Stalled { rank: 5, .. }), "{cause:?}");
        });
    }
}
