//! Pools that are too small: the same error on every rank, with the numbers that help.

use half::bf16;
use sidelane::ep::ExpertParallelBuilder;
use sidelane::error::{CallError, Error, MemoryError, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::RowBuffer;
use sidelane::plan::{Bins, ExpertMap, SumOrder};
use sidelane::topology::{NodeMap, Paths, Route};
use sidelane_core::schedule::ControlLayout;

use super::{
    BAD, HIDDEN, NODES, RANKS, ROOMY, Rank, SYMMETRIC, TOP_K, combine, dispatch, everywhere, options,
    routing, settings, worlds,
};
use crate::support::on_ranks;

const POOL: u64 = 80 << 10;
const ROW: u64 = 2 * HIDDEN as u64;

fn out_of_space(rank: u32, asked: u64, free: u64, total: u64) -> Error {
    let (space, setting) = ("pool", "SIDELANE_HEAP");
    MemoryError::OutOfSpace { rank, asked, free, total, space, setting }.into()
}

/// Bytes that the bad rank needs for so many rows of every rank: for them, for a word with each,
/// and for those that it relays to its node.
fn extent(nodes: &NodeMap, route: Route, tokens: u32) -> u64 {
    let staged = match route {
        Route::Pxn => Paths::new(nodes, route, BAD).sources().count() as u64 * u64::from(tokens),
        Route::Direct => 0,
        other => unreachable!("{other:?}"),
    };
    chunk_bytes(RANKS as u32 * tokens, ROW) + staged * ROW
}

/// A layer whose control window takes half of the symmetric heap, and little more.
pub fn wide(rank: &Rank) -> ExpertParallelBuilder<'_> {
    let nodes = rank.group.nodes();
    let paths = Paths::new(&nodes, rank.route, rank.group.rank());
    let bytes = |experts: u32| {
        let map = ExpertMap::contiguous(experts, RANKS as u32).unwrap();
        ControlLayout::new(&paths, &Bins::experts(&map, SumOrder::Expert, &nodes), 64 * u64::from(TOP_K), 4)
            .bytes()
    };
    let choices: Vec<u32> = (1..=320).map(|n| n * 128).collect();
    let experts = choices[choices.partition_point(|&experts| bytes(experts) <= SYMMETRIC / 2)];
    assert!((SYMMETRIC / 2 + 1..SYMMETRIC / 8 * 5).contains(&bytes(experts)));
    rank.settings().experts(experts)
}

/// Every token of every rank to the one expert of the bad rank whose number is 4.
fn incast(tokens: u32) -> (Vec<bf16>, Routing<'static>) {
    let ids: Vec<i32> = (0..tokens * TOP_K).map(|i| if i % TOP_K == 0 { 4 } else { -1 }).collect();
    let weights = vec![1.0; ids.len()];
    (vec![bf16::ONE; tokens as usize * HIDDEN], Routing::new(TOP_K, ids, weights).unwrap())
}

/// A layer whose ranks may pass more tokens than the pool can hold.
fn large(rank: &Rank) -> sidelane::ExpertParallel {
    rank.settings().max_tokens(600).build().unwrap()
}

/// Bytes of `rows` rows with a word behind each.
fn chunk_bytes(rows: u32, row_bytes: u64) -> u64 {
    RowBuffer { rows, metadata: rows.into(), row_bytes }.bytes()
}

#[test]
fn pool_fills_to_last_byte_and_excess_fails_alike_on_all_ranks() {
    const TOKENS: u32 = 400;
    for (nodes, route) in worlds() {
        let map = NodeMap::from_labels(&nodes);
        let pool = extent(&map, route, TOKENS);
        on_ranks(&nodes, &options(pool), |world| {
            let mut rank = Rank::new(world, route);
            let mut ep = large(&rank);
            for in_halves in [false, true] {
                let (x, routing) = incast(TOKENS + 2);
                rank.arm();
                let error = dispatch(&mut ep, &x, &routing, in_halves).unwrap_err();
                assert_eq!(error, out_of_space(BAD, extent(&map, route, TOKENS + 2), pool, pool));
                rank.untouched();
                let (x, routing) = incast(TOKENS);
                let (rows, handle) = dispatch(&mut ep, &x, &routing, in_halves).unwrap();
                assert_eq!(rows.len(), if rank.is_bad() { RANKS as u32 * TOKENS } else { 0 });
                assert!(rows.rows::<bf16>().unwrap().iter().all(|&x| x == bf16::ONE));
                drop((rows, handle));
            }
            rank.works();
        });
    }
}

#[test]
fn relay_without_room_for_its_block_fails_alike_on_all_ranks() {
    // Rank 1 has tokens for the bad rank, which come by rank 0.
    const RELAY: u32 = 0;
    on_ranks(&NODES[1], &options(POOL), |world| {
        let mut rank = Rank::new(world, Route::Pxn);
        let mut ep = large(&rank);
        let (x, routing) = incast(if rank.world.rank() == 1 { 600 } else { 0 });
        let crowd =
            (rank.world.rank() == RELAY).then(|| rank.world.pool().alloc(POOL - 600 * ROW + 64).unwrap());
        for in_halves in [false, true] {
            rank.arm();
            let error = dispatch(&mut ep, &x, &routing, in_halves).unwrap_err();
            assert_eq!(error, out_of_space(RELAY, 600 * ROW, 600 * ROW - 64, POOL));
            rank.untouched();
        }
        drop(crowd);
        let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
        assert_eq!(rows.len(), if rank.is_bad() { 600 } else { 0 });
        drop((rows, handle));
        rank.works();
    });
}

#[test]
fn cached_rows_that_do_not_fit_are_told_alike_everywhere() {
    everywhere(POOL, |rank| {
        let mut ep = large(rank);
        let (x, routing) = incast(300);
        let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
        let (asked, used) = (extent(rank.world.nodes(), rank.route, 300), chunk_bytes(1200, ROW));
        rank.arm();
        let error = ep.dispatch_cached(&x, &handle).unwrap_err();
        assert_eq!(error, out_of_space(BAD, asked, POOL - used, POOL));
        rank.untouched();
        drop(rows);
        assert!(ep.dispatch_cached(&x, &handle).is_ok(), "there is room again");
        drop(handle);
        rank.works();
    });
}

#[test]
fn combine_copy_that_does_not_fit_fails_alike_on_all_ranks() {
    everywhere(POOL, |rank| {
        let mut ep = large(rank);
        let (x, routing) = incast(300);
        let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
        let (held, given) = (rank.world.pool().report(), rows.to_vec::<bf16>().unwrap());
        rank.arm();
        let mut out = vec![bf16::MAX; x.len()];
        for in_halves in [false, true] {
            let error = combine(&mut ep, &given, &handle, &mut out, in_halves).unwrap_err();
            let Error::Memory(MemoryError::OutOfSpace { rank: BAD, asked, free, .. }) = error else {
                panic!("{error:?}");
            };
            assert_eq!(asked, chunk_bytes(1200, ROW), "rows, and a word for each");
            assert!(!rank.is_bad() || free == held.largest_free);
        }
        assert!(out.iter().all(|&x| x == bf16::MAX));
        rank.untouched();
        drop((rows, handle));
        rank.works();
    });
}

#[test]
fn staging_that_does_not_fit_loses_no_output() {
    for (nodes, route) in worlds().filter(|(nodes, _)| *nodes != NODES[0]) {
        on_ranks(&nodes, &options(POOL), |world| {
            let mut rank = Rank::new(world, route);
            let mine = rank.mine();
            let (rows, handle) = rank.dispatch();
            let mut y = handle.output().unwrap();
            y.rows_mut::<bf16>().unwrap().copy_from_slice(rows.rows().unwrap());
            let pool = rank.world.pool();
            let crowd = rank.is_bad().then(|| pool.alloc(pool.report().largest_free).unwrap());
            for in_halves in [false, true] {
                let mut out = vec![bf16::MAX; mine.x.len()];
                let error = combine(&mut rank.ep, y, &handle, &mut out, in_halves).unwrap_err();
                assert!(
                    matches!(error, Error::Memory(MemoryError::OutOfSpace { rank: BAD, free: 0, .. })),
                    "{error:?}"
                );
                assert!(out.iter().all(|&x| x == bf16::MAX), "a refused call writes nothing");
                y = handle.output().unwrap();
            }
            drop((crowd, rows));
            rank.world.pool().poison(super::POISON);
            assert_eq!(rank.ep.combine::<bf16>(y, &handle).unwrap(), super::repeated(&mine));
        });
    }
}

/// Gradients of a weighted combine, after one that the bad rank's crowded pool, or a wrong tensor
/// of weights, had refused.
fn refused_weights_keep_the_output(crowded: bool) {
    for (nodes, route) in worlds().filter(|(nodes, _)| *nodes != NODES[0]) {
        on_ranks(&nodes, &options(POOL), |world| {
            let rank = Rank::new(world, route);
            let mut ep = rank.settings().weighted(true).build().unwrap();
            // All tokens go to the last rank, which is in no node of the bad one: nothing lands
            // there, and a row of each token returns.
            let tokens = 4;
            let ids: Vec<i32> = (0..tokens * TOP_K).map(|i| if i % TOP_K == 0 { 5 } else { -1 }).collect();
            let routing = Routing::new(TOP_K, ids.as_slice(), vec![0.5; ids.len()]).unwrap();
            let x = vec![bf16::ONE; tokens as usize * HIDDEN];
            let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
            let mut y = handle.output().unwrap();
            y.rows_mut::<bf16>().unwrap().fill(bf16::ONE);
            ep.combine::<bf16>(y, &handle).unwrap();
            let expected: Vec<f32> = ids.iter().map(|&id| if id < 0 { 0.0 } else { HIDDEN as f32 }).collect();
            for _ in 0..2 {
                let mut weights = vec![f32::MAX; ids.len()];
                let pool = rank.world.pool();
                let crowd =
                    (crowded && rank.is_bad()).then(|| pool.alloc(pool.report().largest_free).unwrap());
                let few = if !crowded && rank.is_bad() { 1 } else { 0 };
                let returned = &mut weights[few..];
                let error = ep.combine_backward_into(&x, &handle, Some(returned.into())).unwrap_err();
                match &error {
                    Error::Memory(MemoryError::OutOfSpace { rank: BAD, free: 0, .. }) if crowded => {}
                    Error::Plan(PlanError::WrongShape { .. }) if !crowded && rank.is_bad() => {}
                    Error::Call(CallError::PeerRefused { peer: BAD, .. }) if !crowded && !rank.is_bad() => {}
                    _ => panic!("{error:?}"),
                }
                assert!(weights.iter().all(|&weight| weight == f32::MAX), "a refused call writes nothing");
                drop(crowd);
                let (_, weights) = ep.combine_backward(&x, &handle).unwrap();
                assert_eq!(weights.unwrap(), expected, "{nodes:?}, {route:?}");
            }
            drop((rows, handle));
            rank.group.gather(&[]).unwrap();
            assert_eq!(rank.world.pool().report().used, 0, "what was kept is given back");
        });
    }
}

#[test]
fn weight_gradients_without_room_keep_the_output_of_the_combine() {
    refused_weights_keep_the_output(true);
}

#[test]
fn wrong_weight_gradient_tensor_keeps_output_of_combine() {
    refused_weights_keep_the_output(false);
}

#[test]
fn ranks_are_named_by_their_place_in_the_group() {
    on_ranks(&NODES[0], &options(POOL), |world| {
        if ![1, 3].contains(&world.rank()) {
            return;
        }
        let group = world.group(&[3, 1]).unwrap();
        let mut ep = settings(&group, Route::Direct).build().unwrap();
        let mine = crate::support::tokens::<bf16>(1, 9, HIDDEN, TOP_K, super::EXPERTS);
        let (rows, handle) = ep.dispatch(&mine.x, &routing(&mine)).unwrap();
        let crowd =
            (world.rank() == 3).then(|| world.pool().alloc(world.pool().report().largest_free).unwrap());
        let error = ep.dispatch_cached(&mine.x, &handle).unwrap_err();
        assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { rank: 0, .. })), "{error:?}");
        drop((crowd, rows));
    });
}

#[test]
fn layers_that_come_and_go_leave_room_for_the_next() {
    everywhere(ROOMY, |rank| {
        for _ in 0..4 {
            // There is room for one control window of this size, not for two.
            let mut ep = wide(rank).build().unwrap();
            let (x, routing) = incast(60);
            let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
            let y = handle.output().unwrap();
            let _: Vec<bf16> = ep.combine(y, &handle).unwrap();
            drop((rows, handle, ep));
            let whole = rank.group.window(SYMMETRIC / 8 * 5).unwrap();
            drop(whole);
        }
        rank.works();
    });
}
