//! Survivors that meet again in the next epoch.

use std::time::{Duration, Instant};

use crate::bootstrap::common::{LONG, REBUILDS, Signal, death, each, identity, place, timeouts, world};
use sidelane::{
    bootstrap::{Hub, Timeouts, connect, threads},
    error::{BootstrapError, Cause, LostReason},
};

#[test]
fn the_survivors_meet_again_without_the_lost_rank() {
    for victim in [0u32, 2] {
        let seen = each(world(4), |hub| {
            let me = hub.rank();
            hub.barrier("start", me, 4, LONG).unwrap();
            if me == victim {
                hub.abandon();
                return None;
            }
            assert_eq!(death(&*hub), Cause::Lost { rank: victim, how: LostReason::Closed });
            let (next, old) = hub.rebuild(LONG, 1).unwrap();
            assert_eq!((next.size(), next.epoch() >= 1), (3, true));
            assert_eq!(old[next.rank() as usize], me);
            drop(hub);
            next.health().check().unwrap();
            let blobs = next.gather("again", next.rank(), 3, &[me as u8], LONG).unwrap();
            next.barrier("end", next.rank(), 3, LONG).unwrap();
            Some((old, blobs))
        });
        let survivors: Vec<u32> = (0..4).filter(|&rank| rank != victim).collect();
        let blobs: Vec<Vec<u8>> = survivors.iter().map(|&rank| vec![rank as u8]).collect();
        for (rank, seen) in seen.into_iter().enumerate() {
            let expected = (rank as u32 != victim).then(|| (survivors.clone(), blobs.clone()));
            assert_eq!(seen, expected, "rank {rank}");
        }
    }
}

#[test]
fn a_living_world_is_rebuilt_with_everyone_and_again() {
    let seen = each(world(3), |hub| {
        let me = hub.rank();
        hub.barrier("start", me, 3, LONG).unwrap();
        let (first, _) = hub.rebuild(LONG, 1).unwrap();
        assert!(matches!(hub.health().cause(), Some(Cause::Cancelled { .. })));
        drop(hub);
        first.barrier("between", me, 3, LONG).unwrap();
        let (second, old) = first.rebuild(LONG, 1).unwrap();
        drop(first);
        second.barrier("end", me, 3, LONG).unwrap();
        // A connection that a loaded machine loses costs an epoch.
        (second.rank(), second.epoch() >= 2, old)
    });
    assert_eq!(seen, (0..3).map(|rank| (rank, true, vec![0, 1, 2])).collect::<Vec<_>>());
}

#[test]
fn a_rank_that_comes_too_late_to_a_rebuild_is_told_that_it_is_out() {
    let place = place();
    let quick =
        timeouts().with_liveness(Duration::from_millis(200)).with_heartbeat(Duration::from_millis(20));
    let hubs = each(vec![0, 1, 2], |rank| connect(&identity(rank, 3, &place), None, quick).unwrap());
    let done = Signal::default();
    let seen = each(hubs, |hub| {
        let me = hub.rank();
        hub.barrier("start", me, 3, LONG).unwrap();
        hub.cancel(Cause::Cancelled { by: me });
        if me == 2 {
            done.wait_for(2);
            return hub.rebuild(LONG, 1).map(|_| ()).unwrap_err();
        }
        let (next, old) = hub.rebuild(LONG, 1).unwrap();
        assert_eq!(old, [0, 1]);
        done.raise();
        // The new world serves on while the late comer is turned away.
        let error = next.get("never", Duration::from_secs(1)).unwrap_err();
        next.barrier("end", me, 2, LONG).unwrap();
        error
    });
    let evicted = |error: &BootstrapError| {
        matches!(error, BootstrapError::World(Cause::Evicted { rank: 2, epoch: 1.. }))
    };
    assert!(evicted(&seen[2]), "{:?}", seen[2]);
    assert!(seen[..2].iter().all(|error| matches!(error, BootstrapError::Deadline { .. })), "{seen:?}");
}

#[test]
fn a_survivor_alone_does_not_mistake_silence_for_death() {
    let given_up = Signal::default();
    let seen = each(world(2), |hub| {
        hub.barrier("start", hub.rank(), 2, LONG).unwrap();
        if hub.rank() == 0 {
            let error = hub.rebuild(Duration::from_millis(300), 1).map(|_| ()).unwrap_err();
            given_up.raise();
            return Some(error);
        }
        // Alive, and taking no part.
        given_up.wait_for(1);
        None
    });
    assert!(matches!(seen[0], Some(BootstrapError::RebuildFailed { epoch: 0, at_least: 1, .. })), "{seen:?}");
}

#[test]
fn the_last_survivor_goes_on_alone() {
    let seen = each(world(2), |hub| {
        hub.barrier("start", hub.rank(), 2, LONG).unwrap();
        if hub.rank() == 0 {
            hub.abandon();
            return None;
        }
        assert_eq!(death(&*hub), Cause::Lost { rank: 0, how: LostReason::Closed });
        let (next, old) = hub.rebuild(LONG, 1).unwrap();
        next.barrier("alone", 0, 1, LONG).unwrap();
        Some((next.rank(), next.size(), old))
    });
    assert_eq!(seen, [None, Some((0, 1, vec![1]))]);
}

#[test]
fn threads_rebuild_as_processes_do() {
    let seen = each(threads(4, Timeouts::default()), |hub| {
        let me = hub.rank();
        hub.barrier("start", me, 4, LONG).unwrap();
        if me == 1 {
            hub.abandon();
            return None;
        }
        assert_eq!(death(&*hub), Cause::Lost { rank: 1, how: LostReason::Closed });
        let (next, old) = hub.rebuild(LONG, 1).unwrap();
        drop(hub);
        let ranks = next.gather("again", next.rank(), 3, &[me as u8], LONG).unwrap();
        next.barrier("end", next.rank(), 3, LONG).unwrap();
        Some((next.epoch(), old, ranks.concat()))
    });
    let expected = Some((1, vec![0, 2, 3], vec![0, 2, 3]));
    assert_eq!(seen, [expected.clone(), None, expected.clone(), expected]);
}

#[test]
fn a_thread_that_comes_too_late_to_a_rebuild_is_told_that_it_is_out() {
    let quick = Timeouts::default().with_liveness(Duration::from_millis(100));
    let done = Signal::default();
    let seen = each(threads(3, quick), |hub| {
        hub.cancel(Cause::Cancelled { by: 0 });
        if hub.rank() == 2 {
            done.wait_for(2);
            return hub.rebuild(LONG, 1).map(|(_, old)| old);
        }
        let rebuilt = hub.rebuild(LONG, 1).map(|(_, old)| old);
        done.raise();
        rebuilt
    });
    let evicted = Err(BootstrapError::World(Cause::Evicted { rank: 2, epoch: 1 }));
    assert_eq!(seen, [Ok(vec![0, 1]), Ok(vec![0, 1]), evicted]);
}

/// Rank 3 dies, and rank 2 while the next world is built. Returns the world of the others.
fn lose_another_while_building(hubs: Vec<Box<dyn Hub>>) -> Vec<Option<(bool, Vec<u32>)>> {
    each(hubs, |hub| {
        let me = hub.rank();
        hub.barrier("start", me, 4, LONG).unwrap();
        if me == 3 {
            hub.abandon();
            return None;
        }
        assert_eq!(death(&*hub), Cause::Lost { rank: 3, how: LostReason::Closed });
        let (next, _) = hub.rebuild(LONG, 2).unwrap();
        assert_eq!((next.size(), next.epoch() >= 1), (3, true));
        if me == 2 {
            next.abandon();
            return None;
        }
        let error = next.gather("memory", me, 3, &[], LONG).unwrap_err();
        assert_eq!(error, BootstrapError::World(Cause::Lost { rank: 2, how: LostReason::Closed }));
        // As a world does that cannot be built.
        drop(next);
        let (next, old) = hub.rebuild(LONG, 2).unwrap();
        next.barrier("end", next.rank(), 2, LONG).unwrap();
        Some((next.epoch() >= 2, old))
    })
}

#[test]
fn rank_lost_while_the_next_world_is_built_costs_an_epoch_and_no_survivor() {
    let expected = Some((true, vec![0, 1]));
    let seen = lose_another_while_building(world(4));
    assert_eq!(seen, [expected.clone(), expected.clone(), None, None]);
    let seen = lose_another_while_building(threads(4, timeouts()));
    assert_eq!(seen, [expected.clone(), expected, None, None], "threads");
}

#[test]
fn fewer_survivors_than_are_wanted_make_no_world() {
    let met = |hubs: Vec<Box<dyn Hub>>| {
        let seen = each(hubs, |hub| {
            let me = hub.rank();
            hub.barrier("start", me, 3, LONG).unwrap();
            if me == 1 {
                hub.abandon();
                return None;
            }
            let error = hub.rebuild(Duration::from_millis(500), 3).map(|_| ()).unwrap_err();
            let (next, old) = hub.rebuild(LONG, 2).unwrap();
            next.barrier("end", next.rank(), 2, LONG).unwrap();
            Some((error, old))
        });
        for (error, old) in seen.into_iter().flatten() {
            assert!(matches!(error, BootstrapError::RebuildFailed { epoch: 0, at_least: 3, .. }), "{error}");
            assert_eq!(old, [0, 2]);
        }
    };
    met(world(3));
    met(threads(3, timeouts()));
}

/// Loses a rank, and then the host of the next world as soon as that begins.
fn lose_two_of_many(hubs: Vec<Box<dyn Hub>>, what: &str) {
    let (size, victim) = (hubs.len() as u32, hubs.len() as u32 / 3);
    let lost = Instant::now();
    let seen = each(hubs, |hub| {
        let me = hub.rank();
        if me == victim {
            hub.abandon();
            return None;
        }
        death(&*hub);
        let (first, _) = hub.rebuild(LONG, 1).unwrap();
        if first.rank() == 0 {
            first.abandon();
            return None;
        }
        let first_took = lost.elapsed();
        death(&*first);
        let (second, old) = first.rebuild(LONG, 1).unwrap();
        second.barrier("end", second.rank(), size - 2, LONG).unwrap();
        Some((second.epoch(), second.size(), old.len(), first_took, lost.elapsed()))
    });
    let seen: Vec<_> = seen.into_iter().flatten().collect();
    assert_eq!(seen.len() as u32, size - 2);
    let whole = |&(epoch, met, old, ..): &(u16, u32, usize, _, _)| {
        epoch >= 2 && met == size - 2 && old as u32 == size - 2
    };
    assert!(seen.iter().all(whole), "{seen:?}");
    let slowest = seen.iter().map(|seen| (seen.3, seen.4)).max();
    println!("{size} ranks, {what}: the slowest was in its first world after {:?} at most", slowest);
}

#[test]
fn many_ranks_meet_again_and_again() {
    let size = if std::env::var_os(REBUILDS).is_some() { 300 } else { 40 };
    lose_two_of_many(world(size), "sockets");
    lose_two_of_many(threads(size, timeouts()), "threads");
}
