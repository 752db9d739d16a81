//! Worlds that take spares in.

use std::time::Duration;

use crate::common::{LONG, Place, each, identity, place, timeouts};
use sidelane::{
    bootstrap::{Hub, Secret, connect, spare},
    error::{BootstrapError, Cause},
};

/// Ranks of a test, each with its part: a place in the first world, or that of a spare.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Rank(u32),
    Spare,
}

fn parts(ranks: u32, spares: usize) -> Vec<Part> {
    (0..ranks).map(Part::Rank).chain(vec![Part::Spare; spares]).collect()
}

/// A meeting point with one port, as a launcher gives it: the first world holds it.
fn narrow() -> Place {
    let mut place = place();
    place.ports.truncate(1);
    place
}

/// Blobs of all ranks, in their order.
fn gathered(hub: &dyn Hub, key: &str, own: u8) -> Vec<u8> {
    hub.gather(key, hub.rank(), hub.size(), &[own], LONG).unwrap().concat()
}

#[test]
fn spares_are_behind_the_old_ranks_in_a_later_epoch() {
    for place in [place(), narrow()] {
        let secret = Secret::random().unwrap();
        let seen = each(parts(3, 1), |part| {
            let secret = Some(secret.clone());
            let (next, old) = match part {
                Part::Spare => spare(&identity(0, 1, &place), secret, timeouts(), LONG).unwrap(),
                Part::Rank(rank) => {
                    let hub = connect(&identity(rank, 3, &place), secret, timeouts()).unwrap();
                    hub.barrier("start", rank, 3, LONG).unwrap();
                    hub.grow(LONG).unwrap()
                }
            };
            let own = if let Part::Rank(rank) = part { rank as u8 } else { 9 };
            let blobs = gathered(&*next, "grown", own);
            next.barrier("end", next.rank(), next.size(), LONG).unwrap();
            (next.rank(), next.epoch() >= 1, old, blobs)
        });
        let expected = |rank| (rank, true, vec![0, 1, 2], vec![0, 1, 2, 9]);
        assert_eq!(seen, (0..4).map(expected).collect::<Vec<_>>());
    }
}

#[test]
fn world_that_lost_a_rank_grows_and_loses_its_host_and_goes_on() {
    let (place, secret) = (place(), Secret::random().unwrap());
    let seen = each(parts(3, 1), |part| {
        let secret = Some(secret.clone());
        let hub = match part {
            Part::Spare => spare(&identity(0, 1, &place), secret, timeouts(), 3 * LONG).unwrap().0,
            Part::Rank(rank) => {
                let hub = connect(&identity(rank, 3, &place), secret, timeouts()).unwrap();
                hub.barrier("start", rank, 3, LONG).unwrap();
                if rank == 1 {
                    hub.abandon();
                    return None;
                }
                let (two, _) = hub.rebuild(LONG, 2).unwrap();
                drop(hub);
                let (three, old) = two.grow(LONG).unwrap();
                assert_eq!((three.size(), old), (3, vec![0, 1]));
                three
            }
        };
        hub.barrier("grown", hub.rank(), 3, LONG).unwrap();
        if part == Part::Rank(0) {
            hub.abandon();
            return None;
        }
        // The spare is a survivor like any other.
        let (last, old) = hub.rebuild(LONG, 2).unwrap();
        drop(hub);
        let own = if part == Part::Spare { 9 } else { 2 };
        Some((last.rank(), old, gathered(&*last, "last", own)))
    });
    let expected = |rank| Some((rank, vec![1, 2], vec![2, 9]));
    assert_eq!(seen, [None, None, expected(0), expected(1)]);
}

#[test]
fn world_without_a_spare_stays_as_it_is() {
    let (place, secret) = (place(), Secret::random().unwrap());
    each(parts(2, 0), |part| {
        let Part::Rank(rank) = part else { unreachable!("there is no spare") };
        let hub = connect(&identity(rank, 2, &place), Some(secret.clone()), timeouts()).unwrap();
        hub.barrier("start", rank, 2, LONG).unwrap();
        let error = hub.grow(Duration::from_millis(100)).map(drop).unwrap_err();
        assert!(matches!(error, BootstrapError::NoSpare { .. }), "{error}");
        assert_eq!(hub.health().cause(), None::<Cause>);
        hub.barrier("end", rank, 2, LONG).unwrap();
    });
}

#[test]
fn spare_that_no_world_takes_in_says_where_it_asked() {
    let place = place();
    let secret = Some(Secret::random().unwrap());
    let error = spare(&identity(0, 1, &place), secret, timeouts(), Duration::from_millis(200)).map(drop);
    let Err(BootstrapError::NotTakenIn { address, .. }) = error else { panic!("{error:?}") };
    assert!(address.contains(&place.ports[0].to_string()), "{address}");
}

#[test]
fn spares_of_another_job_or_with_another_secret_are_refused() {
    let (place, secret) = (place(), Secret::random().unwrap());
    let other_job = Place { job: "another job".to_owned(), ..place.clone() };
    let seen = each(vec![0, 1, 2, 3], |nth| match nth {
        0 | 1 => {
            let hub = connect(&identity(nth, 2, &place), Some(secret.clone()), timeouts()).unwrap();
            hub.barrier("start", nth, 2, LONG).unwrap();
            let grown = hub.grow(Duration::from_secs(5)).map(drop);
            hub.barrier("end", nth, 2, LONG).unwrap();
            grown
        }
        2 => spare(&identity(0, 1, &place), Some(Secret::random().unwrap()), timeouts(), LONG).map(drop),
        _ => {
            let limit = Duration::from_secs(2);
            spare(&identity(0, 1, &other_job), Some(secret.clone()), timeouts(), limit).map(drop)
        }
    });
    assert!(matches!(seen[0], Err(BootstrapError::NoSpare { .. })), "{seen:?}");
    assert!(matches!(seen[1], Err(BootstrapError::NoSpare { .. })), "{seen:?}");
    assert!(matches!(seen[2], Err(BootstrapError::WrongSecret { .. })), "{seen:?}");
    assert!(matches!(seen[3], Err(BootstrapError::NotTakenIn { .. })), "{seen:?}");
}
