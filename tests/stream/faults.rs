//! Worlds that die while streams wait: the streams go on, and what they computed is known to be worth nothing.

use std::time::{Duration, Instant};

use sidelane::bootstrap::Clocks;
use sidelane::error::{Cause, LaneError};
use sidelane::{Error, Options};

use super::on_stand_in;
use super::rank::{Case, Rank, Tensors, content, on_ranks, options};

const CASE: Case = Case { ranks: 3, experts: 6, top_k: 2, hidden: 16, max_tokens: 4 };

#[test]
fn a_cancelled_world_ends_the_waits_of_streams_and_every_sum_is_zero() {
    on_stand_in("faults::a_cancelled_world_ends_the_waits_of_streams_and_every_sum_is_zero", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let mut rank = Rank::new(CASE, world);
            let tensors = rank.tensors(&CASE.input(2, rank.me()));
            tensors.out.write(0, &[7; 64]).unwrap();
            let cause = Cause::Cancelled { by: 2 };
            if rank.me() == 2 {
                // The others stand in their dispatch by then: nothing has come from here.
                rank.group.gather(&[]).unwrap();
                rank.world.cancel();
            } else {
                rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
                // More that waits, enqueued before anybody knows.
                rank.exchange.combine(&rank.stream, tensors.out()).unwrap();
                rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
                assert!(!rank.stream.is_done().unwrap());
                let _ = rank.group.gather(&[]);
                assert_eq!(rank.exchange.synchronize(&rank.stream), Err(Error::World(cause.clone())));
                let sums = CASE.bytes(tensors.count) as usize;
                assert_eq!(content(&tensors.out)[..sums], vec![0; sums]);
            }
            let refused = rank.exchange.dispatch(&rank.stream, &tensors.tokens());
            assert_eq!(refused, Err(Error::World(cause.clone())));
            assert_eq!(rank.exchange.status(), Err(Error::World(cause)));
        });
    });
}

#[test]
fn a_silent_rank_is_named_by_the_deadline() {
    on_stand_in("faults::a_silent_rank_is_named_by_the_deadline", || {
        let clocks = Clocks { deadline: Duration::from_secs(5), ..Clocks::default() };
        on_ranks(CASE.ranks, &Options { clocks, ..options() }, |world| {
            let mut rank = Rank::new(CASE, world);
            let tensors = rank.tensors(&CASE.input(4, rank.me()));
            let start = Instant::now();
            match rank.me() {
                1 => {
                    while rank.world.health().check().is_ok() {
                        assert!(start.elapsed() < Duration::from_secs(30), "nobody named this rank");
                        std::thread::yield_now();
                    }
                }
                me => {
                    rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
                    match rank.exchange.synchronize(&rank.stream).unwrap_err() {
                        Error::Lane(LaneError::Deadline { rank, peer: 1, lane: "copy engine", .. }) => {
                            assert_eq!(rank, me);
                        }
                        Error::World(Cause::Stalled { rank: 1, .. }) => {}
                        other => panic!("{other}"),
                    }
                }
            }
            assert!(matches!(rank.exchange.status(), Err(Error::World(Cause::Stalled { rank: 1, .. }))));
        });
    });
}

#[test]
fn streams_of_an_exchange_that_was_dropped_are_released_too() {
    on_stand_in("faults::streams_of_an_exchange_that_was_dropped_are_released_too", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let Rank { world, group, stream, mut exchange, context, .. } = Rank::new(CASE, world);
            let tensors = Tensors::of(&context, CASE, &CASE.input(2, group.rank()));
            if group.rank() == 2 {
                group.gather(&[]).unwrap();
                world.cancel();
                return;
            }
            exchange.dispatch(&stream, &tensors.tokens()).unwrap();
            drop(exchange);
            assert!(!stream.is_done().unwrap(), "rank 2 has sent nothing");
            let _ = group.gather(&[]);
            let start = Instant::now();
            while !stream.is_done().unwrap() {
                assert!(start.elapsed() < Duration::from_secs(30), "the stream waits for ever");
                std::thread::yield_now();
            }
        });
    });
}
