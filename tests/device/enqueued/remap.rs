//! Experts move to other ranks between calls: all together, or not at all.

use half::bf16;
use sidelane::Error;
use sidelane::dtype::PartialDtype;
use sidelane::ep::ExpertParallel;
use sidelane::error::{CallError, CallKind, PlanError};

use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, RowLayout, SumOrder};
use sidelane::topology::Route;

use super::calls::{on_each_of, some};
use super::on_devices;
use super::rank::{Case, Rank};
use crate::support::tokens;

fn before() -> ExpertMap {
    ExpertMap::from_slots(4, &[vec![0, 1], vec![2], vec![3], vec![0]]).unwrap()
}

/// All but two slots move to one rank; another has none.
fn after() -> ExpertMap {
    ExpertMap::from_slots(4, &[vec![3], vec![], vec![2, 3, 1], vec![0]]).unwrap()
}

fn case(nodes: &[u32], route: Route, layout: RowLayout) -> Case {
    let case = Case { map: before(), route, layout, max_in_flight: 3, ..Case::across(nodes, 4, 2) };
    Case { align: 2, ..case }
}

/// Another map on host and device.
fn moved(rank: &mut Rank<bf16>, map: ExpertMap) {
    for ep in [&mut rank.host, &mut rank.planned] {
        ep.set_expert_map(map.clone()).unwrap();
        assert_eq!(ep.expert_map(), &map);
    }
}

fn round(rank: &mut Rank<bf16>, seed: u64) {
    let count = some(&rank.case, seed);
    let input = tokens(seed, count, rank.case.hidden, rank.case.top_k, 4);
    rank.round(&input);
}

#[test]
fn calls_follow_the_new_map_back_and_forth() {
    on_devices("enqueued::remap::calls_follow_the_new_map_back_and_forth", 8, 61, || {
        for layout in RowLayout::ALL {
            for (nodes, route) in
                [(&[0; 4][..], Route::Direct), (&[0, 1, 1, 1], Route::Direct), (&[0, 0, 1, 1], Route::Pxn)]
            {
                let case = case(nodes, route, layout);
                let (order, wire) = (SumOrder::Rank, PartialDtype::Bf16);
                let by_rank = Case { order, wire, ..case.clone() };
                for case in [case.clone(), case.dropping(8), by_rank] {
                    on_each_of::<bf16>(&case, |rank, me| {
                        for seed in (0..3).map(|round| round * 64 + me) {
                            round(rank, seed);
                            moved(rank, after());
                            round(rank, seed + 7);
                            let step = rank.expected(seed, 5);
                            let handle = rank.forward(&step);
                            rank.again(&step, &handle);
                            rank.backward(&step, &handle);
                            drop(handle);
                            moved(rank, before());
                        }
                    });
                }
            }
        }
    });
}

/// Choices of a masked expert are dropped, and only the host says which.
#[test]
fn under_a_mask_the_host_plans() {
    on_devices("enqueued::remap::under_a_mask_the_host_plans", 8, 64, || {
        for layout in RowLayout::ALL {
            on_each_of::<bf16>(&case(&[0; 4], Route::Direct, layout), |rank, me| {
                let masked = ([true, true, false, true], "sort_choices");
                for (active, first) in [([true; 4], "plan_choices"), masked, ([true; 4], "plan_choices")] {
                    rank.host.mask(&active).unwrap();
                    rank.planned.mask(&active).unwrap();
                    let input = tokens(90 + me, 7, rank.case.hidden, rank.case.top_k, 4);
                    let routing = Routing::new(rank.case.top_k, &input.ids[..], &input.weights[..]).unwrap();
                    let (_, expected) = rank.host.dispatch(&input.x, &routing).unwrap();
                    let (_, handle) = rank.dispatch(&input).unwrap();
                    assert_eq!(handle.report().unwrap().kernels[0], first);
                    assert_eq!(handle.dropped(), expected.dropped());
                    drop((handle, expected));
                    rank.round(&input);
                }
            });
        }
    });
}

/// Rows are memory alone: they outlive their handle, and the map.
#[test]
fn rows_of_the_old_map_stay_and_handles_of_it_keep_it() {
    on_devices("enqueued::remap::rows_of_the_old_map_stay_and_handles_of_it_keep_it", 8, 62, || {
        for route in Route::ALL {
            on_each_of::<bf16>(&case(&[0, 1, 1, 0], route, RowLayout::ExpertMajor), |rank, me| {
                let input = tokens(me, 6, rank.case.hidden, rank.case.top_k, 4);
                let (rows, handle) = rank.dispatch(&input).unwrap();
                let seen: Vec<u8> = rank.seen(&rows.range().unwrap());
                // One rank has dropped its handle already: it is told why the others refuse.
                let handle = (me != 2).then_some(handle);
                let error = rank.planned.set_expert_map(after()).unwrap_err();
                match me {
                    2 => assert!(
                        matches!(error, Error::Call(CallError::PeerRefused { peer: 0, .. })),
                        "{error}"
                    ),
                    _ => {
                        assert!(matches!(error, Error::Call(CallError::HandlesAlive { count: 1 })), "{error}")
                    }
                }
                assert_eq!(rank.planned.expert_map(), &before());
                drop(handle);
                moved(rank, after());
                for seed in [me + 64, me + 128] {
                    round(rank, seed);
                }
                // They have one context of three: dispatches by the new map take the others.
                let held = [0, 1].map(|_| rank.dispatch(&input).unwrap());
                let full = rank.dispatch(&input).map(drop).unwrap_err();
                assert_eq!(full, CallError::TooManyInFlight { max: 3 }.into());
                assert_eq!(rank.seen::<u8>(&rows.range().unwrap()), seen, "rows of the old map");
                drop(rows);
                let last = rank.dispatch(&input).unwrap();
                drop((held, last));
            });
        }
    });
}

#[test]
fn maps_that_do_not_fit_or_differ_are_refused_on_every_rank() {
    on_devices("enqueued::remap::maps_that_do_not_fit_or_differ_are_refused_on_every_rank", 8, 63, || {
        on_each_of::<bf16>(&case(&[0, 0, 1, 1], Route::Pxn, RowLayout::ExpertMajor), |rank, me| {
            let map = if me == 3 { after() } else { before() };
            let error = rank.planned.set_expert_map(map).unwrap_err();
            assert!(matches!(error, Error::Call(CallError::Disagree { what: "expert map", .. })), "{error}");
            let more = ExpertMap::from_slots(4, &[vec![0, 1], vec![2, 0], vec![3], vec![0]]).unwrap();
            for map in [more, ExpertMap::contiguous(5, 4).unwrap(), ExpertMap::contiguous(4, 3).unwrap()] {
                let error = rank.planned.set_expert_map(map).unwrap_err();
                assert!(matches!(error, Error::Plan(PlanError::BadParameter { .. })), "{error}");
            }
            // A rank that has no map says so in place of the call.
            let own: Error = PlanError::TooManyTokens { tokens: 9, max: 8 }.into();
            let refuse = |ep: &mut ExpertParallel| match me {
                1 => ep.refuse(CallKind::ExpertMap, None, own.clone()),
                _ => ep.set_expert_map(after()).unwrap_err(),
            };
            let error = refuse(&mut rank.planned);
            match me {
                1 => assert_eq!(error, own),
                _ => assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. })), "{error}"),
            }
            round(rank, me);
            moved(rank, after());
            round(rank, me + 64);
        });
    });
}
