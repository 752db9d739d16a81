//! Worlds that die while streams wait: the streams go on, and what they computed is known to be
//! worth nothing.

use std::time::Duration;

use sidelane::bootstrap::{Timeouts, panic_in};
use sidelane::error::{Cause, LaneError};
use sidelane::{Error, Options, World};

use super::on_stand_in;
use super::rank::{Case, Rank, Tensors, call, content, dispatch, on_nodes, on_ranks, options, until};
use crate::support::failed;

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
        // A combine waits, too, and another dispatch, enqueued before anybody knows.
        rank.layer(&tensors).unwrap();
        dispatch(&mut rank.ep, &tensors).unwrap();
        assert!(!rank.stream.is_done().unwrap());
        let _ = rank.group.gather(&[]);
        assert_eq!(rank.ep.synchronize(), Err(Error::World(cause.clone())));
        let sums = case.bytes(tensors.count) as usize;
        assert_eq!(content(&tensors.out)[..sums], vec![0; sums]);
    }
    let refused = dispatch(&mut rank.ep, &tensors).map(drop);
    assert_eq!(refused, Err(Error::World(cause.clone())));
    assert_eq!(rank.ep.check(), Err(Error::World(cause)));
}

#[test]
fn cancelled_world_ends_stream_waits_and_every_sum_is_zero() {
    on_stand_in("slots::faults::cancelled_world_ends_stream_waits_and_every_sum_is_zero", || {
        on_ranks(CASE.ranks, &options(), |world| cancelled(CASE, 2, world));
    });
}

/// A deadline that comes soon, and later than anything that a busy machine holds up.
pub fn impatient() -> Options {
    let timeouts = Timeouts::default().with_deadline(Duration::from_secs(5));
    options().with_timeouts(timeouts)
}

/// A rank makes no call. Who finds it says by which lane it was to come, or hears it from who did.
pub fn silent(case: Case, culprit: u32, world: World, lane_to: impl Fn(u32) -> &'static str) {
    let mut rank = Rank::new(case, world);
    let tensors = rank.tensors(&case.input(4, rank.me()));
    let stalled =
        |error: &Error| matches!(error, Error::World(Cause::Stalled { rank, .. }) if *rank == culprit);
    let me = rank.me();
    if me == culprit {
        failed(&rank.world);
    } else {
        dispatch(&mut rank.ep, &tensors).unwrap();
        match rank.ep.synchronize().unwrap_err() {
            Error::Lane(LaneError::Deadline { rank, peer, lane, .. }) => {
                assert_eq!((rank, peer, lane), (me, culprit, lane_to(me)));
            }
            other => assert!(stalled(&other), "{other}"),
        }
    }
    assert!(rank.ep.check().is_err_and(|error| stalled(&error)));
}

#[test]
fn a_silent_rank_is_named_by_the_deadline() {
    on_stand_in("slots::faults::a_silent_rank_is_named_by_the_deadline", || {
        on_ranks(CASE.ranks, &impatient(), |world| silent(CASE, 1, world, |_| "copy engine"));
    });
}

/// Calls of all instances on a stream have one order, the same at all ranks. The stream of each
/// rank here waits in the call that the other's makes second. With `threads` a thread of its own
/// enqueues the calls of each instance.
fn in_two_orders(threads: bool) {
    on_ranks(CASE.ranks - 1, &impatient(), |world| {
        let case = Case { ranks: 2, ..CASE };
        let mut rank = Rank::new(case, world);
        let mut other = case.builder(&rank.group).on(&rank.stream).build().unwrap();
        let (me, tensors) = (rank.me(), rank.tensors(&case.input(2, rank.me())));
        // Slots of both are there before a stream waits.
        rank.group.gather(&[]).unwrap();
        let mut instances = [&mut rank.ep, &mut other];
        if me == 1 {
            instances.reverse();
        }
        for ep in instances.iter_mut().map(|ep| &mut **ep) {
            match threads {
                true => std::thread::scope(|scope| {
                    scope.spawn(|| dispatch(ep, &tensors).map(drop)).join().unwrap()
                }),
                false => dispatch(ep, &tensors).map(drop),
            }
            .unwrap();
        }
        let stalled = |error: &Error| matches!(error, Error::World(Cause::Stalled { .. }));
        let [first, second] = instances;
        match first.synchronize().unwrap_err() {
            Error::Lane(LaneError::Deadline { rank, peer, .. }) => assert_eq!((rank, peer), (me, 1 - me)),
            error => assert!(stalled(&error), "{error}"),
        }
        assert!(second.synchronize().is_err_and(|error| stalled(&error)));
        assert!(dispatch(second, &tensors).is_err_and(|error| stalled(&error)));
        until(|| rank.stream.is_done().unwrap());
    });
}

#[test]
fn calls_of_two_instances_in_two_orders_are_named_and_end() {
    on_stand_in("slots::faults::calls_of_two_instances_in_two_orders_are_named_and_end", || {
        in_two_orders(false);
    });
}

#[test]
fn calls_of_two_threads_in_two_orders_are_named_and_end() {
    on_stand_in("slots::faults::calls_of_two_threads_in_two_orders_are_named_and_end", || {
        in_two_orders(true);
    });
}

#[test]
fn streams_of_a_dropped_instance_are_released_too() {
    on_stand_in("slots::faults::streams_of_a_dropped_instance_are_released_too", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let Rank { world, group, stream, mut ep, context, .. } = Rank::new(CASE, world);
            let tensors = Tensors::of(&context, CASE, &CASE.input(2, group.rank()));
            if group.rank() == 2 {
                group.gather(&[]).unwrap();
                world.cancel();
                return;
            }
            dispatch(&mut ep, &tensors).unwrap();
            drop(ep);
            assert!(!stream.is_done().unwrap(), "rank 2 has sent nothing");
            let _ = group.gather(&[]);
            until(|| stream.is_done().unwrap());
        });
    });
}

#[test]
fn dropped_pending_calls_cancel_the_world() {
    on_stand_in("slots::faults::dropped_pending_calls_cancel_the_world", || {
        [false, true].into_iter().for_each(dropped);
    });
}

/// Rank 1 drops a call that it has started: a dispatch or a combine.
fn dropped(in_combine: bool) {
    let built = std::sync::Barrier::new(CASE.ranks as usize);
    on_ranks(CASE.ranks, &options(), |world| {
        let mut rank = Rank::new(CASE, world);
        let tensors = rank.tensors(&CASE.input(2, rank.me()));
        built.wait();
        match rank.me() {
            1 if in_combine => {
                let (_, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
                drop(rank.ep.start_combine(handle.output().unwrap(), &handle).unwrap());
            }
            1 => {
                let ranges = tensors.ranges();
                let (x, choices) = call(&ranges);
                drop(rank.ep.start_dispatch(x, choices).unwrap());
            }
            // The world may end before all of it is enqueued.
            _ => _ = rank.layer(&tensors),
        }
        failed(&rank.world);
        assert_eq!(rank.ep.synchronize(), Err(Error::World(Cause::Cancelled { by: 1 })));
    });
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn dead_slots_thread_is_named_on_all_ranks_and_streams_go_on() {
    on_stand_in("slots::faults::dead_slots_thread_is_named_on_all_ranks_and_streams_go_on", || {
        on_nodes(&[0, 1, 1], &options(), |world| {
            let mut rank = Rank::new(CASE, world);
            let tensors = rank.tensors(&CASE.input(2, rank.me()));
            rank.group.gather(&[]).unwrap();
            let (thread, message) = ("sidelane-slots-0".into(), "told to".into());
            let died = Error::World(Cause::Panicked { by: 0, thread, message });
            if rank.me() == 0 {
                panic_in("sidelane-slots-0");
            } else if let Err(error) = dispatch(&mut rank.ep, &tensors) {
                // The thread of rank 0 may die before this rank calls.
                assert_eq!(error, died);
            }
            failed(&rank.world);
            assert_eq!(rank.ep.synchronize(), Err(died));
        });
    });
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn streams_are_released_although_the_thread_that_does_it_dies() {
    on_stand_in("slots::faults::streams_are_released_although_the_thread_that_does_it_dies", || {
        panic_in("sidelane-drain-1");
        on_ranks(CASE.ranks, &options(), |world| {
            let Rank { world, group, stream, mut ep, context, .. } = Rank::new(CASE, world);
            let tensors = Tensors::of(&context, CASE, &CASE.input(2, group.rank()));
            if group.rank() == 2 {
                group.gather(&[]).unwrap();
                world.cancel();
                return;
            }
            dispatch(&mut ep, &tensors).unwrap();
            let _ = group.gather(&[]);
            until(|| stream.is_done().unwrap());
        });
    });
}
