//! Worlds that take spares in.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::bootstrap::common::{LONG, Place, Signal, each, identity, place, timeouts};
use sidelane::{
    bootstrap::{self, Hub, Secret, Setting, connect},
    error::{BootstrapError, Cause, Error},
};

/// Ranks of a test, each with its part: a place in the first world, or that of a spare.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Rank(u32),
    Spare,
    /// Another spare.
    Other,
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

/// Settings with a heap of this size.
fn heap(bytes: u64) -> Vec<Setting> {
    let setting = |name: &str, value: String| Setting { name: name.to_owned(), value };
    vec![setting("SIDELANE_HEAP", bytes.to_string()), setting("SIDELANE_NET", "auto".to_owned())]
}

type Grown = (Box<dyn Hub>, Vec<u32>);

fn spare(place: &Place, secret: &Secret, deadline: Duration) -> Result<Grown, BootstrapError> {
    bootstrap::spare(&identity(0, 1, place), Some(secret.clone()), timeouts(), &heap(1), deadline)
}

fn grow(hub: &dyn Hub, deadline: Duration) -> Result<Grown, Error> {
    hub.grow(deadline, &heap(1))?.complete(Ok)
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
            let (next, old) = match part {
                Part::Spare | Part::Other => spare(&place, &secret, LONG).unwrap(),
                Part::Rank(rank) => {
                    let hub = connect(&identity(rank, 3, &place), Some(secret.clone()), timeouts()).unwrap();
                    hub.barrier("start", rank, 3, LONG).unwrap();
                    grow(&*hub, LONG).unwrap()
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
        let hub = match part {
            Part::Spare | Part::Other => spare(&place, &secret, 3 * LONG).unwrap().0,
            Part::Rank(rank) => {
                let hub = connect(&identity(rank, 3, &place), Some(secret.clone()), timeouts()).unwrap();
                hub.barrier("start", rank, 3, LONG).unwrap();
                if rank == 1 {
                    hub.abandon();
                    return None;
                }
                let (two, _) = hub.rebuild(LONG, 2).unwrap();
                drop(hub);
                let (three, old) = grow(&*two, LONG).unwrap();
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
        let error = grow(&*hub, Duration::from_millis(100)).map(drop).unwrap_err();
        assert!(matches!(error, Error::Bootstrap(BootstrapError::NoSpare { .. })), "{error}");
        assert_eq!(hub.health().cause(), None::<Cause>);
        hub.barrier("end", rank, 2, LONG).unwrap();
    });
}

#[test]
fn spare_that_no_world_takes_in_says_where_it_asked() {
    let place = place();
    let error = spare(&place, &Secret::random().unwrap(), Duration::from_millis(200)).map(drop);
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
            let grown = grow(&*hub, Duration::from_secs(5)).map(drop);
            hub.barrier("end", nth, 2, LONG).unwrap();
            grown
        }
        2 => spare(&place, &Secret::random().unwrap(), LONG).map(drop).map_err(Error::from),
        _ => {
            let limit = Duration::from_secs(2);
            spare(&other_job, &secret, limit).map(drop).map_err(Error::from)
        }
    });
    let seen: Vec<_> = seen.into_iter().map(|seen| bootstrap_error(seen.unwrap_err())).collect();
    assert!(matches!(seen[0], BootstrapError::NoSpare { .. }), "{seen:?}");
    assert!(matches!(seen[1], BootstrapError::NoSpare { .. }), "{seen:?}");
    assert!(matches!(seen[2], BootstrapError::WrongSecret { .. }), "{seen:?}");
    assert!(matches!(seen[3], BootstrapError::NotTakenIn { .. }), "{seen:?}");
}

fn bootstrap_error(error: Error) -> BootstrapError {
    match error {
        Error::Bootstrap(error) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn spare_with_another_setting_is_refused_by_name_and_another_one_is_taken_in() {
    let (place, secret) = (place(), Secret::random().unwrap());
    let refused = Signal::default();
    let seen = each(vec![Part::Rank(0), Part::Rank(1), Part::Spare, Part::Other], |part| {
        let (next, _) = match part {
            Part::Rank(rank) => {
                let hub = connect(&identity(rank, 2, &place), Some(secret.clone()), timeouts()).unwrap();
                hub.barrier("start", rank, 2, LONG).unwrap();
                grow(&*hub, LONG).unwrap()
            }
            Part::Spare => {
                refused.wait_for(1);
                spare(&place, &secret, LONG).unwrap()
            }
            Part::Other => {
                let (identity, secret) = (identity(0, 1, &place), Some(secret.clone()));
                let error = bootstrap::spare(&identity, secret, timeouts(), &heap(2), LONG).map(drop);
                refused.raise();
                return Err(error.unwrap_err());
            }
        };
        Ok(gathered(&*next, "grown", next.rank() as u8))
    });
    let setting = "SIDELANE_HEAP".to_owned();
    let (other, ours) = ("2".to_owned(), "1".to_owned());
    let refusal = BootstrapError::SettingsDiffer { setting, seen: other, expected: ours };
    assert_eq!(seen, [Ok(vec![0, 1, 2]), Ok(vec![0, 1, 2]), Ok(vec![0, 1, 2]), Err(refusal)]);
}

#[test]
fn world_lives_on_without_a_spare_of_other_settings() {
    let (place, secret) = (place(), Secret::random().unwrap());
    let ended = AtomicBool::new(false);
    let seen = each(vec![Part::Rank(0), Part::Rank(1), Part::Other], |part| match part {
        Part::Rank(rank) => {
            let hub = connect(&identity(rank, 2, &place), Some(secret.clone()), timeouts()).unwrap();
            hub.barrier("start", rank, 2, LONG).unwrap();
            // A machine that does other work may need more than one growth to refuse it.
            loop {
                let error = bootstrap_error(grow(&*hub, Duration::from_secs(1)).map(drop).unwrap_err());
                let ended = gathered(&*hub, "ended", u8::from(ended.load(Ordering::SeqCst)));
                if ended == [1, 1] || !matches!(error, BootstrapError::NoSpare { .. }) {
                    return error;
                }
            }
        }
        _ => {
            let (identity, secret) = (identity(0, 1, &place), Some(secret.clone()));
            let error = bootstrap::spare(&identity, secret, timeouts(), &heap(2), LONG).map(drop);
            ended.store(true, Ordering::SeqCst);
            error.unwrap_err()
        }
    });
    assert!(matches!(seen[0], BootstrapError::NoSpare { .. }), "{seen:?}");
    assert!(matches!(seen[1], BootstrapError::NoSpare { .. }), "{seen:?}");
    assert!(matches!(&seen[2], BootstrapError::SettingsDiffer { setting, .. } if setting == "SIDELANE_HEAP"));
}

#[test]
fn spare_lost_while_parts_are_built_is_named_and_the_old_world_grows_again() {
    let (place, secret) = (place(), Secret::random().unwrap());
    let lost = Signal::default();
    let seen = each(vec![Part::Rank(0), Part::Rank(1), Part::Rank(2), Part::Spare, Part::Other], |part| {
        let hub = match part {
            Part::Rank(rank) => {
                let hub = connect(&identity(rank, 3, &place), Some(secret.clone()), timeouts()).unwrap();
                hub.barrier("start", rank, 3, LONG).unwrap();
                let growth = hub.grow(LONG, &heap(1)).unwrap();
                // The spare never comes to this step.
                let build = |(next, _): Grown| Ok(next.barrier("built", rank, 4, LONG)?);
                let error = bootstrap_error(growth.complete(build).unwrap_err());
                assert!(matches!(error, BootstrapError::SpareLost { rank: 3, .. }), "{error}");
                assert_eq!(gathered(&*hub, "old", rank as u8), [0, 1, 2]);
                if rank == 0 {
                    lost.raise();
                }
                hub
            }
            Part::Spare => {
                spare(&place, &secret, LONG).unwrap().0.abandon();
                return None;
            }
            Part::Other => {
                lost.wait_for(1);
                let (four, old) = spare(&place, &secret, LONG).unwrap();
                four.barrier("grown", 3, 4, LONG).unwrap();
                assert_eq!(old, [0, 1, 2]);
                return Some((four.epoch(), gathered(&*four, "last", 9)));
            }
        };
        let (four, _) = grow(&*hub, LONG).unwrap();
        four.barrier("grown", four.rank(), 4, LONG).unwrap();
        Some((four.epoch(), gathered(&*four, "last", four.rank() as u8)))
    });
    let (epoch, _) = seen[0].clone().unwrap();
    assert!(epoch > 1, "epoch {epoch}");
    let last = Some((epoch, vec![0, 1, 2, 9]));
    assert_eq!(seen, [last.clone(), last.clone(), last.clone(), None, last]);
}

#[test]
fn rank_that_cannot_build_its_part_is_named_and_the_old_world_grows_again() {
    let own = BootstrapError::System { call: "mmap", errno: 12 };
    for tells in [true, false] {
        let (place, secret) = (place(), Secret::random().unwrap());
        let seen = each(parts(3, 1), |part| {
            let Part::Rank(rank) = part else {
                let (next, _) = spare(&place, &secret, LONG).unwrap();
                next.barrier("built", 3, 4, LONG).unwrap_err();
                drop(next);
                let (four, _) = spare(&place, &secret, LONG).unwrap();
                return (None, gathered(&*four, "last", 9));
            };
            let hub = connect(&identity(rank, 3, &place), Some(secret.clone()), timeouts()).unwrap();
            hub.barrier("start", rank, 3, LONG).unwrap();
            let build = |(next, _): Grown| {
                if rank != 1 {
                    return Ok(next.barrier("built", rank, 4, LONG)?);
                }
                if tells {
                    next.cancel(Cause::Cancelled { by: 1 });
                }
                Err(own.clone().into())
            };
            let growth = hub.grow(LONG, &heap(1)).unwrap();
            let error = bootstrap_error(growth.complete(build).unwrap_err());
            assert_eq!(hub.health().cause(), None::<Cause>);
            assert_eq!(gathered(&*hub, "old", rank as u8), [0, 1, 2]);
            let (four, _) = grow(&*hub, LONG).unwrap();
            (Some(error), gathered(&*four, "last", rank as u8))
        });
        let expected = |error: Option<&BootstrapError>| (error.cloned(), vec![0, 1, 2, 9]);
        let not_grown = expected(Some(&BootstrapError::NotGrown { rank: 1 }));
        assert_eq!(seen, [not_grown.clone(), expected(Some(&own)), not_grown, expected(None)]);
    }
}

#[test]
fn rebuilt_world_that_did_not_grow_counts_its_majority_without_the_spare() {
    let (place, secret) = (place(), Secret::random().unwrap());
    let seen = each(parts(4, 1), |part| {
        let Part::Rank(rank) = part else {
            spare(&place, &secret, 3 * LONG).unwrap().0.abandon();
            return None;
        };
        let first = connect(&identity(rank, 4, &place), Some(secret.clone()), timeouts()).unwrap();
        first.barrier("start", rank, 4, LONG).unwrap();
        if rank == 0 {
            first.abandon();
            return None;
        }
        let (three, _) = first.rebuild(LONG, 3).unwrap();
        drop(first);
        let growth = three.grow(LONG, &heap(1)).unwrap();
        let build = |(next, _): Grown| Ok(next.barrier("built", next.rank(), 4, LONG)?);
        let error = bootstrap_error(growth.complete(build).unwrap_err());
        assert!(matches!(error, BootstrapError::SpareLost { rank: 3, .. }), "{error}");
        assert_eq!(gathered(&*three, "old", rank as u8), [1, 2, 3]);
        if rank == 2 {
            three.abandon();
            return None;
        }
        // Two of three, and two of four would be none.
        let (two, old) = three.rebuild(LONG, 2).unwrap();
        drop(three);
        Some((old, gathered(&*two, "last", rank as u8)))
    });
    let last = Some((vec![0, 2], vec![1, 3]));
    assert_eq!(seen, [None, last.clone(), None, last, None]);
}

/// Tag of a proof in a message of the rendezvous: rank 0 has greeted a spare.
const PROOF: u8 = 2;

/// Forwards connections to a port, until a proof has come back: from then on that connection stays
/// open, and its spare hears nothing more. Later connections are forwarded in both directions.
fn cutting_relay(port: u16) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let relay = listener.local_addr().unwrap().port();
    let cut = &*Box::leak(Box::new(Mutex::new(false)));
    thread::spawn(move || {
        for guest in listener.incoming() {
            let guest = guest.unwrap();
            let Ok(host) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else { continue };
            let (mut from, mut to) = (guest.try_clone().unwrap(), host.try_clone().unwrap());
            thread::spawn(move || {
                // Either side may go away.
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(std::net::Shutdown::Write);
            });
            thread::spawn(move || {
                if forward_until_greeted(host, &guest, cut) {
                    // Not even the end of the host's stream reaches the spare.
                    std::mem::forget(guest);
                }
            });
        }
    });
    relay
}

/// Returns at the end of the host's stream, or the guest's: whether the guest was cut off.
fn forward_until_greeted(mut host: TcpStream, mut guest: &TcpStream, cut: &Mutex<bool>) -> bool {
    let mut is_cut = false;
    while let Ok(frame) = read_frame(&mut host) {
        if !is_cut && guest.write_all(&frame).is_err() {
            break;
        }
        if frame.get(4) == Some(&PROOF) {
            is_cut = !std::mem::replace(&mut *cut.lock().unwrap(), true);
        }
    }
    is_cut
}

/// A message with its length before it.
fn read_frame(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut frame = length.to_vec();
    frame.resize(4 + u32::from_le_bytes(length) as usize, 0);
    stream.read_exact(&mut frame[4..])?;
    Ok(frame)
}

#[test]
fn spare_that_is_cut_off_from_rank_0_asks_again_and_is_taken_in() {
    let (place, secret) = (narrow(), Secret::random().unwrap());
    let behind = Place { ports: vec![cutting_relay(place.ports[0])], ..place.clone() };
    let seen = each(parts(2, 1), |part| {
        let (next, old) = match part {
            Part::Spare | Part::Other => spare(&behind, &secret, 10 * LONG).unwrap(),
            Part::Rank(rank) => {
                let hub = connect(&identity(rank, 2, &place), Some(secret.clone()), timeouts()).unwrap();
                hub.barrier("start", rank, 2, LONG).unwrap();
                let error = bootstrap_error(grow(&*hub, LONG).map(drop).unwrap_err());
                assert!(matches!(error, BootstrapError::SpareLost { rank: 2, .. }), "{error}");
                grow(&*hub, LONG).unwrap()
            }
        };
        (old, gathered(&*next, "grown", next.rank() as u8))
    });
    assert_eq!(seen, vec![(vec![0, 1], vec![0, 1, 2]); 3]);
}
