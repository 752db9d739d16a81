//! Memory that a dispatch reserves, and its messages.

use half::bf16;
use sidelane::exec::OpKind;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane::topology::{NodeMap, Paths, Route};

use super::{groups, loads};
use crate::support::layer::{Expected, nothing_is_held};
use crate::support::reference::Case;
use crate::support::{on_ranks, tiny};

/// Bytes for landed rows with their metadata, and for rows that a rank takes to relay.
fn landing(case: &Case, rows: u32) -> u64 {
    let words = match (case.layout, case.mode) {
        (RowLayout::RankMajor, _) => 2 * case.top_k,
        (RowLayout::ExpertMajor, ReceiveMode::Slots { .. }) => 2,
        (RowLayout::ExpertMajor, _) => 1,
        other => unreachable!("{other:?}"),
    };
    let behind = (u64::from(rows) * 2 * case.hidden as u64).next_multiple_of(64);
    (behind + u64::from(rows) * u64::from(words) * 4).next_multiple_of(64)
}

/// The most rows that a rank receives: its budget, or all that there are; or the slots that it has.
fn most_rows(case: &Case, required: u32, rank: u32) -> u32 {
    let bins = match case.layout {
        RowLayout::ExpertMajor => case.map.slots_of(rank).len() as u32,
        RowLayout::RankMajor => 1,
        other => unreachable!("{other:?}"),
    };
    let all = case.nodes.len() as u32 * case.max_tokens() * case.top_k.min(bins) + (case.align - 1) * bins;
    case.mode.slots().map_or(all.min(case.mode.budget().unwrap_or(u32::MAX)), |_| required)
}

/// The most rows that each source of a rank may have it relay.
fn staged(case: &Case, rank: u32) -> u64 {
    let nodes = NodeMap::from_labels(&case.nodes);
    let paths = Paths::new(&nodes, case.route, rank);
    if case.route == Route::Direct {
        return 0;
    }
    let served = nodes.members(nodes.node_of(rank)).iter();
    let bins: u32 = match case.layout {
        RowLayout::ExpertMajor => served.map(|&member| case.map.slots_of(member).len() as u32).sum(),
        RowLayout::RankMajor => served.count() as u32,
        other => unreachable!("{other:?}"),
    };
    let room = case.mode.slots().map_or(u32::MAX, |slots| slots * bins);
    paths.sources().count() as u64 * u64::from(case.max_tokens().min(room)) * 2 * case.hidden as u64
}

#[test]
fn what_is_announced_is_what_can_come_and_what_is_kept_is_what_came() {
    for group in groups() {
        let (mean, most) = loads(&group);
        let overflow = Overflow::Drop;
        for mode in [
            ReceiveMode::Budget { rows: 0, overflow },
            ReceiveMode::Budget { rows: mean, overflow },
            ReceiveMode::Budget { rows: most, overflow },
            ReceiveMode::Slots { rows: 1, overflow },
            ReceiveMode::Slots { rows: group.max_tokens() + 1, overflow },
        ] {
            let all = Expected::<bf16>::new(&Case { mode, ..group.clone() });
            on_ranks(&group.nodes, &tiny(), |world| {
                let (group, me) = (world.all().unwrap(), world.rank() as usize);
                let mut ep = all.layer(&group);
                let routing = all.routing(me);
                let pending = ep.start_dispatch(&all.all[me].x, &routing).unwrap();
                let rows = most_rows(&all.case, all.seen.required[me], world.rank());
                let announced = landing(&all.case, rows) + staged(&all.case, world.rank());
                let used = world.pool().report().used;
                assert_eq!(used, announced.next_multiple_of(64), "at rank {me}, {:?}", all.case);
                let (rows, handle) = pending.finish().unwrap();
                assert_eq!(world.pool().report().used, landing(&all.case, handle.rows()), "{:?}", all.case);
                drop((rows, handle));
                nothing_is_held(&world, &group);
            });
        }
    }
}

#[test]
fn between_fixed_slots_no_counts_are_told() {
    // Two nodes of 3 and 2 ranks: a message has a tag for each member, and two counts for each bin
    // and each rank.
    let nodes = [0, 1, 0, 1, 0];
    let case = Case { route: Route::Pxn, ..Case::new(&nodes, &[5, 7, 0, 2, 9], 10, 2) };
    for mode in [ReceiveMode::Exact, ReceiveMode::Slots { rows: 9, overflow: Overflow::Error }] {
        for layout in RowLayout::ALL {
            let all = Expected::<bf16>::new(&Case { mode, layout, ..case.clone() });
            on_ranks(&nodes, &tiny().with_record(1000), |world| {
                let (group, recorder) = (world.all().unwrap(), world.recorder().unwrap());
                let mut ep = all.layer(&group);
                recorder.take();
                let held = all.dispatch(&mut ep);
                // A rank's messages for its node are on tracks of its relay, behind those of all
                // ranks.
                let relayed = recorder.take().events.into_iter().filter(|event| event.track >= 5);
                let told: Vec<u64> =
                    relayed.filter(|event| event.kind == OpKind::Put).map(|event| event.bytes).collect();
                let paths = Paths::new(world.nodes(), Route::Pxn, world.rank());
                let bins: u64 = if layout == RowLayout::RankMajor { 5 } else { 10 };
                let counts = if mode == ReceiveMode::Exact { 2 * (bins + 5) * 4 } else { 0 };
                assert_eq!(
                    told,
                    vec![(3u64 * 24).next_multiple_of(64) + counts; paths.count_receivers().count()]
                );
                drop(held);
            });
        }
    }
}

#[test]
fn a_block_has_room_for_every_choice_of_every_token() {
    // All experts are on the other node, and every token chooses all of them.
    let map = ExpertMap::from_slots(4, &[vec![], vec![3, 0], vec![], vec![2, 1]]).unwrap();
    let case = Case { map, route: Route::Pxn, ..Case::new(&[0, 1, 0, 1], &[21, 0, 21, 0], 4, 4) };
    for mode in [ReceiveMode::Exact, ReceiveMode::Slots { rows: 21, overflow: Overflow::Error }] {
        for (layout, order) in RowLayout::ALL.into_iter().flat_map(|l| SumOrder::ALL.map(|o| (l, o))) {
            let weighted = layout == RowLayout::ExpertMajor;
            let case = Case { mode, layout, order, weighted, ..case.clone() };
            let mut all = Expected::<bf16>::new(&case).all.clone();
            for tokens in &mut all {
                tokens.ids.chunks_exact_mut(4).for_each(|ids| ids.copy_from_slice(&[2, 0, 3, 1]));
            }
            Expected::of(&case, all).holds(&tiny());
        }
    }
}
