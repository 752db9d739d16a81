//! Experts move to other ranks between steps: all together, or not at all.

use crate::support::{Tokens, medium, on_ranks, placement, tokens};
use half::bf16;
use sidelane::error::{CallError, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::ExpertMap;
use sidelane::topology::Route;
use sidelane::{Dtype, Error, ExpertParallel, World};

const HIDDEN: usize = 8;
const NODES: [u32; 4] = [0, 1, 1, 1];

fn before() -> ExpertMap {
    ExpertMap::from_slots(4, &[vec![0, 1], vec![2], vec![3], vec![0]]).unwrap()
}

fn after() -> ExpertMap {
    ExpertMap::from_slots(4, &[vec![3], vec![], vec![2, 3, 1], vec![0]]).unwrap()
}

fn layer(world: &World, route: Route) -> ExpertParallel {
    ExpertParallel::builder(&world.all().unwrap())
        .expert_map(before())
        .top_k(2)
        .hidden(HIDDEN)
        .dtype(Dtype::Bf16)
        .route(route)
        .build()
        .unwrap()
}

fn everybody() -> Vec<Tokens<bf16>> {
    (0..4).map(|rank| tokens(rank + 7, 5, HIDDEN, 2, 4)).collect()
}

fn lands(ep: &mut ExpertParallel, map: &ExpertMap, all: &[Tokens<bf16>]) {
    let me = ep.rank() as usize;
    let routing = Routing::new(2, all[me].ids.as_slice(), all[me].weights.as_slice()).unwrap();
    let (rows, handle) = ep.dispatch(&all[me].x, &routing).unwrap();
    let expected = placement(all, 2, map, 1);
    let seen = rows.rows::<bf16>().unwrap();
    assert_eq!(rows.len() as usize, expected[me].len());
    for (row, origin) in seen.chunks_exact(HIDDEN).zip(&expected[me]) {
        let (source, token, _) = origin.unwrap();
        assert_eq!(row, &all[source].x[token * HIDDEN..][..HIDDEN]);
    }
    assert_eq!(handle.tokens_per_expert().len(), map.slots_of(ep.rank()).len());
}

#[test]
fn dispatches_follow_the_new_map_back_and_forth() {
    for route in Route::ALL {
        let all = everybody();
        on_ranks(&NODES, &medium(), |world| {
            let mut ep = layer(&world, route);
            for _ in 0..3 {
                lands(&mut ep, &before(), &all);
                ep.set_expert_map(after()).unwrap();
                assert_eq!(ep.expert_map(), &after());
                lands(&mut ep, &after(), &all);
                ep.set_expert_map(before()).unwrap();
            }
        });
    }
}

#[test]
fn ranks_that_bring_different_maps_all_keep_the_old_one() {
    for route in Route::ALL {
        let all = everybody();
        on_ranks(&NODES, &medium(), |world| {
            let mut ep = layer(&world, route);
            let map = if world.rank() == 3 { after() } else { before() };
            let error = ep.set_expert_map(map).unwrap_err();
            assert!(matches!(error, Error::Call(CallError::Disagree { what: "expert map", .. })), "{error}");
            lands(&mut ep, &before(), &all);
        });
    }
}

#[test]
fn a_handle_of_the_old_map_keeps_it() {
    let all = everybody();
    on_ranks(&NODES, &medium(), |world| {
        let mut ep = layer(&world, Route::Pxn);
        let mine = &all[world.rank() as usize];
        let routing = Routing::new(2, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let (rows, handle) = ep.dispatch(&mine.x, &routing).unwrap();
        drop(rows);
        // One rank has dropped its handle already: it gets the reason why the others refuse.
        let handle = (world.rank() != 2).then_some(handle);
        let error = ep.set_expert_map(after()).unwrap_err();
        match world.rank() {
            2 => assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 0, .. })), "{error}"),
            _ => assert!(matches!(error, Error::Call(CallError::HandlesAlive { count: 1 })), "{error}"),
        }
        drop(handle);
        ep.set_expert_map(after()).unwrap();
        lands(&mut ep, &after(), &all);
    });
}

#[test]
fn a_map_of_another_shape_is_refused() {
    on_ranks(&NODES, &medium(), |world| {
        let mut ep = layer(&world, Route::Direct);
        let more = ExpertMap::from_slots(4, &[vec![0, 1], vec![2, 0], vec![3], vec![0]]).unwrap();
        for map in [more, ExpertMap::contiguous(5, 4).unwrap(), ExpertMap::contiguous(4, 3).unwrap()] {
            let error = ep.set_expert_map(map).unwrap_err();
            assert!(matches!(error, Error::Plan(PlanError::BadParameter { .. })), "{error}");
        }
        ep.set_expert_map(after()).unwrap();
    });
}
