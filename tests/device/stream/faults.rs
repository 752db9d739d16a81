//! Worlds that die while streams wait: the streams go on, and what they computed is known to be worth nothing.

use std::time::Duration;

use sidelane::bootstrap::Clocks;
use sidelane::error::{Cause, LaneError};
use sidelane::{Error, Options, World};

use super::on_stand_in;
use super::rank::{Case, Rank, Tensors, content, on_ranks, options, until};

const CASE: Case = Case { ranks: 3, experts: 6, top_k: 2, hidden: 16, max_tokens: 4 };

/// A rank cancels the world while the streams of the others wait for it.
pub fn cancelled(case: Case, culprit: u32, world: World) {
    let mut rank = Rank::new(case, world);
    let tensors = rank.tensors(&case.input(2, rank.me()));
    tensors.out.write(0, &[7; 64]).unwrap();
    let cause = Cause::Cancelled { by: culprit };
    if rank.me() == culprit {
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
        let sums = case.bytes(tensors.count) as usize;
        assert_eq!(content(&tensors.out)[..sums], vec![0; sums]);
    }
    let refused = rank.exchange.dispatch(&rank.stream, &tensors.tokens());
    assert_eq!(refused, Err(Error::World(cause.clone())));
    assert_eq!(rank.exchange.status(), Err(Error::World(cause)));
}

#[test]
fn a_cancelled_world_ends_the_waits_of_streams_and_every_sum_is_zero() {
    on_stand_in("stream::faults::a_cancelled_world_ends_the_waits_of_streams_and_every_sum_is_zero", || {
        on_ranks(CASE.ranks, &options(), |world| cancelled(CASE, 2, world));
    });
}

/// A deadline that comes soon, and later than anything that a busy machine holds up.
pub fn impatient() -> Options {
    let clocks = Clocks { deadline: Duration::from_secs(5), ..Clocks::default() };
    Options { clocks, ..options() }
}

/// A rank makes no call. Who finds it says by which lane it was to come, or hears it from who did.
pub fn silent(case: Case, culprit: u32, world: World, lane_to: impl Fn(u32) -> &'static str) {
    let mut rank = Rank::new(case, world);
    let tensors = rank.tensors(&case.input(4, rank.me()));
    let stalled =
        |error: &Error| matches!(error, Error::World(Cause::Stalled { rank, .. }) if *rank == culprit);
    let me = rank.me();
    if me == culprit {
        until(|| rank.world.health().check().is_err());
    } else {
        rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
        match rank.exchange.synchronize(&rank.stream).unwrap_err() {
            Error::Lane(LaneError::Deadline { rank, peer, lane, .. }) => {
                assert_eq!((rank, peer, lane), (me, culprit, lane_to(me)));
            }
            other => assert!(stalled(&other), "{other}"),
        }
    }
    assert!(rank.exchange.status().is_err_and(|error| stalled(&error)));
}

#[test]
fn a_silent_rank_is_named_by_the_deadline() {
    on_stand_in("stream::faults::a_silent_rank_is_named_by_the_deadline", || {
        on_ranks(CASE.ranks, &impatient(), |world| silent(CASE, 1, world, |_| "copy engine"));
    });
}

#[test]
fn streams_of_an_exchange_that_was_dropped_are_released_too() {
    on_stand_in("stream::faults::streams_of_an_exchange_that_was_dropped_are_released_too", || {
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
            until(|| stream.is_done().unwrap());
        });
    });
}
