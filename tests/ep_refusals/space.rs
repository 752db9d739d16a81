//! Pools that are too small: the same error on every rank, with the numbers that help.

use half::bf16;
use sidelane::error::{Error, MemoryError};
use sidelane::gate::Routing;

use super::{BAD, HIDDEN, NODES, Rank, TOP_K, everywhere, options, routing, settings};
use crate::support::on_ranks;

const POOL: u64 = 64 << 10;
const ROW: u64 = 2 * HIDDEN as u64;

fn out_of_space(rank: u32, asked: u64, free: u64) -> Error {
    let (total, space, setting) = (POOL, "pool", "SIDELANE_HEAP");
    MemoryError::OutOfSpace { rank, asked, free, total, space, setting }.into()
}

/// Every token of every rank to the one expert of the bad rank whose number is 4.
fn incast(tokens: u32) -> (Vec<bf16>, Routing<'static>) {
    let ids: Vec<i32> = (0..tokens * TOP_K).map(|i| if i % TOP_K == 0 { 4 } else { -1 }).collect();
    let weights = vec![1.0; ids.len()];
    (vec![bf16::ONE; tokens as usize * HIDDEN], Routing::new(TOP_K, ids, weights).unwrap())
}

/// A layer whose ranks may pass so many tokens that the pool cannot hold them all.
fn large(rank: &Rank) -> sidelane::ExpertParallel {
    settings(&rank.group).max_tokens(600).build().unwrap()
}

#[test]
fn rows_that_do_not_fit_are_told_alike_everywhere() {
    everywhere(POOL, |rank| {
        let mut ep = large(rank);
        let (x, routing) = incast(600);
        rank.arm();
        let error = ep.dispatch(&x, &routing).unwrap_err();
        assert_eq!(error, out_of_space(BAD, 4 * 600 * ROW, POOL));
        rank.untouched();
        let (x, routing) = incast(POOL as u32 / ROW as u32 / 4);
        let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
        let full = if rank.is_bad() { POOL } else { 0 };
        assert_eq!(u64::from(rows.len()) * ROW, full, "a pool can be filled to its last byte");
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
        let (asked, used) = (1200 * ROW, (1200 * ROW).next_multiple_of(64));
        rank.arm();
        assert_eq!(ep.dispatch_cached(&x, &handle).unwrap_err(), out_of_space(BAD, asked, POOL - used));
        rank.untouched();
        drop(rows);
        assert!(ep.dispatch_cached(&x, &handle).is_ok(), "there is room again");
        drop(handle);
        rank.works();
    });
}

#[test]
fn a_copy_for_combine_that_does_not_fit_is_told_alike_everywhere() {
    everywhere(POOL, |rank| {
        let mut ep = large(rank);
        let (x, routing) = incast(300);
        let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
        let (held, given) = (rank.world.pool().report(), rows.to_vec::<bf16>().unwrap());
        rank.arm();
        let mut out = vec![bf16::MAX; x.len()];
        let error = ep.combine_into(&given, &handle, &mut out).unwrap_err();
        let Error::Memory(MemoryError::OutOfSpace { rank: BAD, asked, free, .. }) = error else {
            panic!("{error:?}");
        };
        assert_eq!(asked, 1200 * (ROW + 4), "rows, and a word for each");
        assert!(!rank.is_bad() || free == held.largest_free);
        assert!(out.iter().all(|&x| x == bf16::MAX));
        rank.untouched();
        drop((rows, handle));
        rank.works();
    });
}

#[test]
fn staging_that_does_not_fit_loses_no_output() {
    on_ranks(&NODES[1], &options(POOL), |world| {
        let mut rank = Rank::new(world);
        let mine = rank.mine();
        let (rows, handle) = rank.dispatch();
        let mut y = handle.output().unwrap();
        y.rows_mut::<bf16>().unwrap().copy_from_slice(rows.rows().unwrap());
        let pool = rank.world.pool();
        let crowd = rank.is_bad().then(|| pool.take(pool.report().largest_free).unwrap());
        let error = rank.ep.combine::<bf16>(y, &handle).unwrap_err();
        assert!(
            matches!(error, Error::Memory(MemoryError::OutOfSpace { rank: BAD, free: 0, .. })),
            "{error:?}"
        );
        drop((crowd, rows));
        rank.world.pool().poison(super::POISON);
        let y = handle.output().unwrap();
        assert_eq!(rank.ep.combine::<bf16>(y, &handle).unwrap(), super::repeated(&mine));
    });
}

#[test]
fn ranks_are_named_by_their_place_in_the_group() {
    on_ranks(&NODES[0], &options(POOL), |world| {
        if ![1, 3].contains(&world.rank()) {
            return;
        }
        let group = world.group(&[3, 1]).unwrap();
        let mut ep = settings(&group).build().unwrap();
        let mine = crate::support::tokens::<bf16>(1, 9, HIDDEN, TOP_K, super::EXPERTS);
        let (rows, handle) = ep.dispatch(&mine.x, &routing(&mine)).unwrap();
        let crowd =
            (world.rank() == 3).then(|| world.pool().take(world.pool().report().largest_free).unwrap());
        let error = ep.dispatch_cached(&mine.x, &handle).unwrap_err();
        assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { rank: 0, .. })), "{error:?}");
        drop((crowd, rows));
    });
}

#[test]
fn layers_that_come_and_go_leave_room_for_the_next() {
    everywhere(1 << 20, |rank| {
        for _ in 0..10 {
            // There is room for one control window of this size, not for two.
            let mut ep = settings(&rank.group).max_tokens(900).build().unwrap();
            let (x, routing) = incast(300);
            let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
            let y = handle.output().unwrap();
            let _: Vec<bf16> = ep.combine(y, &handle).unwrap();
            drop((rows, handle, ep));
            let whole = rank.group.window(80 << 10).unwrap();
            drop(whole);
        }
        rank.works();
    });
}
